"""Arrays as a table: in memory, or mapped into it from NPY files; and files that must stay as they are."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paraxis.errors import DataError


class File:
    """A file as it was when it was first looked at."""

    def __init__(self, who: str, path: Path) -> None:
        self.who, self.path = who, path
        self._seen = self._size_and_time()

    def _size_and_time(self) -> tuple[int, int]:
        stat = self.path.stat()
        return stat.st_size, stat.st_mtime_ns

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Within, the file is read; a DataError names it if it cannot be, or has changed before or after."""
        self.require()
        try:
            yield
        except DataError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            raise DataError(f"{self.who}: {str(self.path)!r} cannot be read: {reason}") from error
        self.require()

    def require(self) -> None:
        """Check that the file is as it was."""
        try:
            found = self._size_and_time()
        except OSError as error:
            raise DataError(f"{self.who}: {str(self.path)!r} is gone since it was looked at first: {error}") from error
        if found != self._seen:
            raise DataError(
                f"{self.who}: {str(self.path)!r} has changed since it was looked at first, from {self._seen[0]:,} "
                f"bytes to {found[0]:,}; make the table anew when the file is complete"
            )


def place_of(files: Sequence[File], sizes: Sequence[int], row: int) -> str:
    """Return where a row of all files is, for messages."""
    for file, size in zip(files, sizes, strict=False):
        if row < size:
            return f"{str(file.path)!r}, row {row}"
        row -= size
    return f"row {row}"


class Arrays:
    """Rows of pairs of arrays, one pair after the other. The names of columns are their numbers."""

    is_named, target = False, "y"

    def __init__(
        self, who: str, pairs: Sequence[tuple[np.ndarray, np.ndarray]], dtype: Any, mapped: Sequence[File] = ()
    ) -> None:
        for X, y in pairs:
            if X.ndim != 2 or y.ndim != 1 or len(X) != len(y) or not X.shape[1] or X.shape[1] != pairs[0][0].shape[1]:
                raise DataError(
                    f"{who}: X must be (n, d) and y (n,), with the same d everywhere, got {X.shape} and {y.shape}"
                )
            if X.dtype.kind not in "biuf" or y.dtype.kind not in "biufUO":
                raise DataError(f"{who}: X must hold numbers, and y numbers or text, got {X.dtype} and {y.dtype}")
        self._pairs, self._mapped = pairs, mapped
        self.columns = [f"x{number}" for number in range(pairs[0][0].shape[1])]
        self.dtype = np.dtype(dtype or np.result_type(np.float32, *(X.dtype for X, _ in pairs)))

    def __len__(self) -> int:
        return sum(len(X) for X, _ in self._pairs)

    def blocks(self, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for file in self._mapped:
            file.require()
        for X, y in self._pairs:
            for start in range(0, len(X), size):
                yield X[start : start + size], y[start : start + size]
        for file in self._mapped:
            file.require()

    def place(self, row: int) -> str:
        return place_of(self._mapped, [len(X) for X, _ in self._pairs], row)


def npy(folder: Path, dtype: Any) -> Arrays:
    """Return pairs of files of a folder, ``X*.npy`` and ``y*.npy``, mapped into memory."""
    designs, targets = ({path.name[1:]: path for path in sorted(folder.glob(f"{name}*.npy"))} for name in ("X", "y"))
    if not designs or [*designs] != [*targets]:
        raise DataError(
            f"Table.npy: folder must have a file y… for each X… of the same name, at least one, got {len(designs)} and "
            f"{len(targets)} in {str(folder)!r}, {sorted({*designs} ^ {*targets})[:1]} alone"
        )
    mapped = [File("Table.npy", path) for path in (*designs.values(), *targets.values())]
    arrays = []
    for file in mapped:
        with file.reading():
            arrays.append(np.load(file.path, mmap_mode="r", allow_pickle=False))
    return Arrays("Table.npy", list(zip(arrays[: len(designs)], arrays[len(designs) :], strict=True)), dtype, mapped)
