"""How calls are refused: what callers give, checked. It knows JAX and NumPy only."""
