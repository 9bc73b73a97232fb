"""The results of several devices made one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from paraxis._axes import layout, tree
from paraxis._axes.axis import Axis
from paraxis._calls import arguments
from paraxis._core import reductions
from paraxis.errors import ShapeError, StateError

KINDS = ("concat", "stack", "first", "mean", "sum", "max", "min", "same")
_FOLDS: dict[str, Callable[..., Any]] = {
    "mean": reductions.reduce_mean,
    "sum": reductions.reduce_sum,
    "max": reductions.reduce_max,
    "min": reductions.reduce_min,
}


def check(transform: str, reduce: Any) -> None:
    for kind in jax.tree.leaves(reduce, is_leaf=tree.is_none):
        if not callable(kind) and not (isinstance(kind, (str, type(None))) and kind in KINDS):
            raise StateError(
                f"{transform}: reduce must be one of {', '.join(map(repr, KINDS))}, a function, or a tree of these, "
                f"got {arguments.described(kind)}; write reduce='mean'"
            )


def spread(transform: str, reduce: Any, result: Any) -> list[Any]:
    """Return one entry for each leaf of the result."""
    try:
        return jax.tree.leaves(tree.spread(reduce, result))
    except (ValueError, TypeError) as error:
        raise ShapeError(
            f"{transform}: reduce={reduce!r} does not fit the result, {jax.tree.structure(result)}; write one entry "
            f"per output, or one for all"
        ) from error


def fold(axis: Axis) -> Callable[[str, jax.Array], jax.Array]:
    """Reductions by name over the elements of an axis."""
    return lambda kind, x: _FOLDS[kind](x, axis)


def reduced(kind: Any, x: jax.Array, axis: Axis, *, differs: bool) -> Any:
    """``(devices, ...)`` → what ``kind`` makes of it. Values that all devices have alike need not be sent."""
    if not isinstance(kind, str):
        return kind(layout.gathered(x, axis))
    if kind == "stack" or (kind == "concat" and x.ndim == 1):
        return x
    if kind == "concat":
        return x.reshape(-1, *x.shape[2:])
    alike = kind in ("first", "same", "max", "min") or (kind == "mean" and jnp.issubdtype(x.dtype, jnp.inexact))
    if alike and not differs:
        return layout.agreed(x, axis)
    return layout.gathered(x, axis)[0] if kind in ("first", "same") else _FOLDS[kind](x, axis)
