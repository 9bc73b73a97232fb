"""Sources of rows: arrays, datasets that give a row by its number, and iterables that give whole batches.

No framework is imported: a Grain or PyTorch object is known by its methods.
"""

import contextlib
import dataclasses
import inspect
import itertools
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._axes import tree
from paraxis._calls import check
from paraxis._jax import dtypes
from paraxis.errors import DataError, ParaxisError, ShapeError


class Part(NamedTuple):
    """A batch that is to be made, of which each process reads some rows."""

    epoch: int
    number: int
    """in its epoch"""
    ids: np.ndarray
    """what the randomness of each row is keyed by, int64; ``(num_rows,)``"""
    read: Callable[[np.ndarray], Any]
    """positions among its rows → a tree of these"""


@dataclasses.dataclass(frozen=True)
class Arrays:
    """A tree of arrays ``(num_rows, ...)``; of those that lie in files, only the rows that are asked for are read."""

    tree: Any
    num_rows: int

    def read(self, rows: np.ndarray, epoch: int) -> Any:
        return jax.tree.map(lambda leaf: _taken(leaf, rows), self.tree)

    def describe(self) -> dict[str, Any]:
        leaves = jax.tree_util.tree_leaves_with_path(self.tree)
        shapes = {tree.name("rows", path): [str(leaf.dtype), *map(int, leaf.shape[1:])] for path, leaf in leaves}
        return {"num_rows": self.num_rows, "leaves": shapes}


def _taken(leaf: Any, rows: np.ndarray) -> np.ndarray:
    if type(leaf) is np.ndarray:
        return leaf[rows]
    order = np.argsort(rows)  # a file is read forwards, and HDF5 takes no other order
    found = to_host(leaf[rows[order]])
    taken = np.empty_like(found)
    taken[order] = found
    return taken


@dataclasses.dataclass(frozen=True)
class Dataset:
    """An object that gives one row per number: ``__len__`` and ``__getitem__``.

    In epoch ``k``, a Grain dataset is asked for ``k * len + row``: so its own random steps draw anew in each epoch.
    """

    rows: Any
    num_rows: int

    def read(self, rows: np.ndarray, epoch: int) -> Any:
        if several := getattr(self.rows, "__getitems__", None):
            return stacked(list(several(rows.tolist())), rows)
        shift = epoch * self.num_rows if hasattr(self.rows, "to_iter_dataset") else 0  # a Grain MapDataset
        return stacked([self._row(row, row + shift) for row in rows.tolist()], rows)

    def _row(self, row: int, number: int) -> Any:
        try:
            return self.rows[number]
        except Exception as error:
            error.add_note(f"px.loader: raised by row {row} of the source")
            raise

    def describe(self) -> dict[str, Any]:
        return {"num_rows": self.num_rows}


@dataclasses.dataclass(frozen=True)
class Batches:
    """An iterable of whole batches that can be gone through again, or a function that gives one for each epoch.

    Attributes:
        source: what the user gave.
        make: a function of the epoch that gives the iterable.
        num_batches: of an epoch, if it is known.
        by_epoch: whether an epoch's batches depend on its number only, so that it need not be reached through those
            before.
    """

    source: Any
    make: Callable[[int], Any]
    num_batches: int | None
    by_epoch: bool

    def epoch(self, number: int) -> Generator[Any, None, None]:
        """Yield the batches of one pass, as the source gives them."""
        found = iter(self.make(number))
        try:
            yield from found
        finally:
            getattr(found, "close", lambda: None)()

    def one_pass(self, epoch: int) -> Generator[Part, None, None]:
        """Yield the batches of one pass, to be made."""
        with contextlib.closing(self.epoch(epoch)) as found:
            for number in itertools.count():
                with naming(epoch, number):
                    try:
                        part = _part(next(found), epoch, number)
                    except StopIteration:
                        return
                yield part
                del part  # it may be large

    def passes(self, start: int) -> Generator[Part, None, None]:
        """Yield batches without end from number ``start`` on; those before are read where there is no other way."""
        length = self.num_batches or 0
        first = start // length if length and self.by_epoch else 0
        skip = start - first * length
        for epoch in itertools.count(first):
            count = 0
            for part in self.one_pass(epoch):
                count += 1
                if count > skip:
                    yield part
            skip = max(0, skip - count)
            if not count or (length and count != length):
                raise DataError(
                    f"px.loader: the source has {count} batches in epoch {epoch + 1}"
                    + (f", but {length} by its len()" if length else "; give a function that makes them for each epoch")
                )

    def describe(self) -> dict[str, Any]:
        return {"num_batches": self.num_batches}


def _part(batch: Any, epoch: int, number: int) -> Part:
    size = _common_rows("the batch", batch)

    def read(positions: np.ndarray) -> Any:
        if len(positions) == size:
            return jax.tree.map(to_host, batch)
        return jax.tree.map(lambda x: to_host(x)[positions], batch)

    return Part(epoch, number, number * 2**32 + np.arange(size), read)


def source_of(source: Any) -> Arrays | Dataset | Batches:
    """Return what a user's source is.

    Raises:
        DataError: if it is nothing that a loader can read.
        ShapeError: if the leaves of a tree have different numbers of rows.
    """
    is_labelled = hasattr(source, "iloc")
    if isinstance(source, (str, bytes, os.PathLike)) or is_labelled:
        raise DataError(
            f"px.loader: source is a {type(source).__name__}; pass arrays of its rows: "
            "px.loader(np.load('rows.npy', mmap_mode='r'), 32), or px.loader({'x': frame[['a', 'b']].to_numpy()}, 32)"
        )
    if is_array(source) or (not isinstance(source, Iterator) and jax.tree.structure(source) != jax.tree.structure(0)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(source):
            if not is_array(leaf):
                raise DataError(
                    f"px.loader: {tree.name('source', path)} is a {type(leaf).__name__}, not an array (num_rows, ...); "
                    "in a tree each leaf has all rows: px.loader((np.stack(images), np.array(labels)), 32)"
                )
        return Arrays(jax.tree.map(_from_device, source), _common_rows("px.loader: source", source))
    if hasattr(source, "__getitem__") and not isinstance(source, Mapping) and (size := _length(source)):
        return Dataset(source, size)
    return batches_of("px.loader: source", source)


def batches_of(what: str, data: Any) -> Batches:
    """Return the batches of an iterable, or of a function ``data(epoch)`` or ``data()`` that gives one.

    Raises:
        DataError: if it is neither, or can be iterated only once.
    """
    if isinstance(data, (Iterator, Mapping)) or not (isinstance(data, Iterable) or callable(data)):
        raise DataError(
            f"{what} is a {type(data).__name__}, which does not give batches anew for each epoch; pass arrays, "
            "px.loader({'x': x, 'y': y}, 32), or a function that makes them: lambda epoch: read_batches(epoch)"
        )
    if isinstance(data, Iterable):
        return Batches(data, lambda epoch: data, _length(data), by_epoch=isinstance(data, (list, tuple)))
    if _takes_epoch(data):
        return Batches(data, data, _length(data(0)), by_epoch=True)
    return Batches(data, lambda epoch: data(), None, by_epoch=False)


def _takes_epoch(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of a built-in function
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(p.kind in positional and (p.default is p.empty or p.name == "epoch") for p in parameters)


def _length(source: Any) -> int | None:
    try:
        return len(source) or None
    except (TypeError, NotImplementedError):
        return None


def is_array(x: Any) -> bool:
    """Return whether it has rows that can be taken by number: an array of NumPy, JAX or PyTorch, or one in a file."""
    return hasattr(x, "dtype") and hasattr(x, "__getitem__") and len(getattr(x, "shape", ())) > 0


def to_host(x: Any) -> np.ndarray:
    """Return a number or an array as a NumPy array; a PyTorch tensor is known by its methods."""
    return np.asarray(x.detach().cpu().numpy() if hasattr(x, "detach") else x)


def _from_device(leaf: Any) -> Any:
    """Copy a device array to the host once, rather than for each batch."""
    return to_host(leaf) if isinstance(leaf, jax.Array) else leaf


def stacked(found: Sequence[Any], rows: np.ndarray) -> Any:
    """Stack single rows, trees alike, to one tree with leaves ``(len(rows), ...)``.

    Args:
        found: the rows.
        rows: their numbers, for errors.

    Raises:
        ShapeError: if they differ in structure, shape or dtype.
    """
    structure = jax.tree.structure(found[0])
    for row, value in zip(rows, found, strict=True):
        if jax.tree.structure(value) != structure:
            raise ShapeError(f"row {row} of the source is {jax.tree.structure(value)}, row {rows[0]} is {structure}")
    columns = zip(*(jax.tree.leaves(value) for value in found), strict=True)
    return jax.tree.unflatten(structure, [_column(column, rows) for column in columns])


def _column(values: Sequence[Any], rows: np.ndarray) -> np.ndarray:
    if isinstance(values[0], (str, bytes)):  # for a transform to make numbers of
        column = np.empty(len(values), object)
        column[:] = values
        return column
    arrays = [to_host(value) for value in values]
    for row, array in zip(rows, arrays, strict=True):
        if (array.shape, array.dtype) != (arrays[0].shape, arrays[0].dtype):
            raise ShapeError(
                f"row {row} of the source has {array.dtype}{array.shape} where row {rows[0]} has "
                f"{arrays[0].dtype}{arrays[0].shape}; make all rows alike: np.pad(row, (0, length - len(row)))"
            )
    return np.stack(arrays)


def _common_rows(what: str, given: Any) -> int:
    """Return the number of rows that all leaves of a tree have."""
    leaves = jax.tree_util.tree_leaves_with_path(given)
    shapes = {jax.tree_util.keystr(path): tuple(getattr(leaf, "shape", ()) or np.shape(leaf)) for path, leaf in leaves}
    sizes = {path: shape[0] if shape else None for path, shape in shapes.items()}
    number = next(iter(sizes.values()), None)
    if not number or set(sizes.values()) != {number}:
        raise ShapeError(f"{what} must be a tree of arrays that start with the same rows, got {sizes} rows")
    return number


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
        name, array = tree.name("batch", path), to_host(leaf)
        if array.ndim == 0 or len(array) != num_rows:
            raise ShapeError(f"{name} has shape {array.shape}, but each leaf must start with the {num_rows} rows")
        if not (jnp.issubdtype(array.dtype, jnp.number) or array.dtype == np.bool_):
            raise DataError(f"{name} is of {array.dtype}, not of numbers; leave it out, or encode it in transform=")
        if (reason := check.why_cut(array)) is not None:
            raise DataError(f"{name} {reason}")
        array = dtypes.native(array)
        return np.array(array, jax.dtypes.canonicalize_dtype(array.dtype), copy=copy or None)

    return jax.tree_util.tree_map_with_path(one, batch)


@contextlib.contextmanager
def naming(epoch: int, number: int) -> Iterator[None]:
    """Errors from within name the batch, counted from 1 as :func:`px.fit` does for people."""
    try:
        yield
    except ParaxisError as error:
        raise type(error)(f"px.loader: batch number {number + 1} of epoch {epoch + 1}: {error}") from error
    except Exception as error:
        error.add_note(f"px.loader: raised when batch number {number + 1} of epoch {epoch + 1} was made")
        raise
