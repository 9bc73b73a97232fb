"""Arguments split among rows or devices, and what comes back from these combined."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from paraxis._core import arrays, placing, pytrees, reductions
from paraxis.errors import DataError, StateError
from paraxis.transforms._modules import Graph
from paraxis.transforms._wrapped import refuse_modules

Axes = int | None | Sequence[Any]


class Batch(NamedTuple):
    leaves: list[Any]
    axes: list[int | None]  # None: it is given whole
    size: int | None  # number of rows; None if nothing is split
    structure: Any  # of arguments and keywords


def split(transform: str, batch_axis: Axes, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Batch:
    """Split arguments, keywords along their first axis. Leaves without dimensions are given whole, whatever it is."""
    refuse_modules(transform, (args, kwargs))
    args = tuple(args)
    entries = tuple(batch_axis)[: len(args)] if isinstance(batch_axis, Sequence) else (batch_axis,) * len(args)
    leaves, structure = jax.tree_util.tree_flatten_with_path((args, dict(kwargs)))
    try:
        wanted = pytrees.broadcast_prefix((entries, None if batch_axis is None else 0), (args, kwargs))
        both = zip(leaves, wanted, strict=True)
        axes = [None if at is None or not np.ndim(x) else range(np.ndim(x))[at] for (_, x), at in both]
    except (ValueError, TypeError, IndexError) as error:
        shapes = jax.tree.map(np.shape, pytrees.combine(args))
        raise DataError(
            f"{transform}: batch_axis={batch_axis!r} does not fit args, of shapes {shapes}; write the rows' axis, "
            f"or None to pass it whole, for all args or for each: batch_axis=(0, None)"
        ) from error
    sizes: dict[str, int] = {}
    for (path, x), at, axis in zip(leaves, wanted, axes, strict=True):
        name = pytrees.name("args" if path[0].idx == 0 else "kwargs", path[1:])
        if at is not None and isinstance(x, jax.Array) and not x.ndim and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            raise DataError(
                f"{transform}: {name} is one random key, the same noise everywhere. Give jax.random.split(key, rows), "
                f"or bind nnx.Rngs; if one for all is meant, give it by position and write batch_axis=(0, None)"
            )
        if axis is not None:
            sizes[name] = np.shape(x)[axis]
    if len(set(sizes.values())) > 1:
        raise DataError(f"{transform}: batch axes disagree, {sizes}; write None for what is none: batch_axis=(0, None)")
    return Batch([x for _, x in leaves], axes, next(iter(sizes.values()), None), structure)


# "mean", "sum", "max", "min", "first", "stack", or a function of all values stacked
Rule = str | Callable[[jax.Array], Any]
Sync = Mapping[type, Rule | None]  # rules by a variable's type


def combined(rule: Rule, x: jax.Array, axis: placing.Axis | None = None, *, differs: bool = True) -> Any:
    """Combine ``(size, ...)`` over the devices of an axis, or over rows. What is alike everywhere is not sent."""
    if rule in ("stack", "concat"):
        return x.reshape(-1, *x.shape[2:]) if rule == "concat" and x.ndim > 1 else x
    if axis is not None:
        place = placing.place(axis)
        keeps = rule in ("first", "same", "max", "min") or (rule == "mean" and jnp.issubdtype(x.dtype, jnp.inexact))
        if keeps and not differs and place.mesh_axes:
            return arrays.first_row(x, place)
        if rule in ("mean", "sum", "max", "min"):
            return getattr(reductions, f"reduce_{rule}")(x, axis)
        x = arrays.constrain(x, place, rows=False)
    if callable(rule):
        return rule(x)
    return x[0] if rule in ("first", "same") else getattr(jnp, rule)(x, axis=0)


def written(
    who: str, graph: Graph, sync: Sync, new: Mapping[int, Any], differs: Mapping[int, Any], axis: Any, mend: str
) -> dict[int, Any]:
    """Combine what rows, or the devices of an axis, wrote to variables.

    A rule is a variable's own, or that for the nearest of its types. Values that differ need one, unless ``mend``,
    which says what else to write, is empty.
    """
    combined_values, rules = {}, {nnx.BatchStat: "mean"} | dict(sync)
    for i, values in new.items():
        variable = graph.variables[i]
        rule = next((rules[kind] for kind in type(variable).__mro__ if kind in rules), None)
        rule = variable.get_metadata("sync") if variable.has_metadata("sync") else rule
        if rule is None and mend and any(jax.tree.leaves(differs[i])):
            kind = f"{'nnx.' * type(variable).__module__.startswith('flax.')}{type(variable).__name__}"
            line = f"{mend} a rule, sync={{{kind}: 'mean'}}"
            raise StateError(f"{who}: variable {graph.names[i]} could be left with different values {line}")
        combined_values[i] = jax.tree.map(partial(_combined_variable, rule, axis), values, differs[i])
    return combined_values


def _combined_variable(rule: Rule | None, axis: placing.Axis | None, x: jax.Array, differs: bool) -> Any:
    """Combine a variable's values. Integers and booleans keep their dtype: means are rounded. No rule: any will do."""
    differs &= rule is not None
    rule = "first" if rule is None or (rule == "mean" and not differs) else rule
    if callable(rule):
        return combined(rule, x, axis)
    y = combined(rule, x.astype(jnp.int32) if x.dtype == bool else x, axis, differs=differs)
    return (y if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.round(y)).astype(x.dtype)
