"""A loss or a gradient that is not finite: found, named, and kept to be looked at."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import tree
from paraxis._host import files
from paraxis.errors import NonFiniteError
from paraxis.train._loss import Mean
from paraxis.train._order import Position

_MOST_ROWS = 20


def is_nonfinite(metrics: Mapping[str, Mean]) -> bool:
    """Return whether a step's loss or gradient, which were fetched, is not finite."""
    means = [metrics[name] for name in ("loss", "grad_norm") if name in metrics]
    return not all(map(math.isfinite, (x for mean in means for x in (mean.total, mean.weight))))


def error_of(
    position: Position, metrics: Mapping[str, Mean], batch: Any, rows: np.ndarray | None, state: Any, done: str
) -> NonFiniteError:
    """Return the error, with the batch, the state before, and what has been done about it in sentences.

    ``rows``: which ones of the source are the batch's, if that is known.
    """
    loss = metrics["loss"].total / (metrics["loss"].weight or 1) if "loss" in metrics else math.nan
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
        values, numbers = _on_host(leaf)
        if not jnp.issubdtype(values.dtype, jnp.inexact) or np.isfinite(values).all():
            continue
        bad = numbers[~np.isfinite(values).reshape(len(numbers), -1).all(1)]
        which = f" in rows {_listed(bad)} of the batch" if rows is None else f" in rows {_listed(rows[bad])}"
        found.append(tree.name("batch", path) + (which if values.ndim else ""))
    return found


def save_batch(directory: Path, step: int, batch: Any, rows: np.ndarray | None) -> str:
    """Write a batch as an ``.npz``; with several processes, each the rows that it has, to a file of its own.

    Return what was done as a sentence.
    """
    suffix = f"-process-{jax.process_index()}" if jax.process_count() > 1 else ""
    path = directory / f"nonfinite-step-{step}{suffix}.npz"
    found: dict[str, np.ndarray] = {}
    for where, leaf in jax.tree_util.tree_leaves_with_path(batch):
        values, numbers = _on_host(leaf)
        found[jax.tree_util.keystr(where, simple=True, separator=".") or "batch"] = values
        if rows is not None and values.ndim:
            found.setdefault("row numbers", rows[numbers])
    try:
        with files.replaced(path) as file:
            np.savez(file, allow_pickle=False, **found)
    except (OSError, ValueError) as error:  # a full disk; objects
        return f"The batch could not be saved in {directory}: {error}. "
    return f"The batch is saved: np.load('{path}'). "


def _on_host(leaf: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of a leaf that this process has, and their numbers in the batch; a 0-d leaf has one."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable and not leaf.is_fully_replicated:
        blocks = {shard.index[0].start or 0: np.asarray(shard.data) for shard in leaf.addressable_shards}
        numbers = [np.arange(start, start + len(block)) for start, block in sorted(blocks.items())]
        return np.concatenate([block for _, block in sorted(blocks.items())]), np.concatenate(numbers)
    host = np.asarray(leaf)
    return host, np.arange(len(host) if host.ndim else 1)
