"""The common part of all tables: their shape, and their rows in blocks that are checked."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paraxis._core import check
from paraxis.errors import DataError

_ALIGNED = 64  # bytes


class Table:
    """Rows with a target each, larger than memory, that are read in blocks when they are needed.

    Estimators and :func:`px.solve.rows` take one in place of ``X`` and ``y``, and an engine that says how many rows to
    read at once. Rows are in the order of the files' names, which must stay as they are while the table is used.

    Args:
        source: anything that has a length; ``columns``, the names of the columns of ``X``; ``target``, the name of the
            column ``y``; ``dtype``, float32 or float64, of ``X``; and ``blocks(size)``, which yields NumPy arrays
            ``X (n, d)`` and ``y (n,)`` of any sizes, the same rows in the same order each time. If it has ``parts``,
            pairs of a name and a number of rows, errors say in which of them a row is.

    Attributes:
        columns, target: the names of the columns of ``X``, and of the target.
        dtype: of ``X``, as it is read.

    Example:
        >>> import numpy as np, paraxis as px
        >>> X = np.random.default_rng(0).normal(size=(1000, 3)).astype("float32")
        >>> table = px.Table.of_arrays(X, X[:, 0] > 0)  # or px.Table.parquet("folder", target="y")
        >>> model = px.solve.LogisticRegression().fit(table, engine=px.Stream(memory="1MB"))
        >>> table, model.score(X, X[:, 0] > 0) > 0.99
        (<Table: 3 columns and the target 'y', float32>, True)
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self.columns: list[str] = list(source.columns)
        self.target: str = source.target
        self.dtype: np.dtype[Any] = np.dtype(source.dtype)
        check.one_of("Table", "dtype", self.dtype.name, ("float32", "float64"))
        self._is_named: bool = getattr(source, "is_named", True)  # so that a model can tell columns apart

    @classmethod
    def parquet(
        cls, folder: str | Path, *, target: str, columns: Sequence[str] | None = None, dtype: Any = None
    ) -> "Table":
        """Return the rows of Parquet files.

        Args:
            folder: a folder of ``.parquet`` files, or one such file. Folders ``year=2024`` in it add a column each.
            target: the column to predict; it may hold text, for classes.
            columns: those to predict from, which must hold numbers; default: all others but an index of pandas.
            dtype: of the numbers: float32 or float64; default: float32 if that holds the files' types, else float64.

        Raises:
            DataError: if there are no such files, or one cannot be read; if columns differ between files or hold no
                numbers, or the target is a number in one file and text in another; it names the file.
            ModuleNotFoundError: if pyarrow is missing; the extra ``tables`` brings it.
        """
        from paraxis._tables._arrow import Files

        return cls(Files("Table.parquet", Path(folder), target, columns, dtype))

    @classmethod
    def csv(
        cls,
        folder: str | Path,
        *,
        target: str,
        columns: Sequence[str] | None = None,
        dtype: Any = None,
        delimiter: str = ",",
        decimal: str = ".",
        encoding: str = "utf8",
        types: Mapping[str, str] | None = None,
    ) -> "Table":
        """Return the rows of CSV files, each with a header. To count them, they are read once.

        Targets are numbers if all of them are: ``1``, ``+1``, ``1.0`` and ``1e0`` are one class. If all are whole and
        one is a code, ``007`` or of more than 15 digits, all are text.

        Args:
            folder: a folder of ``.csv`` files, or of compressed ones such as ``.csv.gz``; or one such file.
            target, columns, dtype: as for :meth:`parquet`; the default is float64.
            delimiter, decimal: what is between values; the decimal point, of files with commas ``","``.
            encoding: that of the text, such as ``"latin-1"``.
            types: of columns by name, in Arrow's words: ``{"y": "string"}``, of labels that are text whatever they
                look like; ``{"y": "double"}``, of numbers.

        Raises: as :meth:`parquet`.
        """
        from paraxis._tables._arrow import Files

        return cls(Files("Table.csv", Path(folder), target, columns, dtype, (delimiter, decimal, encoding), types))

    @classmethod
    def of_arrays(cls, X: Any, y: Any, *, dtype: Any = None) -> "Table":
        """Return rows of arrays, ``(n, d)`` and ``(n,)``, in memory or as ``np.load("X.npy", mmap_mode="r")`` gives."""
        return cls(_Arrays(np.asanyarray(X), np.asanyarray(y), dtype))

    def __len__(self) -> int:
        return len(self._source)

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of rows and of columns to predict from."""
        return len(self), len(self.columns)

    def blocks(self, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the rows in order as pairs ``X (size, d)`` and ``y (size,)``; only the last may be shorter.

        Raises:
            DataError: if a number is missing, NaN or infinite, a file cannot be read, or changed since the table was
                made; it names file and row.
        """
        start = 0
        for X, y in self._blocks(size):
            self._require_finite(X, y, start)
            start += len(X)
            yield X, y

    def _blocks(self, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the same unchecked. The source's parts are put together, in memory where a device may use them."""
        size = min(size, max(1, len(self)))
        X, targets, filled, count = np.empty((0, 0)), [], 0, 0
        for part, y in self._source.blocks(size):
            if part.ndim != 2 or part.shape[1] != len(self.columns) or y.shape != part.shape[:1]:
                raise DataError(
                    f"Table: a block must be X (n, {len(self.columns)}) and y (n,), got {part.shape} and {y.shape}"
                )
            count += len(part)
            while len(part):
                X = X if filled else _aligned((size, part.shape[1]), self.dtype)
                stop = min(filled + len(part), size)
                X[filled:stop], rest = part[: stop - filled], stop - filled
                targets.append(y[:rest])
                part, y, filled = part[rest:], y[rest:], stop
                if filled == size:
                    yield X, np.concatenate(targets)
                    targets, filled = [], 0
        if filled:
            yield X[:filled], np.concatenate(targets)
        if count != len(self):
            raise DataError(f"Table: {self!r} gave {count:,} rows, and has {len(self):,}; they must stay the same")

    def _require_finite(self, X: np.ndarray, y: np.ndarray, start: int) -> None:
        """Check that there are numbers everywhere."""
        kind = y.dtype.kind
        missing: Any = [v is None or v != v for v in y] if kind == "O" else kind == "f" and ~np.isfinite(y)
        wrong = [(row, self.columns[at], X[row, at]) for row, at in np.argwhere(~np.isfinite(X))[:1].tolist()]
        wrong += [(row, self.target, y[row]) for row in np.flatnonzero(missing)[:1].tolist()]
        if not wrong:
            return
        row, name, value = wrong[0]
        row, place = row + start, ""
        for file, size in getattr(self._source, "parts", ()):
            if row < size:
                place = f"{str(file)!r}, "
                break
            row -= size
        raise DataError(
            f"Table: values must be finite numbers, got {value} in {place}row {row}, column {name!r}; write the files "
            "without such rows, or with a number in its place"
        )

    def __repr__(self) -> str:
        return f"<Table: {len(self.columns):,} columns and the target {self.target!r}, {self.dtype}>"


class _Arrays:
    """Rows of two arrays. The names of columns are their numbers."""

    is_named, target = False, "y"

    def __init__(self, X: np.ndarray, y: np.ndarray, dtype: Any) -> None:
        check.by_position("Table.of_arrays", "(X, y)", (X, y))
        if X.ndim != 2 or y.ndim != 1 or len(X) != len(y) or not X.shape[1]:
            raise DataError(f"Table.of_arrays: X must be (n, d) and y (n,), got {X.shape} and {y.shape}")
        if X.dtype.kind not in "biuf" or y.dtype.kind not in "biufUO":
            raise DataError(f"Table.of_arrays: X must hold numbers, y numbers or text, got {X.dtype} and {y.dtype}")
        self._pair = X, y
        self.columns = [f"x{number}" for number in range(X.shape[1])]
        self.dtype = np.dtype(dtype or np.result_type(np.float32, X.dtype))

    def __len__(self) -> int:
        return len(self._pair[0])

    def blocks(self, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        yield self._pair  # the table takes what it needs of an array


def _aligned(shape: tuple[int, int], dtype: np.dtype[Any]) -> np.ndarray:
    """Return memory that begins where a device may use it without a copy, on CPU."""
    memory = np.empty(math.prod(shape) * dtype.itemsize + _ALIGNED, np.uint8)
    start = -memory.ctypes.data % _ALIGNED
    return memory[start : start + len(memory) - _ALIGNED].view(dtype).reshape(shape)
