"""The order of the rows: a function of the seed, the epoch and the number of rows, and of nothing else.

Philox is a counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): it is keyed
by (seed, epoch), so that no epoch has to be gone through to know a later one. NumPy promises that a bit generator's
stream stays, which it does not of ``Generator.permutation``; so rows are put in the order of their random bits.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class Position(NamedTuple):
    """A batch's number from the first of all, its epoch, its number in that, whether it ends it; from 0."""

    number: int
    epoch: int
    within: int
    is_last: bool = False

    def __str__(self) -> str:
        """Return a text for people: both counted from 1, as steps are."""
        return f"number {self.within + 1} of epoch {self.epoch + 1}"


@dataclasses.dataclass(frozen=True)
class Order:
    """The order of rows in batches, epoch after epoch; each row comes once in an epoch, unless it is left over."""

    num_rows: int
    batch_size: int
    shuffle: bool
    drop_last: bool
    seed: int

    def __len__(self) -> int:
        """Batches of an epoch."""
        return self.num_rows // self.batch_size if self.drop_last else -(-self.num_rows // self.batch_size)

    def rows(self, number: int) -> np.ndarray:
        """Return the rows of a batch, by its number counted from the first epoch's: ``(rows,)``, int64."""
        epoch, k = divmod(number, len(self))
        first, last = k * self.batch_size, min((k + 1) * self.batch_size, self.num_rows)
        shuffled = _shuffled(self.seed, epoch, self.num_rows) if self.shuffle else None
        return np.arange(first, last) if shuffled is None else shuffled[first:last].copy()

    def describe(self) -> dict[str, Any]:
        """Describe it for JSON, by name, should there ever be another one."""
        return {"order": "philox-argsort" if self.shuffle else "as they come", **dataclasses.asdict(self)}


@functools.lru_cache(maxsize=4)  # a thread that reads ahead may be in the next epoch already
def _shuffled(seed: int, epoch: int, num_rows: int) -> np.ndarray:
    bits = np.random.Philox(key=_words(seed, epoch)).random_raw(num_rows)
    return np.argsort(bits, kind="stable")


class RowGenerators(Sequence[np.random.Generator]):
    """One NumPy generator per row, keyed by (seed, epoch, row): ``random[i]`` is that of the i-th row given.

    The same row draws the same in one epoch, whatever the batch size, the devices and the processes.
    """

    def __init__(self, seed: int, epoch: int, rows: np.ndarray) -> None:
        self._seed, self._epoch, self._rows = seed, epoch, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        # The last word keeps them apart from the order's own numbers, which count in the first.
        counter = _words(0, int(self._rows[index]), 0, 1)
        return np.random.Generator(np.random.Philox(key=_words(self._seed, self._epoch), counter=counter))


def _words(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.uint64)  # a list of large and small ones would become floats
