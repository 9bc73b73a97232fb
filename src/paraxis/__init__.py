"""Paraxis puts an axis of a JAX program on as many devices as there are."""

from paraxis._core.axis import Axis
from paraxis._core.collectives import all_gather, axis_index, axis_size, pmax, pmean, pmin, psum
from paraxis._core.errors import (
    AxisError,
    CollectiveError,
    CommunicationError,
    DeviceError,
    LoweringError,
    ParaxisError,
    ScopeError,
    ShapeError,
)
from paraxis._core.pmap import pmap
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
from paraxis.mapreduce import program

__version__ = "0.1.0"

__all__ = [
    "Axis",
    "AxisError",
    "CollectiveError",
    "CommunicationError",
    "DeviceError",
    "LoweringError",
    "ParaxisError",
    "ScopeError",
    "ShapeError",
    "all_gather",
    "axis_index",
    "axis_size",
    "broadcast",
    "gather",
    "keys",
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
]
