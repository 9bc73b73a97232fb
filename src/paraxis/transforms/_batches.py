"""Arguments split along a batch axis, beside those that are given whole."""

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._axes import tree
from paraxis.errors import ShapeError

Axes = int | None | Sequence[Any]
_WHOLE = object()  # stands for None, which would be taken for structure


@dataclasses.dataclass(frozen=True)
class Batch:
    """Arguments taken apart: ``rows`` are split, each along the axis in ``axes``; ``whole`` are not.

    ``size`` is the number of rows; ``None`` if nothing is split.
    """

    rows: list[Any]
    whole: list[Any]
    axes: tuple[int, ...]
    size: int | None
    structure: Any
    is_row: tuple[bool, ...]

    def put_together(self, rows: Sequence[Any], whole: Sequence[Any]) -> Any:
        ours, theirs = iter(rows), iter(whole)
        return jax.tree.unflatten(self.structure, [next(ours if is_row else theirs) for is_row in self.is_row])


def split(transform: str, batch_axis: Axes, args: Sequence[Any]) -> Batch:
    """Take arguments apart. Leaves without dimensions are given whole, whatever their axis.

    Raises:
        ShapeError: naming the argument, if an axis is missing, sizes disagree, or it is a list of numbers.
    """
    axes = _axes(transform, batch_axis, args)
    found = jax.tree_util.tree_leaves_with_path(tuple(args))
    structure = jax.tree.structure(tuple(args))
    flat = jax.tree.leaves(axes)
    sizes: dict[str, int] = {}
    kept: list[int | None] = []
    for (path, leaf), at in zip(found, flat, strict=True):
        shape = np.shape(leaf)
        if at is _WHOLE or not shape or not isinstance(shape, tuple):  # of a mesh it is none
            kept.append(None)
            continue
        label = tree.name("args", path)
        if not -len(shape) <= at < len(shape):
            raise ShapeError(
                f"{transform}: {label} has shape {shape} and no axis {at} to split; write None for it in batch_axis "
                f"to give it whole"
            )
        sizes[label] = shape[at]
        kept.append(at % len(shape))
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{label}: {size}" for label, size in sizes.items())
        raise ShapeError(
            f"{transform}: the sizes of the batch axes disagree ({listed}). Write None in batch_axis for what is not "
            f"a batch: batch_axis=(0, None)"
        )
    return Batch(
        rows=[leaf for (_, leaf), at in zip(found, kept, strict=True) if at is not None],
        whole=[leaf for (_, leaf), at in zip(found, kept, strict=True) if at is None],
        axes=tuple(at for at in kept if at is not None),
        size=next(iter(sizes.values()), None),
        structure=structure,
        is_row=tuple(at is not None for at in kept),
    )


def _axes(transform: str, batch_axis: Axes, args: Sequence[Any]) -> Any:
    if batch_axis is None or isinstance(batch_axis, int):
        given: Sequence[Any] = (batch_axis,) * len(args)
    else:
        given = tuple(batch_axis) if isinstance(batch_axis, (tuple, list)) else (batch_axis,) * len(args)
    if len(given) < len(args):
        raise ShapeError(
            f"{transform}: batch_axis={batch_axis!r} has {len(given)} entries for {len(args)} arguments; write one for "
            f"each: batch_axis=({', '.join(['0'] * len(args))})"
        )
    _require_axes(transform, given)
    marked = jax.tree.map(lambda at: _WHOLE if at is None else at, tuple(given), is_leaf=tree.is_none)
    try:
        return tuple(tree.spread(at, arg) for at, arg in zip(marked, args, strict=False))
    except (ValueError, TypeError) as error:
        raise ShapeError(
            f"{transform}: batch_axis={batch_axis!r} does not fit the arguments; write one entry per argument, each an "
            f"integer, None, or a tree that is a prefix of the argument"
        ) from error


def check(transform: str, batch_axis: Axes, fn: Any, static: Sequence[int]) -> None:
    """Refuse entries that are no axes, and too few of them for the arguments that a function needs."""
    if batch_axis is None or isinstance(batch_axis, int):
        entries: Sequence[Any] = (batch_axis,)
    else:
        entries = tuple(batch_axis) if isinstance(batch_axis, (tuple, list)) else (batch_axis,)
    _require_axes(transform, entries)
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return
    needed = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_ONLY]
    free = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    needed += [p for p in free if p.default is p.empty]
    count = len([p for n, p in enumerate(needed) if n not in static])
    if isinstance(batch_axis, (tuple, list)) and len(entries) < count:
        raise ShapeError(
            f"{transform}: batch_axis={batch_axis!r} has {len(entries)} entries for {count} arguments; write "
            f"one for each: batch_axis=({', '.join(['0'] * count)})"
        )


def _require_axes(transform: str, entries: Sequence[Any]) -> None:
    for at in jax.tree.leaves(entries):
        if isinstance(at, bool) or not isinstance(at, int):
            raise ShapeError(f"{transform}: batch_axis must be of integers and None, got {at!r}; write batch_axis=0")


def refuse_keys(transform: str, batch_axis: Axes, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse one random key for all rows: it is the same noise on each, which is hardly ever meant.

    Raises:
        ShapeError: naming the argument, unless batch_axis says None for it.
    """
    axes = jax.tree.leaves(_axes(transform, batch_axis, args))
    found = zip(jax.tree_util.tree_leaves_with_path(tuple(args)), axes, strict=True)
    shared = [tree.name("args", path) for (path, x), at in found if at is not _WHOLE and _is_key(x)]
    shared += [name for name, x in kwargs.items() if any(map(_is_key, jax.tree.leaves(x)))]
    if shared:
        raise ShapeError(
            f"{transform}: {shared[0]} is one random key, which would be the same noise everywhere. Give a key per "
            f"row, jax.random.split(key, rows), or bind nnx.Rngs; if one for all is meant, give it by position and "
            f"write batch_axis=(0, None)"
        )


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and x.ndim == 0 and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
