"""Tools for any JAX program, whatever it means: read it, change it, use it as a key, compile it for other devices.

Nothing here knows an axis. Only ``jax_api`` uses parts of JAX that change between versions.
"""
