"""CSV files as a table, parsed a few megabytes at a time."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paraxis._calls.extras import needed
from paraxis._tables import _files as files

_WHO = "Table.csv"
_BYTES = 1 << 22  # parsed at once


class Csv:
    """Rows of CSV files, each with a header. The beginnings are read when it is made; rows are counted when asked for.

    Columns to predict from are numbers of double precision, whatever their first rows look like.
    """

    def __init__(self, folder: Path, target: str, columns: Sequence[str] | None, dtype: Any, delimiter: str) -> None:
        with needed(f"px.{_WHO}", "fit"):
            import pyarrow.csv  # noqa: F401

        self._delimiter = delimiter
        self._files, self.columns, kinds = files.described(_WHO, folder, ".csv", target, columns, self._schema)
        self.target = target
        self._is_text = any(not files.is_number(own[target]) for own in kinds)
        self._flags = {name for own in kinds for name, kind in own.items() if str(kind) == "bool"}
        self._sizes: dict[Path, int] = {}
        self.dtype = np.dtype(np.float64 if dtype is None else dtype)

    def _schema(self, path: Path) -> Any:
        with self._opened(path) as reader:
            return reader.schema

    def _opened(self, path: Path, types: Any = None, names: Sequence[str] = ()) -> Any:
        import pyarrow.csv as csv

        convert = csv.ConvertOptions(column_types=types, include_columns=names)
        parse = csv.ParseOptions(delimiter=self._delimiter)
        return csv.open_csv(path, csv.ReadOptions(block_size=_BYTES), parse, convert)

    @functools.cached_property
    def _size(self) -> int:
        return sum(len(y) for y, *_ in self._read([self.target]))

    def __len__(self) -> int:
        return self._size

    def blocks(self, size: int) -> files.Parts:
        found = self._read([self.target, *self.columns])
        return files.in_blocks(((files.as_rows(columns, self.dtype), y) for y, *columns in found), size)

    def _read(self, names: Sequence[str]) -> Any:
        """Yield columns, a part of a file at a time."""
        import pyarrow as pa

        types = {name: pa.float64() for name in names if name not in self._flags}
        if self._is_text:
            types[self.target] = pa.string()
        for file in self._files:
            self._sizes[file.path] = 0
            with file.reading(), self._opened(file.path, types, names) as reader:
                for batch in reader:
                    self._sizes[file.path] += batch.num_rows
                    yield [batch.column(name).to_numpy(zero_copy_only=False) for name in names]

    def place(self, row: int) -> str:
        return files.place(self._files, [self._sizes.get(file.path, 0) for file in self._files], row)

    def as_targets(self, y: np.ndarray) -> np.ndarray:
        """Return targets as integers, if all are: what a file shows as 1 is no 1.0."""
        return y.astype(np.int64) if y.dtype.kind == "f" and np.all(np.trunc(y) == y) else y
