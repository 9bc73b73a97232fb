"""Paraxis puts an axis of a JAX program on as many devices as there are."""

import importlib
import typing

from paraxis._calls.errors import (
    AxisError,
    CheckpointError,
    CollectiveError,
    CommunicationError,
    DataError,
    DeviceError,
    LoweringError,
    NonFiniteError,
    ParaxisError,
    ProcessError,
    ScopeError,
    ShapeError,
    StateError,
)
from paraxis._core.axis import Axis
from paraxis._core.collectives import all_gather, axis_index, axis_size, pmax, pmean, pmin, psum
from paraxis._core.random import keys
from paraxis._core.reductions import (
    reduce_all,
    reduce_any,
    reduce_max,
    reduce_mean,
    reduce_min,
    reduce_prod,
    reduce_sum,
    reduce_weighted_mean,
)
from paraxis._core.verbs import broadcast, gather, map_fn, scatter
from paraxis.mapreduce import pmap, program

if typing.TYPE_CHECKING:
    import paraxis.solve as solve
    from paraxis.ensembles import Ensemble, ensemble, load_ensemble, load_member
    from paraxis.launch import initialize
    from paraxis.train import (
        Checkpoints,
        Evaluate,
        Event,
        Fitted,
        Loader,
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
        Gradients,
        GradValues,
        Jit,
        Optimizer,
        Parallel,
        Variables,
        Vectorize,
        freeze,
        grad,
        value_and_grad,
        variables,
    )

__version__ = "0.1.0"

__all__ = [
    "Axis",
    "AxisError",
    "CheckpointError",
    "Checkpoints",
    "CollectiveError",
    "CommunicationError",
    "DataError",
    "DeviceError",
    "Ensemble",
    "Evaluate",
    "Event",
    "Fitted",
    "GradValues",
    "Gradients",
    "Jit",
    "Loader",
    "LoweringError",
    "Mean",
    "NonFiniteError",
    "Optimizer",
    "Parallel",
    "ParaxisError",
    "ProcessError",
    "ScopeError",
    "ShapeError",
    "StateError",
    "StopEarly",
    "TrainState",
    "TrainingStopped",
    "Variables",
    "Vectorize",
    "all_gather",
    "axis_index",
    "axis_size",
    "broadcast",
    "ensemble",
    "eval_step",
    "fit",
    "freeze",
    "gather",
    "grad",
    "initialize",
    "keys",
    "load_ensemble",
    "load_member",
    "loader",
    "map_fn",
    "pmap",
    "pmax",
    "pmean",
    "pmin",
    "program",
    "psum",
    "reduce_all",
    "reduce_any",
    "reduce_max",
    "reduce_mean",
    "reduce_min",
    "reduce_prod",
    "reduce_sum",
    "reduce_weighted_mean",
    "scatter",
    "solve",
    "train_step",
    "value_and_grad",
    "variables",
]

# What needs a framework besides JAX, or is large, is loaded when it is first used.
_ROOMS = {
    "solve": "solve",
    "Ensemble": "ensembles",
    "ensemble": "ensembles",
    "load_ensemble": "ensembles",
    "load_member": "ensembles",
    "initialize": "launch",
    "Checkpoints": "train",
    "Evaluate": "train",
    "Event": "train",
    "Fitted": "train",
    "Loader": "train",
    "Mean": "train",
    "StopEarly": "train",
    "TrainingStopped": "train",
    "fit": "train",
    "TrainState": "train",
    "eval_step": "train",
    "loader": "train",
    "train_step": "train",
    "Gradients": "transforms",
    "GradValues": "transforms",
    "Jit": "transforms",
    "Optimizer": "transforms",
    "Parallel": "transforms",
    "Variables": "transforms",
    "Vectorize": "transforms",
    "freeze": "transforms",
    "grad": "transforms",
    "value_and_grad": "transforms",
    "variables": "transforms",
}
_EXTRAS = {"ensembles": "nnx", "train": "train", "transforms": "nnx"}


if not typing.TYPE_CHECKING:  # to type checkers, a name that is not imported above is a mistake

    def __getattr__(name):
        if name not in _ROOMS:
            raise AttributeError(f"module 'paraxis' has no attribute {name!r}")
        room = _ROOMS[name]
        try:
            module = importlib.import_module(f"paraxis.{room}")
            value = module if name == room else getattr(module, name)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.startswith("paraxis"):
                raise
            raise ModuleNotFoundError(
                f"px.{name} needs {error.name}, which is not installed; write pip install 'paraxis[{_EXTRAS[room]}]'",
                name=error.name,
            ) from error
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
