"""Programs: the core's verbs, bound to a program's axes; and ``pmap``, over ``map_fn``."""

from paraxis.mapreduce._pmap import pmap
from paraxis.mapreduce._program import Program, program

__all__ = ["Program", "pmap", "program"]
