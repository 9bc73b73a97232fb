"""Parquet and CSV files as a table, read by Arrow. What Arrow does in silence with a table's columns is refused."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paraxis._core.check import needed
from paraxis._tables._arrays import File, place_of
from paraxis.errors import DataError

with needed("px.Table", "tables"):
    import pyarrow as pa
    import pyarrow.compute
    import pyarrow.csv
    import pyarrow.dataset
    import pyarrow.parquet

_compute: Any = pyarrow.compute  # its functions are made when it is imported, unseen by type checkers

_BYTES = 1 << 24  # of a CSV file that are parsed at a time; a row may be as long
_BATCH = 1 << 16  # rows that are decoded at a time, at most
_INDEX = re.compile(r"|__index_level_\d+__|Unnamed: 0")
_CODE = r"^[ \t]*[+-]?0[0-9]+[ \t]*$"
_WHOLE = r"^[ \t]*([+-]?[0-9]+)?[ \t]*$"  # or missing


class Files:
    """Rows of a folder's files, whose columns are the same, in any order.

    Columns into which pandas wrote the names of rows are left out, unless they are asked for: of sorted rows, they
    tell the target.

    In CSV files, columns to predict from are numbers of double precision, whatever their first rows look like. Targets
    are, too, unless some are text, or all are whole and some have zeros in front: as numbers, ``007`` and ``7`` were
    one label. ``csv`` has the delimiter and the decimal point; ``None``: Parquet.
    """

    def __init__(
        self,
        who: str,
        folder: Path,
        target: str,
        columns: Sequence[str] | None,
        dtype: Any,
        csv: tuple[str, str] | None = None,
    ) -> None:
        self.target, self._who, self._csv = target, who, csv
        suffix = ".parquet" if csv is None else ".csv"
        paths = [folder] if folder.is_file() else sorted(folder.iterdir()) if folder.is_dir() else []
        self._files = [File(who, path) for path in paths if path.name.lower().endswith(suffix)]
        if not self._files:
            raise DataError(f"{who}: folder must have {suffix} files, or be one, got {str(folder)!r}, which has none")
        schemas = [self._schema(file) for file in self._files]
        rows = {*_row_names(schemas[0])} - {target}
        self.columns = list(columns or [name for name in schemas[0].names if name not in {*rows, target}])
        if len({*self.columns, target}) <= max(1, len(self.columns)):
            raise DataError(
                f"{who}: columns must be those to predict from, at least one, each once and not the target {target!r}, "
                f"got {self.columns} of {str(self._files[0].path)!r}"
            )
        for file, schema in zip(self._files, schemas, strict=True):
            self._require(file.path, schema)
        self._kinds = [{name: schema.field(name).type for name in (*self.columns, target)} for schema in schemas]
        held = [own[name].to_pandas_dtype() for own in self._kinds for name in self.columns]
        self.dtype = np.dtype(dtype or (np.float64 if csv else np.result_type(np.float32, *held)))
        self._surveyed: tuple[list[int], bool] | None = None

    def __len__(self) -> int:
        return sum(self._survey()[0])

    def blocks(self, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        is_text = self._survey()[1]
        for file, kinds in zip(self._files, self._kinds, strict=True):
            types = {name: pa.bool_() if pa.types.is_boolean(kind) else pa.float64() for name, kind in kinds.items()}
            types |= {self.target: pa.string()} if is_text else {}
            for batch in self._batches(file, types, list(types), min(size, _BATCH)):
                *columns, y = (batch.column(name).to_numpy(zero_copy_only=False) for name in types)
                if is_text and self._csv:
                    y = y.astype(object)
                    y[y == ""] = None
                yield np.stack(columns, 1, dtype=self.dtype, casting="unsafe"), y

    def place(self, row: int) -> str:
        return place_of(self._files, self._survey()[0], row)

    def as_targets(self, y: np.ndarray) -> np.ndarray:
        """Return targets of CSV files as integers, if all are, and floats tell them apart: 1 in a file is no 1.0."""
        is_whole = y.dtype.kind == "f" and np.all(np.trunc(y) == y) and np.all(np.abs(y) < 2**53)
        return y.astype(np.int64) if self._csv and is_whole else y

    def _dataset(self, file: File, types: Mapping[str, Any] | None = None) -> Any:
        form: Any = "parquet"
        if self._csv is not None:
            form = pyarrow.dataset.CsvFileFormat(
                pyarrow.csv.ParseOptions(delimiter=self._csv[0], newlines_in_values=True),
                convert_options=pyarrow.csv.ConvertOptions(column_types=types, decimal_point=self._csv[1]),
                read_options=pyarrow.csv.ReadOptions(block_size=_BYTES),
            )
        return pyarrow.dataset.dataset(file.path, format=form)

    def _schema(self, file: File) -> Any:
        with file.reading():
            return self._dataset(file).schema

    def _batches(self, file: File, types: Mapping[str, Any], names: Sequence[str], size: int = _BATCH) -> Iterator[Any]:
        with file.reading():
            if self._csv is None:  # a dataset would hold whole row groups
                with pyarrow.parquet.ParquetFile(file.path, memory_map=True) as opened:
                    yield from opened.iter_batches(size, columns=names)
            else:
                yield from self._dataset(file, types).to_batches(names, batch_size=size, batch_readahead=2)

    def _survey(self) -> tuple[list[int], bool]:
        """Return the files' numbers of rows, and whether targets are text. CSV files are read for it."""
        if self._surveyed is not None:
            return self._surveyed
        sizes, are_whole, are_codes = [], True, False
        is_text = any(not _is_number(kinds[self.target]) for kinds in self._kinds)
        for file in self._files:
            if self._csv is None:
                with file.reading():
                    sizes.append(self._dataset(file).count_rows())
                continue
            self._require_closed_quotes(file.path)
            sizes.append(0)
            for batch in self._batches(file, {self.target: pa.string()}, [self.target]):
                labels = batch.column(0)
                sizes[-1] += len(labels)
                are_whole &= _compute.all(_compute.match_substring_regex(labels, _WHOLE)).as_py() is not False
                are_codes |= _compute.any(_compute.match_substring_regex(labels, _CODE)).as_py() is True
        self._surveyed = sizes, is_text or (are_whole and are_codes)
        return self._surveyed

    def _require(self, path: Path, schema: Any) -> None:
        """Check that a file has the columns, of numbers, each once."""
        for name in (self.target, *self.columns):
            if (count := schema.names.count(name)) != 1:
                raise DataError(
                    f"{self._who}: {str(path)!r} must have {name!r} once, got it {count} times among {schema.names}"
                )
        wrong = [f"{name!r} ({schema.field(name).type})" for name in self.columns
                 if not _is_number(schema.field(name).type)]  # fmt: skip
        if wrong:
            raise DataError(
                f"{self._who}: columns must hold numbers, got {', '.join(wrong)}; leave them out with columns=[…]"
            )

    def _require_closed_quotes(self, path: Path) -> None:
        """Check that quotes are in pairs: Arrow takes all rows after one that stays open for its value."""
        with path.open("rb") as file:
            count = sum(part.count(b'"') for part in iter(lambda: file.read(_BYTES), b""))
        if count % 2:
            raise DataError(f'{self._who}: {str(path)!r} has {count:,} quotes, of which one is open; write ""')


def _is_number(kind: Any) -> bool:
    types = pa.types
    return types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_null(kind)


def _row_names(schema: Any) -> list[str]:
    """Return the columns into which pandas wrote an index, by their names, or by what it noted in a file's metadata."""
    try:
        noted = list(json.loads((schema.metadata or {}).get(b"pandas", b"{}"))["index_columns"])
    except (ValueError, KeyError, TypeError):
        noted = []
    return [name for name in schema.names if _INDEX.fullmatch(name) or name in noted]
