"""Trees of rows on the host: stacked out of single rows, and checked before they go to the devices."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._axes import tree
from paraxis._calls import arguments
from paraxis._jax import dtypes
from paraxis.errors import DataError, ShapeError


def is_array(x: Any) -> bool:
    """Return whether it has rows that can be taken by number: an array of NumPy, JAX or PyTorch, or one in a file."""
    is_series = hasattr(x, "iloc")  # of pandas: its rows have labels
    return hasattr(x, "dtype") and hasattr(x, "__getitem__") and len(getattr(x, "shape", ())) > 0 and not is_series


def to_host(x: Any) -> np.ndarray:
    """Return a number or an array as a NumPy array; a PyTorch tensor is known by its methods."""
    if hasattr(x, "detach"):
        x = x.detach().cpu().numpy()
    return np.asarray(x)


def stacked(found: Sequence[Any], rows: np.ndarray) -> Any:
    """Single rows, trees alike, as one tree with leaves ``(len(rows), ...)``.

    Args:
        found: the rows.
        rows: their numbers, for errors.

    Raises:
        DataError: if there is no such row.
        ShapeError: if they differ in structure, shape or dtype.
    """
    structure = jax.tree.structure(found[0])
    for row, value in zip(rows, found, strict=True):
        if value is None:
            raise DataError(
                f"row {row} of the source is None; a Grain dataset with a filter has no rows by number: write "
                "px.loader(dataset.to_iter_dataset().batch(32))"
            )
        if jax.tree.structure(value) != structure:
            raise ShapeError(
                f"row {row} of the source is {jax.tree.structure(value)}, but row {rows[0]} is {structure}; all rows "
                "must be alike"
            )
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(found[0])]
    columns = zip(*(jax.tree.leaves(value) for value in found), strict=True)
    return jax.tree.unflatten(
        structure, [_column(tree.name("", path), column, rows) for path, column in zip(paths, columns, strict=True)]
    )


def _column(name: str, values: Sequence[Any], rows: np.ndarray) -> np.ndarray:
    if isinstance(values[0], (str, bytes)):  # for a transform to make numbers of
        column = np.empty(len(values), object)
        column[:] = values
        return column
    arrays = [to_host(value) for value in values]
    first = arrays[0]
    for row, array in zip(rows, arrays, strict=True):
        if (array.shape, array.dtype) != (first.shape, first.dtype):
            raise ShapeError(
                f"row{name} of row {row} of the source is {array.dtype}{array.shape}, but that of row {rows[0]} is "
                f"{first.dtype}{first.shape}; make all rows alike in the source: np.pad(row, (0, length - len(row)))"
            )
    return np.stack(arrays)


def num_rows_of(batch: Any) -> int:
    """Return the number of rows of a batch as a source gives it.

    Raises:
        DataError: if it is no tree of arrays, or is empty.
        ShapeError: if its leaves have different numbers of rows, or none.
    """
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    if not leaves:
        raise DataError(f"the source gave {batch!r}, which has no arrays; a batch is a tree of arrays (rows, ...)")
    for path, leaf in leaves:
        if not is_array(leaf) and np.ndim(leaf) == 0:
            raise ShapeError(
                f"{tree.name('batch', path)} is a single {type(leaf).__name__}, without rows; if the source gives rows "
                "one by one, let it put them together (Grain: .batch(32)); if it is a constant, leave it out"
            )
    size = common_rows("", "batch", leaves)
    if not size:
        raise DataError("the source gave a batch without rows; leave it out")
    return size


def common_rows(where: str, argument: str, leaves: Sequence[tuple[Any, Any]]) -> int:
    """Return the number of rows that all leaves of a tree have, none of which is 0-d.

    Raises:
        ShapeError: naming the first that has another one.
    """
    (first_path, first), *others = leaves
    size = int(np.shape(first)[0])
    for path, leaf in others:
        if np.shape(leaf)[0] != size:
            raise ShapeError(
                f"{where}{tree.name(argument, path)} has {np.shape(leaf)[0]} rows, but "
                f"{tree.name(argument, first_path)} has {size}; each leaf starts with the same rows, in the same order"
            )
    return size


def for_devices(batch: Any, num_rows: int, *, copy: bool) -> Any:
    """Return a batch's leaves as arrays of dtypes that devices have.

    Args:
        batch: a tree of arrays.
        num_rows: that each leaf must have.
        copy: whether somebody else may write into its memory later, which JAX may take for the device's own.

    Raises:
        DataError: if a leaf is not of numbers, or not of numbers that its narrower dtype has.
        ShapeError: if a leaf has not the rows.
    """

    def one(path: Any, leaf: Any) -> np.ndarray:
        name = tree.name("batch", path)
        array = to_host(leaf)
        if array.ndim == 0 or len(array) != num_rows:
            raise ShapeError(f"{name} has shape {array.shape}, but each leaf must start with the {num_rows} rows")
        return _narrow(name, array, copy=copy)

    return jax.tree_util.tree_map_with_path(one, batch)


def _narrow(name: str, array: np.ndarray, *, copy: bool) -> np.ndarray:
    if not (jnp.issubdtype(array.dtype, jnp.number) or array.dtype == np.bool_):
        kind = type(array.flat[0]).__name__ if array.dtype == object and array.size else array.dtype
        raise DataError(
            f"{name} is of {kind}, not of numbers, which a device cannot hold; leave it out or make numbers of it: "
            "px.loader(source, batch_size, transform=encode)"
        )
    array = dtypes.native(array)
    if (reason := arguments.why_cut(array)) is not None:
        raise DataError(f"{name} {reason}")
    return np.array(array, jax.dtypes.canonicalize_dtype(array.dtype), copy=copy or None)
