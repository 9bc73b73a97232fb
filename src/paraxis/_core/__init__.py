"""The idea itself: an axis, its devices, its rows, and maps, reductions and collectives along it.

With ``_jax``, on which it stands, it is the only room that knows meshes and ``shard_map``.
"""
