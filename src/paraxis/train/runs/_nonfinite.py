"""A loss or a gradient that is not finite: found, named, and kept to be looked at."""

import math
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._axes import tree
from paraxis._host import files, processes
from paraxis.errors import NonFiniteError
from paraxis.train._batches import Batch
from paraxis.train.runs._feed import Place
from paraxis.train.steps._mean import Mean

_MOST_ROWS = 20
NAMES = ("loss", "grad_norm")


def is_nonfinite(metrics: Mapping[str, Mean], state: Any) -> bool:
    """Return whether a step's loss or gradient, which were fetched, is not finite."""
    for name in NAMES:
        mean = metrics.get(name)
        if mean is None or all(map(math.isfinite, (mean.total, mean.weight, mean.value or 0.0))):
            continue
        # A sum may be too large where the mean is not; then the step knows.
        if mean.value is None or not math.isfinite(mean.value) or not _is_ok(state):
            return True
    return False


def _is_ok(state: Any) -> bool:
    ok = getattr(state, "ok", None)
    return ok is None or bool(ok)


def state_before(state: Any) -> Any:
    """Return the state of the last good step, which may go on, if steps have left it as it was; else ``None``."""
    ok = getattr(state, "ok", None)
    if ok is None or bool(ok):
        return None
    return state.replace(ok=ok | True)


def error_of(
    place: Place, metrics: Mapping[str, Mean], batch: Any, rows: np.ndarray | None, said: Sequence[str], state: Any
) -> NonFiniteError:
    """Return the error, with the batch, the state before, and what has been done about it in sentences."""
    step = place.number + 1
    loss = float(metrics["loss"]) if "loss" in metrics else math.nan
    what = "the gradient is not finite" if math.isfinite(loss) else "the loss is not finite"
    listed = "" if rows is None else f", of rows {_listed(rows)}: data.rows({place.number})"
    error = NonFiniteError(
        f"px.fit: {what} in step {step}, {place.in_words()} (loss {loss:.6g}){listed}. "
        f"{' '.join((*said, _of_the_data(batch, rows)))}"
    )
    error.batch, error.state = batch, state
    return error


def _listed(rows: np.ndarray) -> str:
    listed = ", ".join(map(str, rows[:_MOST_ROWS]))
    return listed + (f", … ({len(rows)} in all)" if len(rows) > _MOST_ROWS else "")


def _of_the_data(batch: Any, rows: np.ndarray | None) -> str:
    """Return whether it is the data's fault, as far as this process has them, and what to do then."""
    is_part = processes.count() > 1 and isinstance(batch, Batch)
    whose = f"the batch's rows of process {processes.index()}" if is_part else "the batch"
    found = [f"{name} {where}" for name, where in _bad_leaves(batch, rows)]
    if not found:
        return (
            f"All values of {whose} are finite, so it is the model, or values that are too large: take smaller steps, "
            f"or write px.train_step(loss, clip=1.0)"
        )
    return f"Of {whose}, these values are not finite themselves: {'; '.join(found)}. Mend these rows, or leave them out"


def _bad_leaves(batch: Any, rows: np.ndarray | None) -> Iterator[tuple[str, str]]:
    """Return the leaves with values that are not finite, and which of the source's rows have them."""
    arrays, num_rows = _parts(batch)
    for path, leaf in jax.tree_util.tree_leaves_with_path(arrays):
        values, numbers = _on_host(leaf, num_rows)
        if not jnp.issubdtype(values.dtype, jnp.inexact):
            continue
        is_bad = ~np.isfinite(values)
        if not is_bad.any():
            continue
        name = tree.name("batch", path)
        if numbers is None:
            yield name, "as a whole"
            continue
        bad = numbers[is_bad.reshape(len(numbers), -1).any(1)]
        if rows is not None and len(rows) > bad[-1]:
            yield name, f"in rows {_listed(rows[bad])}"
        else:
            yield name, f"in rows {_listed(bad)}, counted in the batch"


def save_batch(directory: Path, step: int, batch: Any, rows: np.ndarray | None) -> Path:
    """Write a batch's real rows as an ``.npz``; with several processes, each those that it has, to a file of its own.

    ``rows``: which ones of the source they are, if that is known.
    """
    suffix = f"-process-{processes.index()}" if processes.count() > 1 else ""
    path = directory / f"nonfinite-step-{step}{suffix}.npz"
    arrays, num_rows = _parts(batch)
    found: dict[str, np.ndarray] = {}
    for where, leaf in jax.tree_util.tree_leaves_with_path(arrays):
        values, numbers = _on_host(leaf, num_rows)
        if values.dtype == object:  # nothing is pickled
            continue
        found[_name(where)] = values
        if rows is not None and numbers is not None and len(numbers) <= len(rows):
            found.setdefault("row numbers", rows[numbers])
    with files.replaced(path) as file, zipfile.ZipFile(file, "w") as archive:  # np.savez takes no leaf called "file"
        for name, array in found.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
    return path


def _parts(batch: Any) -> tuple[Any, int | None]:
    """Return the arrays of a batch, and its number of real rows, if it may have others."""
    return (batch.tree, batch.num_rows) if isinstance(batch, Batch) else (batch, None)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".") or "batch"


def _on_host(leaf: Any, num_rows: int | None) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the real rows of a leaf that this process has, and their numbers in the batch; a 0-d leaf has none."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
        host = np.asarray(leaf)
        return (host[:num_rows], np.arange(len(host[:num_rows]))) if host.ndim else (host, None)
    blocks = {shard.index[0].start or 0: np.asarray(shard.data) for shard in leaf.addressable_shards}
    end = num_rows or leaf.shape[0]
    parts = [(start, block[: max(0, end - start)]) for start, block in sorted(blocks.items())]
    numbers = [np.arange(start, start + len(block)) for start, block in parts]
    return np.concatenate([block for _, block in parts]), np.concatenate(numbers)
