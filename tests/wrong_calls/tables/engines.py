"""Calls of engines, and of the elements that they read."""

import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import paraxis as px
from tests.wrong_calls import _functions as own
from tests.wrong_calls._calls import Call
from tests.wrong_calls._values import (
    count,
    either,
    flag,
    function,
    instance,
    items,
    leaves,
    none,
    number,
    one_of,
    optional,
    path,
    rows,
    text,
    tree,
)

X = np.ones((8, 3), np.float32)
ELEMENTS = [np.ones(3, np.float32)] * 8
GROUPS = px.Groups.of_arrays(X)
STREAM = px.Stream(at_once=1)
FOLDER = Path(tempfile.mkdtemp())
np.savez(FOLDER / "a.npz", x=X)
np.save(FOLDER / "X.npy", X)
np.save(FOLDER / "y.npy", X[:, 0])
CSV = FOLDER / "a.csv"
CSV.write_text("x,y\n1,2\n")
TABLE = FOLDER / "a.parquet"
pq.write_table(pa.table({"user": [1, 1, 2], "x": [0.0, 1.0, 2.0], "y": [0, 1, 2]}), TABLE)


def floating(x: Any) -> bool:
    return isinstance(x, (str, type, np.dtype)) and x in ("float32", "float64", np.float32, np.float64, jnp.float32)


ROWS = px.Table.of_arrays(X, X[:, 0])
FLOATING = (None, optional(floating))
COLUMNS = {"target": ("y", none), "columns": (("x",), optional(none)), "dtype": FLOATING}
STREAMED = {"*args[0]": (GROUPS, either(rows(8), instance(px.Groups)))}


OF_ALL = {
    "keep": ("recompute", one_of("recompute", "memory", "disk")),
    "folder": (FOLDER, optional(path)),  # without it, save_every is refused: see test_refused.py
    "save_every": (10.0, number(0)),
    "verbose": (False, either(flag, function)),
}


def seeds(x: Any) -> bool:
    one = count(0, 10**500)
    return one(x) or items(one)(x)


def sized(x: Any) -> bool:
    """Whatever it holds is looked at when it is read."""
    try:
        return not isinstance(x, (str, bytes, dict)) and hasattr(x, "__getitem__") and len(x) > 0
    except TypeError:
        return False


def eight(x: Any) -> bool:
    return not isinstance(x, (str, bytes, dict)) and np.shape(x)[:1] == (8,)


def labels(x: Any) -> bool:
    return np.ndim(x) == 1 and len(x) == 8 and np.asarray(x).dtype.kind in "biufUO"


def matrix(x: Any) -> bool:
    return tree(x) and np.ndim(x) == 2 and len(x) == 8


def letter(x: Any) -> bool:
    return isinstance(x, str) and len(x) == 1


def rows_of_any(x: Any) -> bool:
    shapes = {np.shape(leaf)[:1] for leaf in leaves(x)} if tree(x) else set()
    return len(shapes) == 1 and shapes not in ({()}, {(0,)})


CALLS = [
    Call(
        "px.Groups",
        px.Groups,
        lambda: {
            "source": (ELEMENTS, sized),
            "lengths": (None, optional(none)),
            "ids": (None, optional(eight)),
            "num_shapes": (12, one_of(12)),  # any other number needs lengths
        },
    ),
    Call("Groups.of_arrays", px.Groups.of_arrays, lambda: {"tree": (X, rows_of_any)}),
    Call(
        "Groups.npz",
        px.Groups.npz,
        lambda: {"folder": (FOLDER, none), "num_shapes": (12, count()), "readable": (False, flag)},
    ),
    Call(
        "Groups.parquet",
        px.Groups.parquet,
        lambda: {"folder": (TABLE, none), "by": ("user", none), "num_shapes": (12, count())},
    ),
    Call("px.Table", px.Table, lambda: {"source": (ROWS._source, none)}),
    Call("Table.parquet", px.Table.parquet, lambda: {"folder": (TABLE, none), **COLUMNS}),
    Call("Table.csv", px.Table.csv, lambda: {"folder": (CSV, none), **COLUMNS, "delimiter": (",", letter)}),
    Call("Table.npy", px.Table.npy, lambda: {"folder": (FOLDER, none), "dtype": FLOATING}),
    Call("Table.of_arrays", px.Table.of_arrays, lambda: {"X": (X, matrix), "y": (X[:, 0], labels), "dtype": FLOATING}),
    Call("Table.blocks", lambda *a, **k: list(ROWS.blocks(*a, **k)), lambda: {"size": (2, count())}),
    Call("Groups.sample", GROUPS.sample, lambda: {"count": (2, count(1, 8)), "seed": (0, seeds)}),
    Call("Groups.__getitem__", GROUPS.__getitem__, lambda: {"*number": (1, count(-8, 7))}, documented=(IndexError,)),
    Call(
        "px.Stream",
        px.Stream,
        lambda: {
            "at_once": (1, count()),
            "memory": (None, optional(none)),  # with at_once, there is none that is right
            "readers": (2, count()),
            **OF_ALL,
        },
    ),
    Call("px.Pool", px.Pool, lambda: {"at_once": (1, count()), "workers": (None, optional(count())), **OF_ALL}),
    Call(
        "px.Ray",
        px.Ray,
        lambda: {
            "at_once": (1, count()),
            "address": (None, optional(text)),
            "ahead": (None, optional(count())),
            **OF_ALL,
        },
    ),
    Call("Stream.run", STREAM.run, lambda: {"*fn": (own.streamed, function), **STREAMED}),
    Call("Stream.jit", STREAM.jit, lambda: {"fn": (own.streamed, function)}),
    Call("Stream.passes", STREAM.passes, lambda: {"*fn": (own.streamed, function), **STREAMED}),
]
