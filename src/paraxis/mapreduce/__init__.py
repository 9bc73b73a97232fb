"""Programs: the core's verbs, bound to a program's axes."""

from paraxis.mapreduce._program import Program, program

__all__ = ["Program", "program"]
