"""Paraxis puts an axis of a JAX program on as many devices as there are.

The root has the axis, programs, verbs, collectives, and the names with which most uses of a front end begin. All others
are in their rooms, each of which is loaded when it is first used: ``px.ensembles``, ``px.errors``, ``px.launch``,
``px.reports``, ``px.solve``, ``px.streaming``, ``px.testing``, ``px.train``, ``px.transforms``.
"""

import importlib
import typing

from paraxis._core.placing import Axis
from paraxis._core.pmap import all_gather, axis_index, axis_size, pick, pmap, pmax, pmean, pmin, psum
from paraxis._core.program import program
from paraxis._core.reductions import (
    reduce_all,
    reduce_any,
    reduce_max,
    reduce_mean,
    reduce_min,
    reduce_sum,
    reduce_weighted_mean,
)
from paraxis._core.verbs import broadcast, gather, keys, map_fn, scatter
from paraxis.errors import (  # under the names that a traceback shows; px.errors lists them
    AxisError as AxisError,
    CheckpointError as CheckpointError,
    CommunicationError as CommunicationError,
    DataError as DataError,
    DeviceError as DeviceError,
    NonFiniteError as NonFiniteError,
    ParaxisError,
    StateError as StateError,
)

if typing.TYPE_CHECKING:
    from paraxis import (
        ensembles as ensembles,
        errors as errors,
        launch as launch,
        reports as reports,
        solve as solve,
        streaming as streaming,
        testing as testing,
        train as train,
        transforms as transforms,
    )
    from paraxis._tables import Table
    from paraxis.ensembles import Ensemble, ensemble
    from paraxis.launch import initialize
    from paraxis.reports import balance, compare, explain, show, tabulate
    from paraxis.streaming import Groups, Stream, ray_map, retrying
    from paraxis.testing import simulate_devices
    from paraxis.train import (
        Checkpoints,
        Evaluate,
        Mean,
        StopEarly,
        TrainingStopped,
        TrainState,
        eval_step,
        fit,
        loader,
        train_step,
    )
    from paraxis.transforms import (
        GradValues,
        Jit,
        Optimizer,
        Parallel,
        Vectorize,
        variables,
    )

__version__ = "0.4.0"

__all__ = [
    "Axis",
    "Checkpoints",
    "Ensemble",
    "Evaluate",
    "GradValues",
    "Groups",
    "Jit",
    "Mean",
    "Optimizer",
    "Parallel",
    "ParaxisError",
    "StopEarly",
    "Stream",
    "Table",
    "TrainState",
    "TrainingStopped",
    "Vectorize",
    "all_gather",
    "axis_index",
    "axis_size",
    "balance",
    "broadcast",
    "compare",
    "ensemble",
    "eval_step",
    "explain",
    "fit",
    "gather",
    "initialize",
    "keys",
    "loader",
    "map_fn",
    "pick",
    "pmap",
    "pmax",
    "pmean",
    "pmin",
    "program",
    "psum",
    "ray_map",
    "reduce_all",
    "reduce_any",
    "reduce_max",
    "reduce_mean",
    "reduce_min",
    "reduce_sum",
    "reduce_weighted_mean",
    "retrying",
    "scatter",
    "show",
    "simulate_devices",
    "tabulate",
    "train_step",
    "variables",
]

# What needs a framework besides JAX, or is large, is loaded when it is first used.
_ROOMS = ("ensembles", "errors", "launch", "reports", "solve", "streaming", "testing", "train", "transforms")
_ROOM_OF = {
    **dict.fromkeys(("Ensemble", "ensemble"), "ensembles"),
    "Table": "_tables",
    "initialize": "launch",
    "simulate_devices": "testing",
    **dict.fromkeys(("Groups", "Stream", "ray_map", "retrying"), "streaming"),
    **dict.fromkeys(("balance", "compare", "explain", "show", "tabulate"), "reports"),
    **dict.fromkeys(("Checkpoints", "Evaluate", "Mean", "StopEarly", "TrainState", "TrainingStopped"), "train"),
    **dict.fromkeys(("eval_step", "fit", "loader", "train_step"), "train"),
    **dict.fromkeys(("GradValues", "Jit", "Optimizer", "Parallel", "Vectorize"), "transforms"),
    "variables": "transforms",
}


if not typing.TYPE_CHECKING:  # to type checkers, a name that is not imported above is a mistake

    def __getattr__(name):
        room = name if name in _ROOMS else _ROOM_OF.get(name)
        if room is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
        module = importlib.import_module(f"paraxis.{room}")
        value = module if name == room else getattr(module, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS, "__version__"])
