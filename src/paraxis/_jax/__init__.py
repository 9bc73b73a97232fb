"""What is true of any program of JAX's, whatever it means: read, changed, used as a key, compiled for other devices.

Nothing here knows an axis. Only ``jax_api`` uses parts of JAX that change between versions.
"""
