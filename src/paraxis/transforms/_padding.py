"""The test that rows may be added to a batch: only if each result has one row per row, made of that row alone.

The function is traced with a number of rows that nothing else in it has, and its rows are followed.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from paraxis._axes import tree
from paraxis._jax import jax_api, rowwise
from paraxis.transforms import _reduce


def harm(
    body: Callable[..., Any],
    real: tuple[jax_api.ClosedJaxpr, Any],
    avals: Sequence[Any],
    row_dims: Sequence[int],
    share: int,
    reduce: Any,
    names: Sequence[str],
) -> str | None:
    """Return what rows that are added would change; ``None``: nothing.

    Args:
        body: function of arrays that gives new values of variables by their number, and a result.
        real: what it is traced to with the rows of one share, and the structure of its results.
        avals: shapes of the arrays.
        row_dims: for each, the dimension that the rows lie along; below zero: it has none.
        share: number of rows that each device will have.
        reduce: what becomes of the results of several devices.
        names: names of the variables.
    """
    count = _odd_count({size for a in avals for size in a.shape})
    shapes = [_with_rows(a.shape, at if at >= 0 else None, count) for a, at in zip(avals, row_dims, strict=True)]
    traced, structure = jax_api.trace(body, [a.update(shape=s) for a, s in zip(avals, shapes, strict=True)], {})
    rows = rowwise.results(traced, [at if at >= 0 else None for at in row_dims], count)
    wanted = [_with_rows(a.shape, r, share) for a, r in zip(traced.out_avals, rows, strict=True)]
    new, result = jax.tree.unflatten(structure, range(structure.num_leaves))
    for i, leaves in new.items():
        if any(rows[leaf] is not None for leaf in jax.tree.leaves(leaves)):
            return f"variable {names[i]} is written with what depends on the rows"
    found = zip(jax.tree_util.tree_leaves_with_path(result), _reduce.spread("Parallel", reduce, result), strict=True)
    reasons = (_why(tree.name("result", path), rows[leaf], wanted[leaf], kind) for (path, leaf), kind in found)
    if (reason := next(filter(None, reasons), None)) is not None:
        return reason
    if structure != real[1] or [aval.shape for aval in real[0].out_avals] != wanted:
        return f"with {share} rows per device the function does something else than with more"
    return None


def _odd_count(taken: set[int]) -> int:
    """Return a prime number of rows that divides none of the given dimensions."""
    primes = (n for n in itertools.count(11) if all(n % k for k in range(2, n)))
    return next(n for n in primes if all(size % n for size in taken if size))


def _with_rows(shape: tuple[int, ...], rows: rowwise.Rows, count: int) -> tuple[int, ...]:
    return (*shape[:rows], count, *shape[rows + 1 :]) if isinstance(rows, int) else shape


def _why(name: str, rows: rowwise.Rows, shape: tuple[int, ...], kind: Any) -> str | None:
    if isinstance(rows, rowwise.Mixed):
        return f"{name} is not one value per row: {rows.reason}"
    if rows is None and (shape == () or kind == "same"):
        return None
    if rows != 0:
        return f"{name} does not have the rows along its first axis"
    return (
        None if kind == "concat" else f"{name} is reduced by {kind!r}, and the devices have shares of different sizes"
    )
