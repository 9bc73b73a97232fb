"""Rows on disk, imitated: sources of a table that count how often they are read, or end who reads them."""

from collections.abc import Iterator
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
