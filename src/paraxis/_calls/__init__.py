"""Checks of what callers give, and the errors that refuse it. They know JAX and NumPy only."""
