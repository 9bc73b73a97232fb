"""Logistic regression on digits that stay in files: read in turns, stopped, gone on with to the same bits.

The engine says how many rows are read at once. The model is that of all rows in memory, to rounding; and a run that is
saved in a folder continues after the last iteration that is there.
"""

from paraxis.cli.demo.stream._chapter import run

__all__ = ["run"]
