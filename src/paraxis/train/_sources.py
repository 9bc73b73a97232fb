"""Sources of batches: arrays, datasets that give a row by its number, and iterables that give whole batches.

No framework is imported: a Grain or PyTorch object is known by its methods. The order of rows is a function of the
seed, the epoch and the number of rows. Philox is a counter-based generator (Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", SC 2011): it is keyed by (seed, epoch), so that no epoch has to be gone through to know a later one.
NumPy promises that a bit generator's stream stays, which it does not of ``Generator.permutation``; so rows are put in
the order of their random bits.
"""

import abc
import contextlib
import dataclasses
import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from paraxis._core import check
from paraxis._host import digests
from paraxis.errors import DataError
from paraxis.train._batches import num_rows
from paraxis.train._leaves import by_path


class Position(NamedTuple):
    """A batch's number from the first of all, its epoch, its number in that, whether it ends it; from 0."""

    number: int
    epoch: int
    within: int
    is_last: bool = False

    @classmethod
    def of(cls, number: int, length: int | None) -> "Position":
        """Return that of a batch by its number, with so many batches in an epoch; ``None``: in the first one."""
        return cls(number, *(divmod(number, length) if length else (0, number)))

    def __str__(self) -> str:
        return f"number {self.within + 1} of epoch {self.epoch + 1}"


@dataclasses.dataclass(frozen=True)
class Order:
    """The order of rows in batches, epoch after epoch; each row comes once in an epoch, unless it is left over.

    With ``weights``, a cumulative sum, as many rows are drawn by these.
    """

    num_rows: int
    batch_size: int
    shuffle: bool
    drop_last: bool
    seed: int
    weights: np.ndarray | None = None

    def __len__(self) -> int:
        """Batches of an epoch."""
        return self.num_rows // self.batch_size if self.drop_last else -(-self.num_rows // self.batch_size)

    def rows(self, number: int) -> np.ndarray:
        """Return the rows of a batch, by its number counted from the first epoch's: ``(rows,)``, int64."""
        epoch, batch = divmod(number, len(self))
        first = batch * self.batch_size
        last = min(first + self.batch_size, self.num_rows)
        if self.weights is None:
            return _shuffled(self.seed, epoch, self.num_rows)[first:last] if self.shuffle else np.arange(first, last)
        skipped, total = first % 4, self.weights[-1]  # Philox makes four numbers at once
        bits = np.random.Philox(key=_words(self.seed, epoch)).advance(first // 4)
        at = (bits.random_raw(skipped + last - first)[skipped:] >> np.uint64(11)) * 2.0**-53 * total
        return np.searchsorted(self.weights, np.minimum(at, np.nextafter(total, 0)), side="right")

    def describe(self) -> dict[str, Any]:
        """Describe it for JSON, by name, should there ever be another one."""
        weights = None if self.weights is None else digests.of_array(self.weights)
        return {"order": "philox-argsort" if self.shuffle else "as they come", **vars(self), "weights": weights}


@functools.lru_cache(maxsize=4)  # a thread that reads ahead may be in the next epoch already
def _shuffled(seed: int, epoch: int, num_rows: int) -> np.ndarray:
    return np.argsort(np.random.Philox(key=_words(seed, epoch)).random_raw(num_rows), kind="stable")


def generators(seed: int, epoch: int, rows: np.ndarray) -> list[np.random.Generator]:
    """Return a NumPy generator per row, keyed by (seed, epoch, row).

    The same row draws the same in one epoch, whatever the batch size, the devices and the processes.
    """
    # The last word keeps them apart from the order's own numbers, which count in the first.
    counters, key = (_words(0, row, 0, 1) for row in rows.tolist()), _words(seed, epoch)
    return [np.random.Generator(np.random.Philox(key=key, counter=counter)) for counter in counters]


def _words(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.uint64)  # a list of large and small ones would become floats


_Read = Callable[[np.ndarray, int], Any]  # read(rows, epoch) → a tree of arrays (len(rows), ...)


class Batches(Protocol):
    """Batches of a run, epoch after epoch, as :func:`loader` makes them; ``describe`` is a description for JSON.

    Attributes:
        length: number of batches of an epoch, if it is known.
        leaves: the arrays that batches are made of, by name, as far as they are known.
        by_epoch: whether an epoch's depend on its number only, so that those before need not be read.
    """

    length: int | None
    leaves: dict[str, Any]
    what = "px.loader: source"
    by_epoch = True

    @abc.abstractmethod
    def describe(self) -> dict[str, Any]: ...
    @abc.abstractmethod
    def epoch(self, number: int, /) -> Generator[Any, None, None]: ...  # or of the next pass
    def steps(self, start: Position, /) -> Generator[tuple[Position, Any], None, None]:
        """Yield batches without end from a position on; those before are read where there is no other way."""
        number, skip = start.number, start.within
        for epoch in itertools.count(start.epoch if self.by_epoch else 0):
            batches, count = self.epoch(epoch), 0
            following = next(batches, _END)
            while following is not _END:  # whether a batch is the last takes reading the next
                batch, following = following, next(batches, _END)
                if epoch >= start.epoch and count >= skip:
                    yield Position(number, epoch, count, following is _END), batch
                    number += 1
                count += 1
                del batch  # it may be large
            if not count:
                raise DataError(
                    f"{self.what} has no batches in epoch {epoch + 1}; of a generator, give the function that makes it"
                )
            skip = max(0, skip - count) if epoch >= start.epoch else skip


_END: Any = object()


class Rows(Batches):
    """Rows by number, all or the ``chosen``, in an order; a batch is numbers by which its rows draw, and a reader."""

    arrays: Any = None  # the source, if it is a tree of arrays that an ensemble sends to its devices once
    is_kept = False  # whether devices have the dtypes of what is read, which is then not looked at again

    def __init__(self, order: Order, read: _Read, leaves: dict[str, Any], chosen: np.ndarray | None) -> None:
        self.order, self.length, self.leaves, self.chosen, self._read = order, len(order), leaves, chosen, read
        plain = {name: x.detach().cpu() if hasattr(x, "detach") else x for name, x in leaves.items()}
        self._digests = {name: digests.of_array(x) for name, x in plain.items()}

    def describe(self) -> dict[str, Any]:
        kinds = {name: [str(leaf.dtype), *map(int, leaf.shape[1:])] for name, leaf in self.leaves.items()}
        chosen = {} if self.chosen is None else {"rows": digests.of_array(self.chosen)}
        return {**self.order.describe(), "leaves": kinds, "digests": self._digests, **chosen}

    def epoch(self, number: int) -> Generator[Any, None, None]:
        for batch in range(size := len(self.order)):
            rows = self.order.rows(number * size + batch)
            # A row that is drawn twice in an epoch draws twice: it is keyed by its place there.
            ids = rows if self.order.weights is None else batch * self.order.batch_size + np.arange(len(rows))
            chosen = rows if self.chosen is None else self.chosen[rows]
            yield ids, lambda at, chosen=chosen: self._read(chosen[at], number)


class GivenBatches(Batches):
    """An iterable of whole batches that can be gone through again, or a function that gives one for each epoch."""

    def __init__(self, what: str, data: Any) -> None:
        is_iterable = isinstance(data, Iterable)
        is_none = isinstance(data, (Iterator, Mapping, tuple, str)) or hasattr(data, "dtype")
        if is_none or not (is_iterable or callable(data)):
            raise DataError(
                f"{what} is a {type(data).__name__}, which does not give batches anew for each epoch; give "
                "px.loader(arrays, 32), or lambda epoch: read(epoch); without data, give a key: jax.random.key(0)"
            )
        self._is_listed, takes_epoch = isinstance(data, list), not is_iterable and _takes_epoch(data)
        batches: Any = data
        self.what = what
        self._pass: Callable[[int], Any] = batches if takes_epoch else lambda _: batches if is_iterable else batches()
        self.by_epoch = takes_epoch or self._is_listed
        self.length = _length(batches(0) if takes_epoch else data)
        self.leaves = by_path(data, "batches") if self._is_listed else {}

    def describe(self) -> dict[str, Any]:
        return {"num_batches": self.length}

    def epoch(self, number: int) -> Generator[Any, None, None]:
        with noted(f"{self.what}: raised in epoch {number + 1}"):
            batches = iter(self._pass(number))
        for within in itertools.count():
            with noted(f"{self.what}: raised when batch {Position(0, number, within)} was made"):
                batch = next(batches, _END)
            if batch is _END:
                return
            if not self._is_listed:  # a generator may fill its arrays again for the next batch
                batch = jax.tree.map(lambda x: np.copy(x, subok=True) if isinstance(x, np.ndarray) else x, batch)
            yield batch
            del batch


class Keys(Batches):
    """A random key for each step, ``fold_in(key, number)``, in place of data; an evaluation has the key itself."""

    def __init__(self, key: jax.Array) -> None:
        self.key, self.length, self.leaves = key, None, {}

    def describe(self) -> dict[str, Any]:
        return {"key": np.ravel(jax.random.key_data(self.key)).tolist()}

    def epoch(self, number: int) -> Generator[Any, None, None]:
        yield self.key

    def steps(self, start: Position) -> Generator[tuple[Position, Any], None, None]:
        numbers = itertools.count(start.number)
        return ((Position(number, 0, number), jax.random.fold_in(self.key, number)) for number in numbers)


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


def source_of(source: Any) -> GivenBatches | tuple[int, _Read, dict[str, Any], Any]:
    """Return what a user's source is: batches, or the number of its rows, their reader, arrays by name, and a tree."""
    if not isinstance(source, Iterator):
        check.by_position("px.loader", "source", source)
    if _is_array(source) or (not isinstance(source, Iterator) and jax.tree.structure(source) != jax.tree.structure(0)):
        for name, leaf in by_path(source, "source").items():
            if not _is_array(leaf):
                raise DataError(f"px.loader: {name} is a {type(leaf).__name__}, not an array of all rows: np.array(x)")
        on_host = jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, source)  # once for all
        is_plain = all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(on_host))
        of = operator.itemgetter if is_plain else lambda rows: functools.partial(_take_rows, rows)
        read = lambda rows, epoch: jax.tree.map(of(rows), on_host)  # noqa: E731
        return num_rows("px.loader", "source", source), read, by_path(on_host, "rows"), on_host
    if hasattr(source, "__getitem__") and not isinstance(source, (Mapping, str)) and (size := _length(source)):
        return size, functools.partial(_read_rows, source, size), {}, None
    return GivenBatches("px.loader: source", source)


def _is_array(x: Any) -> bool:
    """Return whether it has rows that can be taken by number: an array of NumPy, JAX or PyTorch, or one in a file."""
    return hasattr(x, "dtype") and hasattr(x, "__getitem__") and len(getattr(x, "shape", ())) > 0


def _take_rows(rows: np.ndarray, leaf: Any) -> np.ndarray:
    """Return some rows of an array; of one in a file, only these are read."""
    order = np.argsort(rows)  # a file is read forwards, and HDF5 takes no other order
    return to_host(leaf[rows[order]])[np.argsort(order)]


def _read_rows(data: Any, num_rows: int, rows: np.ndarray, epoch: int) -> Any:
    """Return some rows of an object that gives one by its number: ``__len__`` and ``__getitem__``.

    In epoch ``k``, a Grain dataset is asked for ``k * len + row``: so its own random steps draw anew in each epoch.
    """
    shift = epoch * num_rows if hasattr(data, "to_iter_dataset") else 0  # a Grain MapDataset

    def one(row: int) -> Any:
        with noted(f"px.loader: raised by row {row} of the source"):
            return data[row + shift]

    def column(*values: Any) -> np.ndarray:
        if isinstance(values[0], (str, bytes)):  # for a transform to make numbers of
            return np.array(values, object)
        return np.stack([to_host(value) for value in values])

    several = getattr(data, "__getitems__", lambda rows: map(one, rows))
    return jax.tree.map(column, *several(rows.tolist()))


def to_host(x: Any) -> np.ndarray:
    """Return a number or an array as a NumPy array; a PyTorch tensor is known by its methods."""
    if hasattr(x, "filled"):
        check.by_position("px.loader", "batch", x)
    return np.asarray(x.detach().cpu().numpy() if hasattr(x, "detach") else x)


class noted(contextlib.AbstractContextManager[None]):  # noqa: N801  # a generator takes 2 µs more a step
    def __init__(self, note: str, of: type[Exception] = Exception) -> None:
        self._note, self._of = note, of

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, self._of):
            error.add_note(self._note)
