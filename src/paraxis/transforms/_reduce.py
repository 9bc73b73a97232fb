"""How the results of several devices, and the values that several elements wrote to a variable, become one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from paraxis._axes import layout, tree
from paraxis._axes.axis import Axis
from paraxis._calls import check
from paraxis._core import reductions
from paraxis.errors import ShapeError, StateError
from paraxis.transforms._binding import Structure

KINDS = ("concat", "stack", "first", "mean", "sum", "max", "min", "same")
RULES = ("mean", "sum", "max", "min", "first", "stack")
_FOLDS: dict[str, Callable[..., Any]] = {
    "mean": reductions.reduce_mean,
    "sum": reductions.reduce_sum,
    "max": reductions.reduce_max,
    "min": reductions.reduce_min,
}

Rule = str | Callable[[jax.Array], Any]
"""``"mean"``, ``"sum"``, ``"max"``, ``"min"``, ``"first"``, ``"stack"``, or a function of all values stacked."""

Fold = Callable[[str, jax.Array], jax.Array]
"""A reduction by name (``sum``, ``max``, ``min``) of ``(size, ...)`` over the elements."""

Sync = Mapping[Any, Rule | None]
"""Rules by a variable's name or type."""


# --- results ---------------------------------------------------------------------------------------------------------


def check_kinds(transform: str, reduce: Any) -> None:
    for kind in jax.tree.leaves(reduce, is_leaf=tree.is_none):
        if not callable(kind):
            check.one_of(transform, "reduce", kind, KINDS, StateError)


def spread(transform: str, reduce: Any, result: Any) -> list[Any]:
    """Return one entry for each leaf of the result."""
    try:
        return jax.tree.leaves(tree.spread(reduce, result))
    except (ValueError, TypeError) as error:
        raise ShapeError(
            f"{transform}: reduce={reduce!r} does not fit the result, {jax.tree.structure(result)}; write one entry "
            f"per output, or one for all"
        ) from error


def fold(axis: Axis) -> Fold:
    """Return the reductions by name over the elements of an axis."""
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


# --- variables -------------------------------------------------------------------------------------------------------


def check_sync(transform: str, sync: Any, names: Sequence[str]) -> Sync:
    """Return the rules that ``sync=`` gives.

    Raises:
        StateError: if it names a variable that there is not, or a rule that there is not.
    """
    for key, rule in (sync or {}).items():
        if not (rule is None or callable(rule)):
            check.one_of(transform, f"sync[{key!r}]", rule, RULES, StateError)
        if isinstance(key, str) and key not in names:
            raise StateError(f"{transform}: sync names {key!r}, but the variables are {', '.join(names) or 'none'}")
    return dict(sync or {})


def rule_of(structure: Structure, number: int, sync: Sync) -> Rule | None:
    """Return a variable's own rule, or that for its name, or that for the nearest of its types; ``None``: none."""
    variable, name = structure.graph.variables[number], structure.names[number]
    if variable.has_metadata("sync"):
        return variable.get_metadata("sync")
    if name in sync:
        return sync[name]
    rules = {nnx.BatchStat: "mean"} | dict(sync)
    return next((rules[kind] for kind in type(variable).__mro__ if kind in rules), None)


def combined(rule: Rule, x: jax.Array, fold: Fold) -> Any:
    """``(size, ...)`` → the variable's new value. Integers and booleans keep their dtype: means are rounded."""
    if not isinstance(rule, str):
        return rule(x)
    if rule == "stack":
        return x
    if rule == "first":
        return x[0]
    if rule == "mean":
        return _mean(x, fold)
    if x.dtype == bool:
        return fold(rule, x.astype(jnp.int32)).astype(bool)
    return fold(rule, x).astype(x.dtype)


def _mean(x: jax.Array, fold: Fold) -> jax.Array:
    size = x.shape[0]
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return (fold("sum", x) / size).astype(x.dtype)
    if x.dtype == bool:
        return fold("sum", x.astype(jnp.int32)) * 2 > size
    # Counters may be larger than floats are exact, and their sum larger than their dtype: divide first.
    rest = fold("sum", (x % size).astype(jnp.int32))
    return (fold("sum", x // size) + (rest + size // 2) // size).astype(x.dtype)
