"""Files that must stay as they are; and arrays as a table, in memory or mapped into it from NPY files."""

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

    def _size_and_time(self) -> tuple[int, int] | None:
        with contextlib.suppress(OSError):
            stat = self.path.stat()
            return stat.st_size, stat.st_mtime_ns
        return None

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Within, the file is read; a DataError names it if it cannot be, or has changed before or after."""
        self.require()
        try:
            yield
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            raise DataError(f"{self.who}: {str(self.path)!r} cannot be read: {reason}") from error
        self.require()

    def require(self) -> None:
        """Check that the file is as it was."""
        if self._size_and_time() != self._seen:
            raise DataError(
                f"{self.who}: {str(self.path)!r} has changed or is gone since it was looked at first; make the table "
                "anew when the file is complete"
            )


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
        self.parts = [(file.path, len(X)) for file, (X, _) in zip(mapped, pairs, strict=False)]
        self.columns = [f"x{number}" for number in range(pairs[0][0].shape[1])]
        self.dtype = np.dtype(dtype or np.result_type(np.float32, *(X.dtype for X, _ in pairs)))

    def __len__(self) -> int:
        return sum(len(X) for X, _ in self._pairs)

    def blocks(self, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        del size  # the table takes what it needs of an array
        for file in self._mapped:
            file.require()
        yield from self._pairs
        for file in self._mapped:
            file.require()


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
