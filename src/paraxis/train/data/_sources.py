"""Sources of a loader's rows: arrays, datasets of rows, or iterables that give whole batches.

No framework is imported: a Grain or PyTorch object is known by its methods.
"""

import dataclasses
import inspect
import os
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._axes import tree
from paraxis.errors import DataError
from paraxis.train.data._host import common_rows, is_array, stacked, to_host

ENDLESS = 2**48
"""More rows than this are no rows: ``repeat()`` gives a Grain dataset such a length."""


class RowSource(Protocol):
    """Rows that can be read by number."""

    @property
    def num_rows(self) -> int: ...

    def read(self, rows: np.ndarray, epoch: int) -> Any:
        """Return a tree with host arrays ``(len(rows), ...)``, made anew."""
        ...

    def describe(self) -> dict[str, Any]: ...


@dataclasses.dataclass(frozen=True)
class Arrays:
    """A tree of arrays ``(num_rows, ...)``; of those that lie in files, only the rows that are asked for are read."""

    tree: Any
    num_rows: int

    def read(self, rows: np.ndarray, epoch: int) -> Any:
        what = f"reading rows {_some(rows)} of the source"
        return _of_source(what, lambda: jax.tree.map(lambda leaf: _taken(leaf, rows), self.tree))

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
        several = getattr(self.rows, "__getitems__", None)
        if several is not None:
            found = list(_of_source(f"reading rows {_some(rows)} of the source", lambda: several(rows.tolist())))
            if len(found) != len(rows):
                raise DataError(f"the source gave {len(found)} rows for the {len(rows)} numbers {_some(rows)}")
        else:
            shift = epoch * self.num_rows if _is_grain(self.rows) else 0
            found = [
                _of_source(f"reading row {row} of the source", lambda i=row + shift: self.rows[i])
                for row in rows.tolist()
            ]
        return stacked(found, rows)

    def describe(self) -> dict[str, Any]:
        return {"num_rows": self.num_rows}


def _some(rows: np.ndarray) -> str:
    shown = ", ".join(map(str, rows[:8].tolist()))
    return f"{shown}, …" if len(rows) > 8 else shown


def _of_source(what: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        raise DataError(f"{what} raised {type(error).__name__}: {error}") from error


class Found(NamedTuple):
    """A batch as a source gives it: any tree."""

    tree: Any


@dataclasses.dataclass(frozen=True)
class Batches:
    """An iterable of whole batches that can be gone through again, or a function that gives one for each epoch.

    ``source``: what the user gave. ``by_epoch``: an epoch's batches depend on its number only, so that it need not be
    reached through those before.
    """

    source: Any
    make: Callable[[int], Any]
    num_batches: int | None
    by_epoch: bool

    def epoch(self, number: int) -> Generator[Found, None, None]:
        """Yield the batches of one pass, as the source gives them."""
        found = _of_source("beginning to read the source", lambda: iter(self.make(number)))
        try:
            while True:
                try:
                    batch = Found(next(found))
                except StopIteration:
                    return
                except Exception as error:
                    raise DataError(f"reading it from the source raised {type(error).__name__}: {error}") from error
                yield batch
                del batch  # it may be large, and its reader is done with it
        finally:
            getattr(found, "close", lambda: None)()

    def describe(self) -> dict[str, Any]:
        return {"num_batches": self.num_batches}


def source_of(source: Any) -> Arrays | Dataset | Batches:
    """Return what a user's source is.

    Raises:
        DataError: if it is nothing that a loader can read.
        ShapeError: if the leaves of a tree have different numbers of rows.
    """
    if isinstance(source, (str, bytes, os.PathLike)):
        raise DataError(
            f"px.loader: source is a {type(source).__name__}, {source!r}; open the file and pass the rows: "
            "px.loader(np.load('rows.npy', mmap_mode='r'), batch_size=32)"
        )
    if hasattr(source, "__next__"):
        raise DataError(
            f"px.loader: source, a {type(source).__name__}, can be iterated only once, but training resumes and "
            "has several epochs; pass a function that gives one for each: px.loader(lambda epoch: read_batches(epoch))"
        )
    if hasattr(source, "iloc"):
        raise DataError(
            f"px.loader: source is a pandas {type(source).__name__}, which has columns; pass arrays of its rows: "
            "px.loader({'x': frame[['a', 'b']].to_numpy(), 'y': frame['y'].to_numpy()}, 32)"
        )
    if isinstance(source, Mapping) and jax.tree.structure(source) == jax.tree.structure(0):
        raise DataError(
            f"px.loader: source is a {type(source).__name__}, whose entries cannot be taken by number; pass a dict of "
            "them: px.loader({'x': source['x'], 'y': source['y']}, 32)"
        )
    if is_array(source) or jax.tree.structure(source) != jax.tree.structure(0):
        return _arrays(source)
    if hasattr(source, "__getitem__") and _length(source) is not None:
        return _dataset(source)
    if hasattr(source, "__iter__"):
        return _iterable(source)
    if callable(source):
        return _function(source)
    raise DataError(
        f"px.loader: source is a {type(source).__name__}, which has no rows; pass a tree of arrays (num_rows, ...), "
        "an object with __len__ and __getitem__, or an iterable of batches"
    )


def _arrays(source: Any) -> Arrays:
    leaves = jax.tree_util.tree_leaves_with_path(source)
    if not leaves:
        raise DataError(f"px.loader: source has no arrays, got {source!r}; write px.loader((x, y), batch_size=32)")
    for path, leaf in leaves:
        if not is_array(leaf):
            raise DataError(
                f"px.loader: {tree.name('source', path)} is a {type(leaf).__name__}, not an array (num_rows, ...); "
                "in a tree each leaf has all rows; write px.loader((np.stack(images), np.array(labels)), batch_size=32)"
            )
    size = common_rows("px.loader: ", "source", leaves)
    if not size:
        raise DataError("px.loader: source has no rows; a loader needs at least one")
    return Arrays(jax.tree_util.tree_map_with_path(_from_device, source), size)


def _from_device(path: Any, leaf: Any) -> Any:
    """Return an array on devices is brought to the host once, and not for each batch."""
    if not isinstance(leaf, jax.Array):
        return leaf
    if not leaf.is_fully_addressable:
        raise DataError(
            f"px.loader: {tree.name('source', path)} lies on the devices of several processes, and this one cannot "
            "read all of its rows; pass what is in the file or on the host"
        )
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise DataError(
            f"px.loader: {tree.name('source', path)} is of {leaf.dtype}, not of numbers; a loss function is given a "
            "key for each row by the step: def loss(model, batch, row_keys)"
        )
    return to_host(leaf)


def _dataset(source: Any) -> Dataset:
    size = _length(source)
    assert size is not None
    if not size:
        raise DataError(f"px.loader: source, a {type(source).__name__}, has no rows; a loader needs at least one")
    if size > ENDLESS:
        raise DataError(
            f"px.loader: source, a {type(source).__name__}, is endless; leave out its repeat(): the loader goes "
            "through the rows again by itself"
        )
    return Dataset(source, size)


def _iterable(source: Any) -> Batches:
    if any(base.__name__ == "IterableDataset" for base in type(source).__mro__):
        raise DataError(
            f"px.loader: source, a {type(source).__name__}, gives rows one by one; write "
            "px.loader(torch.utils.data.DataLoader(source, batch_size=32))"
        )
    return Batches(source, lambda epoch: source, _length(source), by_epoch=False)


def _function(source: Callable[..., Any]) -> Batches:
    try:
        parameters = inspect.signature(source).parameters.values()
    except (TypeError, ValueError):  # of a built-in function
        parameters = []
    required = [
        p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    named = [p for p in parameters if p.name == "epoch"]
    if len(required) > 1:
        raise DataError(
            f"px.loader: source, the function {getattr(source, '__name__', source)!r}, takes {len(required)} "
            "arguments; it is given the number of the epoch, or nothing: px.loader(lambda epoch: read_batches(epoch))"
        )
    if required or named:
        first = _of_source("px.loader: calling source(0)", lambda: source(0))
        return Batches(source, lambda epoch: source(epoch), _length(first), by_epoch=True)
    return Batches(source, lambda epoch: source(), None, by_epoch=False)


def _length(source: Any) -> int | None:
    try:
        return len(source)
    except (TypeError, NotImplementedError):
        return None


def _is_grain(source: Any) -> bool:
    """Return whether it is a Grain ``MapDataset``: those go on after their last row with the next epoch."""
    return hasattr(source, "to_iter_dataset")
