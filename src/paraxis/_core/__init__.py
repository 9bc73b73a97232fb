"""The idea itself: an axis, its devices, its rows, and maps, reductions and collectives along it.

It is the only room that knows meshes and ``shard_map``. Only ``jax_api`` uses parts of JAX that move between versions.
"""
