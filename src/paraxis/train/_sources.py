"""Sources of rows: arrays, datasets that give a row by its number, and iterables that give whole batches.

No framework is imported: a Grain or PyTorch object is known by its methods.
"""

import contextlib
import dataclasses
import inspect
import itertools
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from paraxis._core import pytrees
from paraxis.errors import DataError
from paraxis.train._batches import num_rows
from paraxis.train._order import Position


@dataclasses.dataclass(frozen=True)
class Rows:
    """A source of rows by number.

    Attributes:
        num_rows: how many there are.
        read: ``read(rows, epoch)`` → a tree of arrays ``(len(rows), ...)``.
        leaves: the arrays that are read, by name; empty if they are not known.
    """

    num_rows: int
    read: Callable[[np.ndarray, int], Any]
    leaves: dict[str, Any]

    def describe(self) -> dict[str, Any]:
        kinds = {name: [str(leaf.dtype), *map(int, leaf.shape[1:])] for name, leaf in self.leaves.items()}
        return {"num_rows": self.num_rows, "leaves": kinds}


def _arrays(source: Any) -> Rows:
    """Return the rows of a tree of arrays; of those that lie in files, only the rows that are asked for are read."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(source):
        if not _is_array(leaf):
            raise DataError(
                f"px.loader: {pytrees.name('source', path)} is a {type(leaf).__name__}, not an array (num_rows, ...); "
                "in a tree each leaf has all rows: px.loader((np.stack(images), np.array(labels)), 32)"
            )
    on_host = jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, source)  # once for all

    def read(rows: np.ndarray, epoch: int) -> Any:
        def taken(leaf: Any) -> np.ndarray:
            if type(leaf) is np.ndarray:
                return leaf[rows]
            order = np.argsort(rows)  # a file is read forwards, and HDF5 takes no other order
            return to_host(leaf[rows[order]])[np.argsort(order)]

        return jax.tree.map(taken, on_host)

    return Rows(num_rows("px.loader", "source", source), read, _by_name("rows", on_host))


def _dataset(data: Any, num_rows: int) -> Rows:
    """Return the rows of an object that gives one by its number: ``__len__`` and ``__getitem__``.

    In epoch ``k``, a Grain dataset is asked for ``k * len + row``: so its own random steps draw anew in each epoch.
    """

    def read(rows: np.ndarray, epoch: int) -> Any:
        shift = epoch * num_rows if hasattr(data, "to_iter_dataset") else 0  # a Grain MapDataset

        def one(row: int) -> Any:
            try:
                return data[row + shift]
            except Exception as error:
                error.add_note(f"px.loader: raised by row {row} of the source")
                raise

        def column(*values: Any) -> np.ndarray:
            if isinstance(values[0], (str, bytes)):  # for a transform to make numbers of
                return np.array(values, object)
            arrays = [to_host(value) for value in values]
            kinds = [f"{x.dtype}{x.shape}" for x in arrays]
            for row, kind in zip(rows, kinds, strict=True):
                if kind != kinds[0]:
                    raise DataError(
                        f"row {row} of the source has {kind} where row {rows[0]} has {kinds[0]}; make all rows alike: "
                        "np.pad(row, (0, length - len(row)))"
                    )
            return np.stack(arrays)

        several = getattr(data, "__getitems__", lambda rows: map(one, rows))
        return jax.tree.map(column, *several(rows.tolist()))

    return Rows(num_rows, read, {})


class Batches:
    """An iterable of whole batches that can be gone through again, or a function that gives one for each epoch.

    Attributes:
        length: number of batches of an epoch, if it is known.
        leaves: the arrays of a list of batches, by name.
    """

    def __init__(self, what: str, data: Any) -> None:
        is_iterable = isinstance(data, Iterable)
        if isinstance(data, (Iterator, Mapping)) or not (is_iterable or callable(data)):
            raise DataError(
                f"{what} is a {type(data).__name__}, which does not give batches anew for each epoch; pass arrays, "
                "px.loader({'x': x, 'y': y}, 32), or a function that makes them: lambda epoch: read_batches(epoch)"
            )
        is_listed, takes_epoch = isinstance(data, (list, tuple)), not is_iterable and _takes_epoch(data)
        found: Any = data
        self._what = what
        self._pass: Callable[[int], Any] = found if takes_epoch else lambda _: found if is_iterable else found()
        # An epoch's batches depend on its number only, so that it need not be reached through those before.
        self._by_epoch = takes_epoch or is_listed
        self.length = _length(found(0) if takes_epoch else data)
        self.leaves = _by_name("batches", data) if is_listed else {}

    def describe(self) -> dict[str, Any]:
        return {"num_batches": self.length}

    def epoch(self, number: int) -> Generator[Any, None, None]:
        """Yield the batches of one pass, as the source gives them. Errors name them."""
        with naming(self._what, Position(0, number, 0)):
            found = iter(self._pass(number))
        for within in itertools.count():
            with naming(self._what, Position(0, number, within)):
                batch = next(found, _END)
            if batch is _END:
                return
            yield batch
            del batch  # it may be large

    def steps(self, start: Position) -> Generator[tuple[Position, Any], None, None]:
        """Yield batches without end from a position on; those before are read where there is no other way."""
        number, skip = start.number, start.within
        for epoch in itertools.count(start.epoch if self._by_epoch else 0):
            found, count = self.epoch(epoch), 0
            following = next(found, _END)
            while following is not _END:  # whether a batch is the last takes reading the next
                batch, following = following, next(found, _END)
                if epoch >= start.epoch and count >= skip:
                    yield Position(number, epoch, count, following is _END), batch
                    number += 1
                count += 1
                del batch
            if not count:
                raise DataError(
                    f"{self._what} has no batches in epoch {epoch + 1}; if it can be iterated only once, give a "
                    "function that makes it again: lambda epoch: read_batches(epoch)"
                )
            skip = max(0, skip - count) if epoch >= start.epoch else skip


_END: Any = object()


def _takes_epoch(function: Any) -> bool:
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


def source_of(source: Any) -> Rows | Batches:
    """Return what a user's source is."""
    if isinstance(source, (str, bytes, os.PathLike)) or hasattr(source, "iloc"):
        raise DataError(
            f"px.loader: source is a {type(source).__name__}; pass arrays of its rows: "
            "px.loader(np.load('rows.npy', mmap_mode='r'), 32), or px.loader({'x': frame[['a', 'b']].to_numpy()}, 32)"
        )
    if _is_array(source) or (not isinstance(source, Iterator) and jax.tree.structure(source) != jax.tree.structure(0)):
        return _arrays(source)
    if hasattr(source, "__getitem__") and not isinstance(source, Mapping) and (size := _length(source)):
        return _dataset(source, size)
    return Batches("px.loader: source", source)


def _is_array(x: Any) -> bool:
    """Return whether it has rows that can be taken by number: an array of NumPy, JAX or PyTorch, or one in a file."""
    return hasattr(x, "dtype") and hasattr(x, "__getitem__") and len(getattr(x, "shape", ())) > 0


def to_host(x: Any) -> np.ndarray:
    """Return a number or an array as a NumPy array; a PyTorch tensor is known by its methods."""
    return np.asarray(x.detach().cpu().numpy() if hasattr(x, "detach") else x)


def _by_name(of: str, values: Any) -> dict[str, Any]:
    return {pytrees.name(of, path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(values)}


@contextlib.contextmanager
def naming(what: str, position: Position) -> Iterator[None]:
    """Errors from within name the batch."""
    try:
        yield
    except Exception as error:
        error.add_note(f"{what}: raised when batch {position} was made")
        raise
