"""Plans of the batches to make, one after the other, from a source of batches; and errors that name them."""

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from paraxis.errors import DataError, ParaxisError
from paraxis.train.data._host import num_rows_of, to_host
from paraxis.train.data._sources import Batches


class Part(NamedTuple):
    """A batch that is to be made, of which each process reads some rows."""

    epoch: int
    number: int
    """in its epoch"""
    ids: np.ndarray
    """what the randomness of each row is keyed by, int64; ``(num_rows,)``"""
    read: Callable[[np.ndarray], Any]
    """positions among its rows → a tree of these"""


def passes(source: Batches, start: int) -> Generator[Part, None, None]:
    """Batches without end from number ``start`` on; those before are read and dropped, where there is no other way."""
    length = source.num_batches or 0
    first = start // length if length and source.by_epoch else 0
    skip = start - first * length
    for epoch in itertools.count(first):
        count = 0
        for part in one_pass(source, epoch):
            count += 1
            if length and count > length:
                raise _other_length(epoch, "more", length)
            if count > skip:
                yield part
        skip = max(0, skip - count)
        if not count:
            raise DataError(
                f"px.loader: the source has no batch in epoch {epoch + 1}; if it can be iterated only once, pass a "
                "function that makes one for each epoch: px.loader(lambda epoch: read_batches(epoch))"
            )
        if length and count != length:
            raise _other_length(epoch, str(count), length)


def _other_length(epoch: int, count: str, length: int) -> DataError:
    return DataError(
        f"px.loader: the source has {count} batches in epoch {epoch + 1}, but {length} by its len(), by which training "
        "resumes; give all epochs the same number, or leave len() out: px.loader(lambda: source)"
    )


def one_pass(source: Batches, epoch: int) -> Generator[Part, None, None]:
    """Yield the batches of one pass."""
    with contextlib.closing(source.epoch(epoch)) as found:
        for number in itertools.count():
            with naming(epoch, number):
                batch = next(found, None)
                part = None if batch is None else _part(batch.tree, epoch, number)
            if part is None:
                return
            yield part


def _part(batch: Any, epoch: int, number: int) -> Part:
    size = num_rows_of(batch)

    def read(positions: np.ndarray) -> Any:
        if len(positions) == size:
            return jax.tree.map(to_host, batch)
        return jax.tree.map(lambda x: to_host(x)[positions], batch)

    return Part(epoch, number, number * 2**32 + np.arange(size), read)


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
