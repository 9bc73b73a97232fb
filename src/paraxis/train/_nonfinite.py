"""A loss or a gradient that is not finite: found, named, and kept to be looked at."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import tree
from paraxis._host import files, processes
from paraxis.errors import NonFiniteError
from paraxis.train._data import Data
from paraxis.train._loader import Loader
from paraxis.train._mean import Mean
from paraxis.train._order import Position

_MOST_ROWS = 20


def is_nonfinite(metrics: Mapping[str, Mean], state: Any) -> bool:
    """Return whether a step's loss or gradient, which were fetched, is not finite."""
    for mean in (metrics[name] for name in ("loss", "grad_norm") if name in metrics):
        if all(map(math.isfinite, (mean.total, mean.weight, mean.value or 0.0))):
            continue
        # A sum may be too large where the mean is not; then the step knows.
        if mean.value is None or not math.isfinite(mean.value) or not bool(getattr(state, "ok", True)):
            return True
    return False


def rows_of(data: Data, position: Position) -> np.ndarray | None:
    """Return which rows of the source a batch has, if that is known."""
    return data.rows(position.number) if isinstance(data, Loader) and data.has_rows else None


def state_before(state: Any) -> Any:
    """Return the state of the last good step, which may go on, if steps have left it as it was; else ``None``."""
    ok = getattr(state, "ok", None)
    return None if ok is None or bool(ok) else state.replace(ok=ok | True)


def error_of(
    position: Position,
    metrics: Mapping[str, Mean],
    batch: Any,
    rows: np.ndarray | None,
    done: Sequence[str],
    state: Any,
) -> NonFiniteError:
    """Return the error, with the batch, the state before, and what has been done about it in sentences."""
    loss = float(metrics["loss"]) if "loss" in metrics else math.nan
    what = "the gradient is not finite" if math.isfinite(loss) else "the loss is not finite"
    listed = "" if rows is None else f", of rows {_listed(rows)}: data.rows({position.number})"
    error = NonFiniteError(
        f"px.fit: {what} in step {position.number + 1}, {position} (loss {loss:.6g}){listed}. "
        f"{' '.join((*done, _of_the_data(batch, rows)))}"
    )
    error.batch, error.state = batch, state
    return error


def _listed(rows: np.ndarray) -> str:
    listed = ", ".join(map(str, rows[:_MOST_ROWS]))
    return listed + (f", … ({len(rows)} in all)" if len(rows) > _MOST_ROWS else "")


def _of_the_data(batch: Any, rows: np.ndarray | None) -> str:
    """Return whether it is the data's fault, as far as this process has them, and what to do then."""
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        values, numbers = _on_host(leaf)
        if not jnp.issubdtype(values.dtype, jnp.inexact) or np.isfinite(values).all():
            continue
        bad = numbers[~np.isfinite(values).reshape(len(numbers), -1).all(1)]
        which = f"rows {_listed(bad)} of the batch" if rows is None else f"rows {_listed(rows[bad])}"
        found.append(f"{tree.name('batch', path)} in {which}" if values.ndim else tree.name("batch", path))
    if not found:
        return (
            "All values of the batch are finite, so it is the model, or values that are too large: take smaller steps, "
            "or write px.train_step(loss, clip=1.0)"
        )
    return (
        f"These values of the batch are not finite themselves: {'; '.join(found)}. Mend these rows, or leave them out"
    )


def save_batch(directory: Path, step: int, batch: Any, rows: np.ndarray | None) -> Path:
    """Write a batch as an ``.npz``; with several processes, each the rows that it has, to a file of its own.

    ``rows``: which ones of the source they are, if that is known.
    """
    suffix = f"-process-{processes.index()}" if processes.count() > 1 else ""
    path = directory / f"nonfinite-step-{step}{suffix}.npz"
    found: dict[str, np.ndarray] = {}
    for where, leaf in jax.tree_util.tree_leaves_with_path(batch):
        values, numbers = _on_host(leaf)
        found[jax.tree_util.keystr(where, simple=True, separator=".") or "batch"] = values
        if rows is not None and values.ndim:
            found.setdefault("row numbers", rows[numbers])
    with files.replaced(path) as file:
        np.savez(file, allow_pickle=False, **found)
    return path


def _on_host(leaf: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of a leaf that this process has, and their numbers in the batch; a 0-d leaf has one."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable and not leaf.is_fully_replicated:
        blocks = {shard.index[0].start or 0: np.asarray(shard.data) for shard in leaf.addressable_shards}
        numbers = [np.arange(start, start + len(block)) for start, block in sorted(blocks.items())]
        return np.concatenate([block for _, block in sorted(blocks.items())]), np.concatenate(numbers)
    host = np.asarray(leaf)
    return host, np.arange(len(host) if host.ndim else 1)
