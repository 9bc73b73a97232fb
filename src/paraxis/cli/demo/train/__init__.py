"""A training run that is told to stop in the middle, and goes on: the same bits as without.

A checkpoint has the parameters, the optimiser's state, the random key, how many batches were taken, and the averages
shown so far. Which rows a batch has, what Dropout leaves out and the learning rate are functions of these: nothing else
has to be saved, on any number of devices.
"""

from paraxis.cli.demo.train._chapter import run

__all__ = ["run"]
