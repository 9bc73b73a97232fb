"""Arguments split along a batch axis, beside those that are given whole."""

import dataclasses
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


def split(transform: str, batch_axis: Axes, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Batch:
    """Take arguments apart. Leaves without dimensions are given whole, whatever their axis.

    Raises:
        ShapeError: naming the argument, if an axis is missing, sizes disagree, or it is one random key for all rows,
            which would be the same noise on each, unless batch_axis says None for it.
    """
    args = tuple(args)
    found, structure = jax.tree_util.tree_flatten_with_path(args)
    axes = _axes(transform, batch_axis, args)
    kept = [_axis(transform, path, x, at) for (path, x), at in zip(found, axes, strict=True)]
    sizes = {
        tree.name("args", path): np.shape(x)[at] for (path, x), at in zip(found, kept, strict=True) if at is not None
    }
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{label}: {size}" for label, size in sizes.items())
        raise ShapeError(
            f"{transform}: the sizes of the batch axes disagree ({listed}). Write None in batch_axis for what is not "
            f"a batch: batch_axis=(0, None)"
        )
    alike = [
        tree.name("args", path) for (path, x), at in zip(found, axes, strict=True) if at is not _WHOLE and _is_key(x)
    ]
    alike += [name for name, x in kwargs.items() if any(map(_is_key, jax.tree.leaves(x)))]
    if alike:
        raise ShapeError(
            f"{transform}: {alike[0]} is one random key, which would be the same noise everywhere. Give a key per "
            f"row, jax.random.split(key, rows), or bind nnx.Rngs; if one for all is meant, give it by position and "
            f"write batch_axis=(0, None)"
        )
    return Batch(
        rows=[leaf for (_, leaf), at in zip(found, kept, strict=True) if at is not None],
        whole=[leaf for (_, leaf), at in zip(found, kept, strict=True) if at is None],
        axes=tuple(at for at in kept if at is not None),
        size=next(iter(sizes.values()), None),
        structure=structure,
        is_row=tuple(at is not None for at in kept),
    )


def _axes(transform: str, batch_axis: Axes, args: tuple[Any, ...]) -> list[Any]:
    """Return the axis of each leaf, or ``_WHOLE``."""
    is_each = isinstance(batch_axis, Sequence)
    given = tuple(batch_axis)[: len(args)] if is_each else (batch_axis,) * len(args)
    marked = jax.tree.map(lambda at: _WHOLE if at is None else at, given, is_leaf=tree.is_none)
    try:
        return jax.tree.leaves(tree.spread(marked, args))
    except (ValueError, TypeError) as error:
        raise ShapeError(
            f"{transform}: batch_axis={batch_axis!r} does not fit the {len(args)} arguments; write one entry per "
            f"argument, each an integer, None, or a tree that is a prefix of the argument"
        ) from error


def _axis(transform: str, path: Any, x: Any, at: Any) -> int | None:
    shape = np.shape(x)
    if at is _WHOLE or not shape:
        return None
    if not -len(shape) <= at < len(shape):
        raise ShapeError(
            f"{transform}: {tree.name('args', path)} has shape {shape} and no axis {at} to split; write None for it in "
            f"batch_axis to give it whole"
        )
    return at % len(shape)


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and x.ndim == 0 and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
