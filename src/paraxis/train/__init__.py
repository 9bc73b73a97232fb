"""One function of the whole batch, divided by the compiler: training steps, and what a run of them needs."""

from paraxis.train._checkpoints import Checkpoints, Restored, SaveDecision
from paraxis.train._evaluate import Evaluate, StopEarly
from paraxis.train._events import Callback, Event
from paraxis.train._fit import Fitted, TrainingStopped, fit
from paraxis.train._history import History, Record
from paraxis.train._loader import Loader, loader
from paraxis.train._loss import Mean
from paraxis.train._sources import Batches
from paraxis.train._state import TrainState
from paraxis.train._step import Step, eval_step, train_step

__all__ = [
    "Batches",
    "Callback",
    "Checkpoints",
    "Evaluate",
    "Event",
    "Fitted",
    "History",
    "Loader",
    "Mean",
    "Record",
    "Restored",
    "SaveDecision",
    "Step",
    "StopEarly",
    "TrainState",
    "TrainingStopped",
    "eval_step",
    "fit",
    "loader",
    "train_step",
]
