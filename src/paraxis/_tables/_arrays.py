"""Arrays as a table: in memory, or mapped into it from NPY files; and files that must stay as they are."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paraxis.errors import DataError


@dataclasses.dataclass(frozen=True)
class File:
    """A file as it was when it was first looked at."""

    who: str
    path: Path
    size: int
    time: int

    @classmethod
    def of(cls, who: str, path: Path) -> "File":
        stat = path.stat()
        return cls(who, path, stat.st_size, stat.st_mtime_ns)

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
            stat = self.path.stat()
        except OSError as error:
            raise DataError(f"{self.who}: {str(self.path)!r} is gone since it was looked at first: {error}") from error
        if (stat.st_size, stat.st_mtime_ns) != (self.size, self.time):
            raise DataError(
                f"{self.who}: {str(self.path)!r} has changed since it was looked at first, from {self.size:,} bytes "
                f"to {stat.st_size:,}; make the table anew when the file is complete"
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
            if X.dtype.kind not in "biuf":
                raise DataError(f"{who}: X must hold numbers, got {X.dtype}; write X.astype(np.float32)")
        self._pairs, self._mapped = pairs, mapped
        self.columns = [f"x{number}" for number in range(pairs[0][0].shape[1])]
        held = np.result_type(np.float32, *(X.dtype for X, _ in pairs))
        self.dtype = held if dtype is None else np.dtype(dtype)

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
    who = "Table.npy"
    designs, targets = (sorted(folder.glob(f"{name}*.npy")) for name in ("X", "y"))
    parts = [path.name[1:] for path in designs], [path.name[1:] for path in targets]
    is_named = bool({*parts[0]} & {*parts[1]})  # where no name is the same, their order tells
    if not designs or len(designs) != len(targets) or (is_named and parts[0] != parts[1]):
        alone = sorted({*parts[0]} ^ {*parts[1]})[:1] if is_named else []
        raise DataError(
            f"{who}: folder must have a file y… for each X… of the same name, at least one, got {len(designs)} and "
            f"{len(targets)} in {str(folder)!r}, {alone} alone"
        )
    mapped = [File.of(who, path) for path in (*designs, *targets)]
    arrays = []
    for file in mapped:
        with file.reading():
            arrays.append(np.load(file.path, mmap_mode="r", allow_pickle=False))
    return Arrays(who, list(zip(arrays[: len(designs)], arrays[len(designs) :], strict=True)), dtype, mapped)
