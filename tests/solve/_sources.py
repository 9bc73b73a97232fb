"""Rows on disk, imitated: sources of a table that count how often they are read, or end who reads them."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np


class Counting:
    """Arrays as a source, which keeps the sizes of the blocks of each pass."""

    def __init__(self, X: np.ndarray, y: np.ndarray) -> None:
        self._X, self._y = X, y
        self.columns = [f"x{number}" for number in range(X.shape[1])]
        self.target, self.dtype = "y", X.dtype
        self.passes: list[list[int]] = []

    def __len__(self) -> int:
        return len(self._X)

    def blocks(self, size: int) -> Iterator[tuple[Any, Any]]:
        sizes: list[int] = []
        self.passes.append(sizes)
        for start in range(0, len(self), size):
            sizes.append(len(self._X[start : start + size]))
            yield self._X[start : start + size], self._y[start : start + size]


class Deadly:
    """Arrays as a source that can begin at any row. Of other processes, it writes down who reads it from where.

    A row kills any of these that reads it: always, or until it has left a mark.
    """

    def __init__(self, X: np.ndarray, y: np.ndarray, folder: Path, row: int | None = None, *, once: bool = True):
        self._X, self._y, self._folder, self._row, self._once = X, y, folder, row, once
        self.columns = [f"x{number}" for number in range(X.shape[1])]
        self.target, self.dtype = "y", X.dtype
        self._made_by = os.getpid()

    def __len__(self) -> int:
        return len(self._X)

    def blocks(self, size: int, start: int = 0) -> Iterator[tuple[Any, Any]]:
        for at in range(start, len(self), size):
            if os.getpid() != self._made_by:
                with (self._folder / f"{os.getpid()}.read").open("a") as log:
                    print(at, file=log)
                if self._row is not None and at <= self._row < at + size:
                    self._end()
            yield self._X[at : at + size], self._y[at : at + size]

    def _end(self) -> None:
        if not (self._once and (self._folder / "mark").exists()):
            (self._folder / "mark").touch()
            os.kill(os.getpid(), signal.SIGKILL)
