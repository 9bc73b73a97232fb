"""The batches of a run, each with its position in it, from any position on."""

import collections
import contextlib
import itertools
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from paraxis.errors import DataError
from paraxis.train._loader import Loader
from paraxis.train._sources import Batches, batches_of


class Position(NamedTuple):
    """A batch's number from the first of all, its epoch, its number in that, whether it ends it; from 0."""

    number: int
    epoch: int
    within: int
    is_last: bool

    def in_words(self) -> str:
        """Return a text for people: both counted from 1, as steps are."""
        return f"number {self.within + 1} of epoch {self.epoch + 1}"


class Data:
    """Batches epoch after epoch.

    Args:
        what: the argument that they come from, for errors: ``"px.fit: data"``.
        data: a loader; or an iterable of batches that can be gone through again; or a function that gives an iterable
            of the batches of an epoch, ``data(epoch)`` or ``data()``.

    Raises:
        DataError: if it is none of these.
    """

    def __init__(self, what: str, data: Any) -> None:
        self._what = what
        if isinstance(data, tuple) or hasattr(data, "dtype"):
            raise DataError(f"{what} is one {type(data).__name__}, not batches; write px.loader(data, 32), or [data]")
        self._source: Loader | Batches = data if isinstance(data, Loader) else batches_of(what, data)
        self.length = _length(self._source)
        """Batches of an epoch, if that is known."""

    def describe(self) -> dict[str, Any]:
        """Return what the data are, as far as it can be said without reading them: for JSON."""
        return self._source.describe()

    def arrays(self) -> dict[str, Any]:
        """Return the arrays in memory that batches are made of, by their places in ``data``."""
        return (
            {f"data{name}": x for name, x in self._source.arrays().items()} if isinstance(self._source, Loader) else {}
        )

    def rows(self, number: int) -> np.ndarray | None:
        """Return which rows a batch has, if that is known."""
        with contextlib.suppress(DataError):
            return self._source.rows(number) if isinstance(self._source, Loader) else None
        return None

    def start(self, number: int) -> Position:
        """Return the position of a batch by its number.

        Raises:
            DataError: if epochs have no known length, so that it cannot be told.
        """
        if number and self.length is None:
            raise DataError(
                f"{self._what} does not say how many batches an epoch has, so it is not known with which one a state "
                f"after {number} steps continues; give px.loader(arrays, 32), a list, or checkpoint="
            )
        epoch, within = divmod(number, self.length) if self.length else (0, 0)
        return Position(number, epoch, within, False)

    def batches(self, start: Position) -> Generator[tuple[Position, Any], None, None]:
        """Batches without end, from a position on. Close it when done."""
        if not isinstance(self._source, Loader) or self.length is None:
            yield from self._passes(start)
            return
        with contextlib.closing(self._source.batches(start.number)) as found:
            for number, batch in zip(itertools.count(start.number), found, strict=False):
                epoch, within = divmod(number, self.length)
                yield Position(number, epoch, within, within + 1 == self.length), batch
                del batch  # it is not needed while the next one is waited for

    def epoch(self) -> Generator[Any, None, None]:
        """Return the batches of the first epoch. Close it when done."""
        return self._source.epoch(0)

    def _passes(self, start: Position) -> Generator[tuple[Position, Any], None, None]:
        number, within = start.number, start.within
        if not self._source.by_epoch:  # what a pass gives may depend on how many there were
            for epoch in range(start.epoch):
                with contextlib.closing(self._source.epoch(epoch)) as found:
                    collections.deque(found, maxlen=0)
        for epoch in itertools.count(start.epoch):
            with contextlib.closing(self._source.epoch(epoch)) as found:
                for is_last, batch in _marked(itertools.islice(found, within, None)):
                    yield Position(number, epoch, within, is_last), batch
                    number, within = number + 1, within + 1
                    del batch
            if not within:
                raise DataError(
                    f"{self._what} has no batches in epoch {epoch + 1}; if it can be iterated only once, give a "
                    "function that makes it again: lambda epoch: read_batches(epoch)"
                )
            within = 0


def num_rows(batch: Any) -> int:
    """Return the rows of a batch, of which nothing is checked: the step does."""
    return next((int(leaf.shape[0]) for leaf in jax.tree.leaves(batch) if getattr(leaf, "ndim", 0)), 0)


def _length(source: Loader | Batches) -> int | None:
    if isinstance(source, Batches):
        return source.num_batches
    with contextlib.suppress(DataError):
        return len(source)
    return None


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
