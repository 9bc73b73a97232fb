"""Arrays as a table: in memory, or mapped into it from NPY files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paraxis._tables import _files as files
from paraxis.errors import DataError, ShapeError

_WHO = "Table.npy"
_CAST = 1 << 24  # bytes of a file that are read at a time to become another dtype


class Arrays:
    """Rows of pairs of arrays, one pair after the other. The names of columns are their numbers."""

    is_named = False

    def __init__(
        self,
        who: str,
        pairs: Sequence[tuple[np.ndarray, np.ndarray]],
        dtype: Any,
        mapped: Sequence[files.Unchanged] = (),
    ) -> None:
        for X, y in pairs:
            if X.ndim != 2 or y.ndim != 1 or len(X) != len(y) or not X.shape[1] or X.shape[1] != pairs[0][0].shape[1]:
                raise ShapeError(
                    f"{who}: X must be (n, d) and y (n,), with the same d everywhere, got {X.shape} and {y.shape}"
                )
            if X.dtype.kind not in "biuf":
                raise DataError(f"{who}: X must hold numbers, got {X.dtype}; write X.astype(np.float32)")
        self._pairs, self._mapped = pairs, mapped
        self.columns = [f"x{number}" for number in range(pairs[0][0].shape[1])]
        self.target = "y"
        held = np.result_type(np.float32, *(X.dtype for X, _ in pairs))
        self.dtype = held if dtype is None else np.dtype(dtype)

    def __len__(self) -> int:
        return sum(len(X) for X, _ in self._pairs)

    def blocks(self, size: int) -> files.Parts:
        self._require_unchanged()
        for at in range(0, len(self), size):
            yield self._block(at, min(at + size, len(self)))
        self._require_unchanged()

    def place(self, row: int) -> str:
        return files.place(self._mapped, [len(X) for X, _ in self._pairs], row)

    def _block(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows from ``start`` to ``stop``: as they lie in memory, or each copied once, to where it goes."""
        found, first = [], 0
        for X, y in self._pairs:
            own = slice(max(0, start - first), max(0, min(stop - first, len(X))))
            if own.start < own.stop:
                found.append((X, y, own))
            first += len(X)
        if len(found) == 1 and not _is_read(found[0][0]):
            X, y, own = found[0]
            return np.asarray(X[own], self.dtype), y[own]
        rows, at = files.empty((stop - start, len(self.columns)), self.dtype), 0
        for X, _, own in found:
            end = at + own.stop - own.start
            _fill(rows[at:end], X, own.start)
            at = end
        return rows, np.concatenate([y[own] for _, y, own in found])

    def _require_unchanged(self) -> None:
        for file in self._mapped:
            file.require()


def _is_read(X: np.ndarray) -> bool:
    """Return whether rows are a file's that can be read in one go, which is faster than page by page."""
    return isinstance(X, np.memmap) and isinstance(X.filename, Path) and X.flags.c_contiguous


def _fill(rows: np.ndarray, X: Any, start: int) -> None:
    """Put rows of an array, from ``start`` on, into memory; those of a file in another dtype, some at a time."""
    if not _is_read(X):
        rows[...] = X[start : start + len(rows)]
        return
    step = len(rows) if X.dtype == rows.dtype else max(1, _CAST // X.strides[0])
    with X.filename.open("rb", buffering=0) as file:
        for at in range(0, len(rows), step):
            part = rows[at : at + step]
            read = part if X.dtype == rows.dtype else np.empty(part.shape, X.dtype)
            file.seek(X.offset + (start + at) * X.strides[0])
            left = read.reshape(-1).view(np.uint8).data
            while left and (count := file.readinto(left)):
                left = left[count:]
            if left:
                raise DataError(
                    f"{_WHO}: {str(X.filename)!r} ends before its last row; make the table anew when it is complete"
                )
            if read is not part:
                part[...] = read


def npy(folder: Path, dtype: Any) -> Arrays:
    """Return pairs of files of a folder, ``X*.npy`` and ``y*.npy``, mapped into memory."""
    designs, targets = (sorted(folder.glob(f"{name}*.npy")) for name in ("X", "y"))
    if not designs or len(designs) != len(targets):
        raise DataError(
            f"{_WHO}: folder must have as many files X*.npy as y*.npy, at least one, got {len(designs)} and "
            f"{len(targets)} in {str(folder)!r}"
        )
    parts = [path.name[1:] for path in designs], [path.name[1:] for path in targets]
    if {*parts[0]} & {*parts[1]} and parts[0] != parts[1]:  # where none is the same, their order tells
        odd = min({*parts[0]} ^ {*parts[1]})
        raise DataError(
            f"{_WHO}: folder must have a file y… for each X… of the same name, got only one with {odd!r} in "
            f"{str(folder)!r}; add {'X' if odd in parts[1] else 'y'}{odd}, or move the other one away"
        )
    mapped = [files.Unchanged.of(_WHO, path) for path in (*designs, *targets)]
    pairs = [(_mapped(X), _mapped(y)) for X, y in zip(designs, targets, strict=True)]
    return Arrays(_WHO, pairs, dtype, mapped)


def _mapped(path: Path) -> np.ndarray:
    with files.named(_WHO, path):
        return np.load(path, mmap_mode="r", allow_pickle=False)
