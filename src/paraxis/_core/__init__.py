"""The idea itself: maps, reductions and collectives along an axis as parts of a JAX program, and the verbs for them.

With the rooms that it stands on, ``_axes`` and ``_jax``, it is the only one that knows meshes and ``shard_map``.
"""
