"""Calls of the verbs, of programs and of pmap."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

import paraxis as px
from tests.wrong_calls import _functions as own
from tests.wrong_calls._calls import Call
from tests.wrong_calls._values import (
    Kind,
    anything,
    array,
    count,
    either,
    function,
    instance,
    items,
    key,
    one_of,
    optional,
    rows,
    text,
    tree,
)

SIZE = 3
MESH = Mesh(np.array(jax.devices()[:1]), ("rows",))
AXIS = px.Axis("rows", SIZE, mesh=MESH)
axis = instance(px.Axis)

THE_AXIS = either(one_of("rows"), lambda v: axis(v) and v.name == "rows")


def x() -> Any:
    return jnp.arange(3.0)


def some(kind: Kind) -> Kind:
    return lambda v: bool(v) and items(kind)(v)


def in_a_map(fn: Callable[..., Any]) -> Callable[..., Any]:
    def collective(*args: Any, **kwargs: Any) -> Any:
        return px.map_fn(lambda x: fn(*args, **kwargs), x(), AXIS)

    return collective


def in_a_program(fn: Callable[..., Any]) -> Callable[..., Any]:
    return px.program(rows=AXIS)(lambda: fn())


def has_tracer(v: Any) -> bool:
    """What is done with a tracer is done later, and one that has escaped is then refused."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(v))


ROWS = either(rows(SIZE), has_tracer)


def a_mask(v: Any) -> bool:
    return v is None or array(SIZE, dtypes="b")(v)


REDUCTIONS = [px.reduce_all, px.reduce_any, px.reduce_max, px.reduce_mean, px.reduce_min, px.reduce_prod, px.reduce_sum]
COLLECTIVES = [px.psum, px.pmean, px.pmax, px.pmin, px.all_gather]
CALLS = [
    Call(
        "px.Axis",
        px.Axis,
        lambda: {
            "*name": ("rows", text),
            "*size": (3, count()),
            "mesh": (MESH, optional(instance(Mesh))),
            "over": (
                "rows",
                optional(either(text, some(text))),
            ),
            "at_once": (2, optional(count())),
        },
    ),
    Call("px.broadcast", px.broadcast, lambda: {"*x": ({"a": x(), "b": 1.0}, tree), "axis": (AXIS, axis)}),
    Call(
        "px.map_fn",
        px.map_fn,
        lambda: {
            "fn": (own.plus, function),
            "args": ({"a": x(), "b": x()}, rows(SIZE)),
            "axis": (AXIS, axis),
            "lowering": ("vmap", one_of("auto", "vmap", "unroll", "dispatch")),
        },
    ),
    Call(
        "px.scatter",
        px.scatter,
        lambda: {
            "x": ({"a": x(), "b": x()}, ROWS),
            "axis": (AXIS, axis),
        },
    ),
    Call(
        "px.gather",
        px.gather,
        lambda: {"x": ({"a": x(), "b": x()}, ROWS), "axis": (AXIS, axis)},
    ),
    Call("px.keys", px.keys, lambda: {"key": (jax.random.key(0), key), "axis": (AXIS, axis)}),
    *(
        Call(
            f"px.{fn.__name__}",
            fn,
            lambda: {
                "x": ({"a": x(), "b": x()}, rows(SIZE)),
                "axis": (AXIS, axis),
                "where": (np.array([True, False, True]), a_mask),
            },
        )
        for fn in REDUCTIONS
    ),
    Call(
        "px.reduce_weighted_mean",
        px.reduce_weighted_mean,
        lambda: {
            "x": ({"a": x(), "b": x()}, rows(SIZE)),
            "w": (x(), array(SIZE)),
            "axis": (AXIS, axis),
            "where": (np.array([True, False, True]), a_mask),
        },
    ),
    *(
        Call(
            f"px.{fn.__name__}",
            in_a_map(fn),
            lambda: {
                "*x": ({"a": 1.0, "b": 2.0}, tree),
                "*axis": (AXIS, THE_AXIS),
                # What a function closes over is its own: of a tracer there JAX says where it is from.
            },
            left_out=("a tracer that escaped",),
        )
        for fn in COLLECTIVES
    ),
    *(
        Call(
            f"px.{fn.__name__}",
            in_a_map(fn),
            lambda: {
                "*axis": (AXIS, THE_AXIS),
            },
        )
        for fn in [px.axis_index, px.axis_size]
    ),
    Call(
        "px.program",
        px.program,
        lambda: {
            "placements": (
                {"rows": 3},
                lambda v: (
                    v is None
                    or (isinstance(v, dict) and all(map(text, v)) and all(either(count(), axis)(n) for n in v.values()))
                ),
            ),
        },
        lambda made: made(own.plus),
    ),
    Call(
        "a program", px.program(rows=AXIS)(own.summed), lambda: {"*x": (x(), rows(SIZE)), "*y": ({"a": 1.0}, anything)}
    ),
    Call("the decorator of px.program", px.program(rows=AXIS), lambda: {"*fn": (own.plus, function)}),
    Call(
        "px.pmap",
        px.pmap,
        lambda: {
            "fn": (own.plus, function),
            "axis_name": ("i", optional(text)),
            "in_axes": (0, one_of(0, -1, None, (0,), [0])),
            "out_axes": (0, one_of(0, -1, None)),
            "static_broadcasted_argnums": ((), one_of((), 0)),
            "donate_argnums": ((), one_of((), 0)),
            "axis_size": (3, optional(count(3, 3))),
        },
        lambda made: made(x()),
    ),
    Call(
        "what px.pmap makes",
        px.pmap(own.scaled, axis_size=len(x())),
        lambda: {"*w": (x(), array(None)), "*x": (x(), array(None))},
    ),
]
