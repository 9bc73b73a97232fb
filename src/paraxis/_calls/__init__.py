"""How calls are refused: what callers give, checked, and one tree of errors. It knows JAX and NumPy only."""
