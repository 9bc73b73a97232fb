"""One function of the whole batch, divided by the compiler: training steps, and what a run of them needs."""

import typing

from paraxis._calls import arguments
from paraxis.train._batches import Batch
from paraxis.train.data._loader import Loader, loader
from paraxis.train.runs._evaluate import Evaluate
from paraxis.train.runs._events import Event
from paraxis.train.runs._fit import Fitted, fit
from paraxis.train.runs._history import History, Record
from paraxis.train.runs._stopping import StopEarly, TrainingStopped
from paraxis.train.steps._eval_step import eval_step
from paraxis.train.steps._mean import Mean
from paraxis.train.steps._state import TrainState
from paraxis.train.steps._step import train_step

if typing.TYPE_CHECKING:
    from paraxis.train.checkpoints._checkpoints import Checkpoints, Restored

__all__ = [
    "Batch",
    "Checkpoints",
    "Evaluate",
    "Event",
    "Fitted",
    "History",
    "Loader",
    "Mean",
    "Record",
    "Restored",
    "StopEarly",
    "TrainState",
    "TrainingStopped",
    "eval_step",
    "fit",
    "loader",
    "train_step",
]


if not typing.TYPE_CHECKING:  # to type checkers, a name that is not imported above is a mistake

    def __getattr__(name):
        """Checkpoints are loaded when they are first used: Orbax takes a second or two."""
        if name not in ("Checkpoints", "Restored"):
            raise arguments.no_attribute("px.train", name, __all__)
        from paraxis.train.checkpoints import _checkpoints

        return getattr(_checkpoints, name)
