"""The test that rows may be added to a batch: only if each result has one row per row, made of that row alone.

The function is traced with two numbers of rows that nothing else in it has: what shows with both is no coincidence.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from paraxis._axes import tree
from paraxis._jax import jax_api, rowwise
from paraxis.transforms import _results, _row_count


@dataclasses.dataclass(frozen=True)
class _Result:
    """A result as a leaf: ``None`` and tuples would be taken for structure."""

    rows: rowwise.Rows
    shape: tuple[int, ...]


def harm(
    body: Callable[..., Any],
    avals: Sequence[Any],
    row_dims: Sequence[int],
    share: int,
    reduce: Any,
    names: Sequence[str],
) -> str | None:
    """Return what rows that are added would change; ``None``: nothing.

    Args:
        body: function of arrays that gives new values of variables by their number, and a result.
        avals: shapes of the arrays.
        row_dims: for each, the dimension that the rows lie along; below zero: it has none.
        share: number of rows that each device will have.
        reduce: what becomes of the results of several devices.
        names: names of the variables.
    """
    counts = _row_count.odd_counts(a.shape for a in avals)
    one, other = (_trace(body, avals, row_dims, count) for count in counts)
    rows = [b if isinstance(a, rowwise.Mixed) else a for a, b in zip(one[2], other[2], strict=True)]
    made = [_Result(x, aval.shape) for x, aval in zip(rows, one[0].out_avals, strict=True)]
    new, result = jax.tree.unflatten(one[1], made)
    for i, leaves in new.items():
        if any(leaf.rows is not None for leaf in jax.tree.leaves(leaves)):
            return f"variable {names[i]} is written with what depends on the rows"
    kinds = _results.spread("Parallel", reduce, result)
    found = zip(jax.tree_util.tree_leaves_with_path(result), kinds, strict=True)
    reasons = (why for (path, leaf), kind in found if (why := _why(tree.name("result", path), leaf, kind)))
    reason = next(reasons, None) or _row_count.use_of_count(one[0], other[0], counts)
    if reason is not None:
        return reason
    # Is what was looked at what will run?
    real, out_tree = jax_api.trace(body, avals, {})
    wanted = [_resized(leaf, share) for leaf in made]
    if out_tree != one[1] or [aval.shape for aval in real.out_avals] != wanted:
        return f"with {share} rows per device the function does something else than with more"
    # A single row meets no other, and JAX writes operations on it otherwise.
    return _row_count.use_of_count(one[0], real, (counts[0], share)) if share > 1 else None


def _resized(leaf: _Result, share: int) -> tuple[int, ...]:
    rows, shape = leaf.rows, leaf.shape
    return (*shape[:rows], share, *shape[rows + 1 :]) if isinstance(rows, int) else shape


def _why(name: str, leaf: _Result, kind: Any) -> str | None:
    if isinstance(leaf.rows, rowwise.Mixed):
        return f"{name} is not one value per row: {leaf.rows.reason}"
    if leaf.rows is None and (leaf.shape == () or kind == "same"):
        return None
    if leaf.rows != 0:
        return f"{name} does not have the rows along its first axis"
    if kind != "concat":
        return f"{name} is reduced by {kind!r}, and the devices have shares of different sizes"
    return None


def _trace(body: Callable[..., Any], avals: Sequence[Any], row_dims: Sequence[int], count: int) -> Any:
    """Return the body for another number of rows, the structure of its results, and where rows lie in them."""
    shapes = [
        a.shape if at < 0 else (*a.shape[:at], count, *a.shape[at + 1 :]) for a, at in zip(avals, row_dims, strict=True)
    ]
    structs = [a.update(shape=shape) for a, shape in zip(avals, shapes, strict=True)]
    traced, out_tree = jax_api.trace(body, structs, {})
    return traced, out_tree, rowwise.results(traced, [at if at >= 0 else None for at in row_dims], count)
