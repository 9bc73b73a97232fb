"""The idea itself: an axis, where it lies, and the verbs that move values along it.

This is the only room that knows meshes, shardings, ``shard_map`` and collectives.
"""
