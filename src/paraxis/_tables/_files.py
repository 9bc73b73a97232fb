"""A folder's files as one table: in the order of their names, unchanged for as long as they are read."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paraxis.errors import DataError

_ALIGNED = 64
"""Bytes: where a device's block begins at a multiple of them, it is used where it is."""

_TILE = 1 << 20  # bytes of rows that are filled column by column, and stay in a cache meanwhile

Parts = Iterator[tuple[np.ndarray, np.ndarray]]


def found(who: str, folder: Path, suffix: str) -> list[Path]:
    """Return the files of a folder with this suffix, be it in capitals, sorted by name; or the one file that it is.

    Raises:
        DataError: if there are none.
    """
    paths = [folder] if folder.is_file() else sorted(folder.iterdir()) if folder.is_dir() else []
    paths = [path for path in paths if path.name.lower().endswith(suffix)]
    if not paths:
        raise DataError(f"{who}: folder must have {suffix} files, or be one, got {str(folder)!r}, which has none")
    return paths


@contextlib.contextmanager
def named(who: str, path: Path) -> Iterator[None]:
    """Within, an error of Arrow's, or of the system's, names the file."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{who}: {str(path)!r} cannot be read: {type(error).__name__}: {reason[:300]}") from error


@dataclasses.dataclass(frozen=True)
class Unchanged:
    """A file as it was when it was first looked at."""

    who: str
    path: Path
    size: int
    time: int

    @classmethod
    def of(cls, who: str, path: Path) -> "Unchanged":
        stat = path.stat()
        return cls(who, path, stat.st_size, stat.st_mtime_ns)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Within, the file is read: errors name it, and it is the same before and after."""
        self.require()
        with named(self.who, self.path):
            yield
        self.require()

    def require(self) -> None:
        """Check that it still is.

        Raises:
            DataError: naming the file, if it has changed, or is gone.
        """
        try:
            stat = self.path.stat()
        except OSError as error:
            raise DataError(f"{self.who}: {str(self.path)!r} is gone since it was looked at first: {error}") from error
        if (stat.st_size, stat.st_mtime_ns) != (self.size, self.time):
            raise DataError(
                f"{self.who}: {str(self.path)!r} has changed since it was looked at first, from {self.size:,} bytes "
                f"to {stat.st_size:,}; begin anew when the file is complete"
            )


def place(files: Sequence[Unchanged], sizes: Sequence[int], row: int) -> str:
    """Return where a row of all is, for messages."""
    for file, size in zip(files, sizes, strict=False):
        if row < size:
            return f"{str(file.path)!r}, row {row}"
        row -= size
    return f"row {row}"


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return memory that begins where devices may use it without a copy, on CPU."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + _ALIGNED, np.uint8)
    start = -memory.ctypes.data % _ALIGNED
    return memory[start : start + size].view(dtype).reshape(shape)


def as_rows(columns: Sequence[np.ndarray], dtype: np.dtype[Any]) -> np.ndarray:
    """Return columns ``(n,)`` side by side, ``(n, d)`` with a row's values together."""
    size = len(columns[0])
    rows = empty((size, len(columns)), dtype)
    step = max(64, _TILE // max(1, rows.itemsize * len(columns)))
    for start in range(0, size, step):
        tile = rows[start : start + step]
        for at, column in enumerate(columns):
            tile[:, at] = column[start : start + step]
    return rows


def in_blocks(parts: Parts, size: int) -> Parts:
    """Yield the rows of parts of any size in blocks of ``size``, the last one perhaps shorter."""
    held: list[tuple[np.ndarray, np.ndarray]] = []
    count = 0
    for X, y in parts:
        start = 0
        while count + len(X) - start >= size:
            stop = start + size - count
            yield _joined([*held, (X[start:stop], y[start:stop])])
            held, count, start = [], 0, stop
        if start < len(X):
            held.append((X[start:], y[start:]))
            count += len(X) - start
    if held:
        yield _joined(held)


def _joined(parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    if len(parts) == 1:
        return parts[0]
    X = empty((sum(len(X) for X, _ in parts), parts[0][0].shape[1]), parts[0][0].dtype)
    return np.concatenate([X for X, _ in parts], out=X), np.concatenate([y for _, y in parts])
