"""A loss or a gradient that is not finite: which step, and which rows of its batch are not finite themselves."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import pytrees
from paraxis.errors import NonFiniteError
from paraxis.train._history import Sums
from paraxis.train._order import Position

_MOST_ROWS = 20


def is_nonfinite(sums: Sums) -> bool:
    """Return whether a step's loss or gradient is not finite."""
    return not all(math.isfinite(x) for name in ("loss", "grad_norm") for x in sums.get(name, ()))


def error_of(
    position: Position, sums: Sums, batch: Any, rows: np.ndarray | None, state: Any, done: str
) -> NonFiniteError:
    """Return the error, with the batch, the state before, and in a sentence what has been done with that.

    ``rows``: the numbers of the batch's rows in the source, if they are known.
    """
    total, weight = sums.get("loss", (math.nan, 1.0))
    loss = total / (weight or 1)
    what = "the gradient is not finite" if math.isfinite(loss) else "the loss is not finite"
    listed = "" if rows is None else f", of rows {_listed(rows)}: data.rows({position.number})"
    bad = "; ".join(_nonfinite_leaves(batch, rows))
    why = f"These values of the batch are not finite themselves: {bad}. Mend these rows, or leave them out"
    if not bad:
        why = (
            "All values of the batch are finite, so it is the model, or values that are too large: take smaller steps, "
            "or write px.train_step(loss, clip=1.0)"
        )
    where = f"step {position.number + 1}, {position} (loss {loss:.6g}){listed}"
    error = NonFiniteError(f"px.fit: {what} in {where}. {done}{why}")
    error.batch, error.state = batch, state
    return error


def _listed(rows: np.ndarray) -> str:
    listed = ", ".join(map(str, rows[:_MOST_ROWS]))
    return listed + (f", … ({len(rows)} in all)" if len(rows) > _MOST_ROWS else "")


def _nonfinite_leaves(batch: Any, rows: np.ndarray | None) -> list[str]:
    """Return which leaves have values that are not finite, and in which rows, as far as this process has them."""
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        blocks = [(leaf, 0)]
        if isinstance(leaf, jax.Array) and leaf.ndim:
            blocks = [(shard.data, shard.index[0].start or 0) for shard in leaf.addressable_shards]
        bad = set[int]()
        for block, start in blocks:
            values = np.asarray(block)
            if jnp.issubdtype(values.dtype, jnp.inexact):
                bad |= {int(row) + start for row in np.argwhere(~np.isfinite(np.atleast_1d(values)))[:, 0]}
        numbers = np.array(sorted(bad), int)
        which = f" in rows {_listed(numbers)} of the batch" if rows is None else f" in rows {_listed(rows[numbers])}"
        found += [pytrees.name("batch", path) + (which if np.ndim(leaf) else "")] if bad else []
    return found
