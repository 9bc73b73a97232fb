"""The common part of all tables: their shape, and their rows in blocks that are checked."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paraxis._core import check
from paraxis._tables._arrays import Arrays, npy
from paraxis.errors import DataError

_ALIGNED = 64  # bytes


class Table:
    """Rows with a target each, larger than memory, that are read in blocks when they are needed.

    Estimators and solvers take one in place of ``X`` and ``y``, and an engine that says how many rows to read at once:
    ``px.solve.Ridge().fit(table, engine=px.Stream(memory="2GB"))``, or ``px.solve.rows(table, engine=…)``.
    Rows are in the order of the files' names. Files must stay as they are for as long as the table is used.

    Args:
        source: anything that has a length; ``columns``, the names of those to predict from; ``target``, the name of
            the other one; ``dtype``, that of ``X``; and ``blocks(size)``, which yields pairs of NumPy arrays ``X (size,
            d)`` and ``y (size,)``, the same ones in the same order each time, or of other sizes. If it has
            ``place(row)``, errors say so where a row is.

    Attributes:
        columns, target: the names of the columns to predict from, and of the other one.
        dtype: that of the columns to predict from, as they are read.

    Example:
        >>> import pathlib, tempfile, numpy as np, paraxis as px
        >>> X = np.random.default_rng(0).normal(size=(1000, 3)).astype("float32")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for part in (0, 1):
        ...         np.save(pathlib.Path(folder, f"X-{part}.npy"), X[500 * part : 500 * part + 500])
        ...         np.save(pathlib.Path(folder, f"y-{part}.npy"), X[500 * part : 500 * part + 500, 0] > 0)
        ...     table = px.Table.npy(folder)
        ...     model = px.solve.LogisticRegression().fit(table, engine=px.Stream(memory="1MB"))
        >>> table, float(model.score(X, X[:, 0] > 0)) > 0.99
        (<Table: 3 columns and the target 'y', float32>, True)
    """

    def __init__(self, source: Any) -> None:
        if not hasattr(source, "blocks"):
            raise DataError(
                f"Table: source must have blocks(size), got {check.described(source)}; write "
                f"px.Table.parquet('rows', target='y'), or px.Table.of_arrays(X, y)"
            )
        self._source = source
        self.columns: list[str] = list(source.columns)
        self.target: str = source.target
        self.dtype: np.dtype[Any] = np.dtype(source.dtype)
        self._is_named: bool = getattr(source, "is_named", True)  # so that a model can tell columns apart

    @classmethod
    def parquet(
        cls, folder: str | Path, *, target: str, columns: Sequence[str] | None = None, dtype: Any = None
    ) -> "Table":
        """Return the rows of Parquet files.

        Args:
            folder: a folder of ``.parquet`` files, or one such file.
            target: the column to predict; it may hold text, for classes.
            columns: those to predict from, which must hold numbers; default: all others, but for an index that pandas
                wrote, such as ``__index_level_0__``: it names rows.
            dtype: of the numbers: float32 or float64; default: float32 if that holds the files' types, else float64.

        Raises:
            DataError: if there are no such files, one cannot be read, columns differ between files, or hold no
                numbers; the message names file and columns.
            ModuleNotFoundError: if pyarrow is missing; the extra ``tables`` brings it.
        """
        from paraxis._tables._arrow import Files

        return cls(Files("Table.parquet", Path(folder), target, columns, _dtype(dtype)))

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
    ) -> "Table":
        """Return the rows of CSV files, each with a header. To count them, they are read once.

        Targets are numbers if all of them are: ``1``, ``+1``, ``1.0`` and ``1e0`` are one class. If all are whole
        and one has zeros in front, ``007``, all are text, and those written alike are one class.

        Args:
            folder: a folder of ``.csv`` files, or one such file.
            target, columns, dtype: as for :meth:`parquet`; the default is float64.
            delimiter: between values.
            decimal: the decimal point, of files with commas ``","``.

        Raises:
            DataError, ModuleNotFoundError: as :meth:`parquet`.
        """
        from paraxis._tables._arrow import Files

        return cls(Files("Table.csv", Path(folder), target, columns, _dtype(dtype), (delimiter, decimal)))

    @classmethod
    def npy(cls, folder: str | Path, *, dtype: Any = None) -> "Table":
        """Return the rows of memory-mapped files ``X*.npy``, ``(n, d)``, with targets ``y*.npy``, ``(n,)``.

        Args:
            folder: has both, which belong together by their names: ``X-0.npy`` and ``y-0.npy``.
            dtype: as for :meth:`parquet`.

        Raises:
            DataError: if there are no such files, or one cannot be read.
            DataError: if their shapes do not fit together.
        """
        return cls(npy(Path(folder), _dtype(dtype)))

    @classmethod
    def of_arrays(cls, X: Any, y: Any, *, dtype: Any = None) -> "Table":
        """Return rows of arrays, ``(n, d)`` and ``(n,)``, in memory or memory-mapped.

        Example:
            >>> import numpy as np, paraxis as px
            >>> px.Table.of_arrays(np.zeros((5, 3)), np.zeros(5)).shape
            (5, 3)
        """
        return cls(Arrays("Table.of_arrays", [(np.asanyarray(X), np.asarray(y))], _dtype(dtype)))

    def __len__(self) -> int:
        return len(self._source)

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of rows and of columns to predict from."""
        return len(self), len(self.columns)

    def blocks(self, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the rows in order as pairs ``X (size, d)`` and ``y (size,)``; only the last may be shorter.

        Memory is bounded by the block, and by what the file's format makes a reader hold.

        Args:
            size: rows of a block.

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
        X, targets, filled = np.empty((0, 0)), [], 0
        for part, y in self._source.blocks(size):
            if part.ndim != 2 or part.shape[1] != len(self.columns) or y.shape != part.shape[:1]:
                raise DataError(
                    f"Table: a block must be X (n, {len(self.columns)}) and y (n,), got {part.shape} and {y.shape}"
                )
            start = 0
            while start < len(part):
                if not filled and len(part) - start >= size and part.dtype == self.dtype and type(part) is np.ndarray:
                    yield part[start : start + size], y[start : start + size]
                    start += size
                    continue
                X = X if filled else _aligned((size, part.shape[1]), self.dtype)
                stop = min(len(part), start + size - filled)
                X[filled : filled + stop - start] = part[start:stop]
                targets.append(y[start:stop])
                filled, start = filled + stop - start, stop
                if filled == size:
                    yield X, np.concatenate(targets)
                    targets, filled = [], 0
        if filled:
            yield X[:filled], np.concatenate(targets)

    def _require_finite(self, X: np.ndarray, y: np.ndarray, start: int) -> None:
        """Check that there are numbers everywhere. Their sum of squares tells, unless it overflows."""
        flat, wrong = X.reshape(-1), None
        with np.errstate(over="ignore", invalid="ignore"):
            squares = np.dot(flat, flat)
        if not np.isfinite(squares) and not (finite := np.isfinite(X)).all():
            row, column = np.argwhere(~finite)[0]
            wrong = row, self.columns[column], X[row, column]
        elif y.dtype.kind in "fO":
            missing = [v is None or v != v for v in y] if y.dtype.kind == "O" else ~np.isfinite(y)
            wrong = (np.argmax(missing), self.target, y[np.argmax(missing)]) if np.any(missing) else None
        if wrong is not None:
            place = getattr(self._source, "place", "row {}".format)(start + int(wrong[0]))
            raise DataError(
                f"Table: values must be finite numbers, got {wrong[2]} in {place}, column {wrong[1]!r}; write the "
                f"files without such rows, or with a number in its place"
            )

    def _as_targets(self, y: np.ndarray) -> np.ndarray:
        """Return all targets as the files mean them: of CSV, integers if all of them are."""
        return getattr(self._source, "as_targets", lambda y: y)(y)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise DataError(
            "Table: its rows are read when they are needed, and it is no array; write "
            "model.fit(table, engine=px.Stream(memory='2GB')), or px.solve.rows(table, engine=…)"
        )

    def __repr__(self) -> str:
        return f"<Table: {len(self.columns):,} columns and the target {self.target!r}, {self.dtype}>"


def _aligned(shape: tuple[int, int], dtype: np.dtype[Any]) -> np.ndarray:
    """Return memory that begins where a device may use it without a copy, on CPU."""
    size = shape[0] * shape[1] * dtype.itemsize
    memory = np.empty(size + _ALIGNED, np.uint8)
    start = -memory.ctypes.data % _ALIGNED
    return memory[start : start + size].view(dtype).reshape(shape)


def _dtype(dtype: Any) -> Any:
    if dtype is not None:
        check.one_of("Table", "dtype", np.dtype(dtype).name, ("float32", "float64"))
    return dtype
