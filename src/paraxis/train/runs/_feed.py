"""The batches of a run, each with its place in it, from any place on."""

import collections
import contextlib
import inspect
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from paraxis.errors import DataError
from paraxis.train._batches import Batch
from paraxis.train.data._loader import Loader


class Place(NamedTuple):
    """A batch's place: its number from the first of all, its epoch, its number in that, whether it ends it.

    All are counted from 0.
    """

    number: int
    epoch: int
    within: int
    is_last: bool

    def in_words(self) -> str:
        """Return a text for people: both counted from 1, as steps are."""
        return f"number {self.within + 1} of epoch {self.epoch + 1}"


class Feed:
    """Batches epoch after epoch.

    Args:
        what: the argument that they come from, for errors: ``"px.fit: data"``.
        data: a loader; or an iterable of batches that can be gone through again; or a function that gives an iterable
            of the batches of an epoch, ``data(epoch)`` or ``data()``.
        several: what to do about several loaders.

    Raises:
        DataError: if it is none of these.
    """

    def __init__(self, what: str, data: Any, several: str = "px.fit takes one: put their rows together") -> None:
        self._what = what
        self._data = data
        self._loader = data if isinstance(data, Loader) else None
        if self._loader is None:
            _refuse_several(what, data, several)
        self._open = self._loader.epoch if self._loader is not None else _opener(what, data)
        self._by_epoch = self._loader.by_epoch if self._loader is not None else callable(data) or _is_list(data)
        self.length = _length(data)
        """Batches of an epoch, if that is known."""

    def describe(self) -> dict[str, Any]:
        """Return what the data are, as far as it can be said without reading them: for JSON."""
        return {"batches": self.length} if self._loader is None else self._loader.describe()

    def depends_on(self) -> dict[str, Any]:
        """Return what the numbers in the batches depend on, to be described."""
        return {"data": self._data} if self._loader is None else self._loader.depends_on()

    def arrays(self) -> dict[str, Any]:
        """Return the arrays in memory that batches are made of, by where they stand in ``data``."""
        found = jax.tree_util.tree_leaves_with_path(self.depends_on()["data"])
        in_memory = (jax.Array, np.ndarray)
        return {f"data{jax.tree_util.keystr(path)}": x for path, x in found if isinstance(x, in_memory)}

    def rows(self, number: int) -> np.ndarray | None:
        """Return which rows a batch has, if that is known."""
        if self._loader is not None:
            with contextlib.suppress(DataError):
                return self._loader.rows(number)
        return None

    def start(self, number: int) -> Place:
        """Return the place of a batch by its number.

        Raises:
            DataError: if epochs have no known length, so that it cannot be told.
        """
        if number and self.length is None:
            raise DataError(
                f"{self._what} does not say how many batches an epoch has, so it is not known with which "
                f"one a state after {number} steps continues; give px.loader(arrays, 32), a list, or checkpoint="
            )
        epoch, within = divmod(number, self.length) if self.length else (0, 0)
        return Place(number, epoch, within, False)

    def batches(self, start: Place) -> Generator[tuple[Place, Any], None, None]:
        """Batches without end, from a place on. Close it when done."""
        if self._loader is None or self.length is None:
            yield from self._passes(start)
            return
        with contextlib.closing(self._loader.batches(start.number)) as found:
            for number, batch in zip(itertools.count(start.number), found, strict=False):
                epoch, within = divmod(number, self.length)
                yield Place(number, epoch, within, within + 1 == self.length), batch
                del batch  # it is not needed while the next one is waited for

    def epoch(self) -> Generator[Any, None, None]:
        """Yield the batches of the first epoch. Close it when done."""
        with _closing(self._open(0)) as found:
            yield from found

    def _passes(self, start: Place) -> Generator[tuple[Place, Any], None, None]:
        number, within = start.number, start.within
        if not self._by_epoch:  # what a pass gives may depend on how many there were
            for epoch in range(start.epoch):
                with _closing(self._open(epoch)) as found:
                    collections.deque(found, maxlen=0)
        for epoch in itertools.count(start.epoch):
            with _closing(self._open(epoch)) as found:
                for is_last, batch in _marked(itertools.islice(found, within, None)):
                    yield Place(number, epoch, within, is_last), batch
                    number, within = number + 1, within + 1
                    del batch
            if not within:
                raise DataError(
                    f"{self._what} has no batches in epoch {epoch + 1}; if it can be iterated only once, give "
                    f"a function that makes it again: lambda epoch: read_batches(epoch)"
                )
            within = 0


def num_rows(batch: Any) -> int:
    """Return the rows of a batch, of which nothing is checked: the step does."""
    if isinstance(batch, Batch):
        return batch.num_rows
    return next((int(leaf.shape[0]) for leaf in jax.tree.leaves(batch) if getattr(leaf, "ndim", 0)), 0)


def _opener(what: str, data: Any) -> Callable[[int], Any]:
    write = "write px.loader(data, 32)"
    if isinstance(data, (Mapping, str, bytes)) or hasattr(data, "dtype") or hasattr(data, "iloc"):
        raise DataError(
            f"{what} is one {type(data).__name__}, not batches; if it has all rows, {write}, with the number of rows "
            f"of a batch; if it is one batch, write [data]"
        )
    if _is_rows(data):
        raise DataError(
            f"{what} is a {type(data).__name__} of {len(data)} arrays, each of which would be a batch; if they have "
            f"the same rows, such as (x, y), write px.loader((x, y), 32)"
        )
    if isinstance(data, Iterator):
        raise DataError(
            f"{what} is a {type(data).__name__}, which can be iterated only once; give a function that "
            f"makes one for each epoch: lambda epoch: read_batches(epoch); or {write}"
        )
    if isinstance(data, Iterable):
        return lambda epoch: data
    if not callable(data):
        raise DataError(f"{what} is a {type(data).__name__}, not batches; {write}")
    return (lambda epoch: data(epoch)) if _takes_one(data) else (lambda epoch: data())


def _refuse_several(what: str, data: Any, several: str) -> None:
    found = list(data.values()) if isinstance(data, Mapping) else data if isinstance(data, (list, tuple)) else ()
    if any(isinstance(one, Loader) for one in found):
        raise DataError(f"{what} is a {type(data).__name__} with {len(found)} loaders, not batches; {several}")


def _is_rows(data: Any) -> bool:
    """Return whether these are arrays with the same rows; batches of one array each are alike, and are not."""
    if not isinstance(data, (tuple, list)) or not data or not all(hasattr(x, "dtype") for x in data):
        return False
    return isinstance(data, tuple) or len({np.ndim(x) for x in data}) > 1


def _is_list(data: Any) -> bool:
    return isinstance(data, (list, tuple))


def _takes_one(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of a built-in function
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(p.kind in positional and (p.default is p.empty or p.name == "epoch") for p in parameters)


def _length(data: Any) -> int | None:
    try:
        return len(data) or None
    except (TypeError, NotImplementedError, DataError):
        return None


@contextlib.contextmanager
def _closing(found: Any) -> Iterator[Iterator[Any]]:
    iterator = iter(found)
    try:
        yield iterator
    finally:
        if hasattr(iterator, "close"):
            iterator.close()


def _marked(batches: Iterator[Any]) -> Iterator[tuple[bool, Any]]:
    """Yield each with whether it is the last, which takes reading the next. An error comes in that one's place."""
    nothing = object()
    batch, error = next(batches, nothing), None
    while batch is not nothing:
        following = nothing
        try:
            following = next(batches, nothing)
        except Exception as found:
            error = found
        yield following is nothing and error is None, batch
        batch = following
    if error is not None:
        raise error
