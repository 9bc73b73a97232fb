"""A table's rows as the elements of an axis: blocks of as many rows each, by their numbers."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from paraxis._axes import layout
from paraxis._tables._table import Table
from paraxis.errors import DataError

_NOTHING = np.zeros((0, 0)), np.zeros(0)


class Blocks:
    """The rows of a table in blocks of ``length``, of which the last are filled up with the table's last row.

    Blocks that are asked for one after the other are read in one go. Where the table's source can begin at any row,
    another process can be given blocks to read; of another source, it cannot, and reading goes on from the beginning.

    Args:
        table: has at least one row. Its values were looked at in an earlier pass.
        count: of the blocks.
        length: of each, in rows.
        dtype: in which they are given.
    """

    def __init__(self, table: Table, count: int, length: int, dtype: np.dtype[Any]) -> None:
        self._table, self._count, self._length, self._dtype = table, count, length, dtype
        self._size = len(table)
        self._rest: Iterator[tuple[np.ndarray, np.ndarray]] = iter(())
        self._next = -1

    def __len__(self) -> int:
        return self._count

    def __getstate__(self) -> dict[str, Any]:
        if not self._table._begins_anywhere:
            raise TypeError("the table's source can only be read from its beginning")
        return {**self.__dict__, "_rest": iter(()), "_next": -1}

    def __getitem__(self, number: int) -> np.ndarray:
        last = (self._size - 1) // self._length
        if number > last:  # filled up as a whole
            return np.repeat(self[last][-1:], self._length, axis=0)
        start = number * self._length
        if number != self._next:
            self._rest = self._table._blocks(self._length, checked=False, start=start)
        self._next = number + 1
        X, _ = next(self._rest, _NOTHING)
        end = start + len(X)
        if number == last:  # is there more? and are the files still the same?
            end += len(next(self._rest, _NOTHING)[0])
        if end != min(start + self._length, self._size):
            raise DataError(
                f"Table: {self._table!r} gave {'more than ' * (end > self._size)}{min(end, self._size):,} rows, and "
                f"had {self._size:,} when it was made; the rows must stay the same for as long as it is used"
            )
        return layout.repeat_last(X.astype(self._dtype, copy=False), self._length)

    @property
    def together(self) -> int:
        """The number of blocks in a row that lie in one part of a file, which is decoded as a whole."""
        return max(1, getattr(self._table._source, "part", 0) // self._length)

    def rows(self, number: int) -> str:
        """Return which rows of the table a block has, for messages."""
        first = min(number * self._length, self._size - 1)
        return f"rows {first:,} to {min(first + self._length, self._size) - 1:,} of the table"
