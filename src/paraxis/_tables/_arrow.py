"""Parquet and CSV files as a table, read by Arrow. What Arrow does in silence with a table's columns is refused."""

import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paraxis._core.check import needed
from paraxis._tables._arrays import File
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
_CODE = r"^[ \t]*[+-]?(0[0-9]+|[0-9]{16,})[ \t]*$"  # of more digits than float64 has, too
_WHOLE = r"^[ \t]*([+-]?[0-9]+)?[ \t]*$"  # or missing


class Files:
    """Rows of a folder's files, whose columns are the same, in any order.

    Columns into which pandas wrote the names of rows are left out, unless they are asked for: of sorted rows, they
    tell the target. In CSV files, columns to predict from are numbers of double precision, whatever their first rows
    look like; targets are so, too, or integers, or text. ``csv`` has the delimiter and the decimal point.
    """

    def __init__(
        self, who: str, folder: Path, target: str, columns: Any, dtype: Any, csv: tuple[str, str] | None = None
    ) -> None:
        self.target, self._who, self._csv = target, who, csv
        suffix = ".parquet" if csv is None else ".csv"
        paths = [folder] if folder.is_file() else sorted(folder.glob("*"))
        self._files = [File(who, path) for path in paths if path.name.lower().endswith(suffix)]
        if not self._files:
            raise DataError(f"{who}: folder must have {suffix} files, or be one, got {str(folder)!r}, which has none")
        schemas = [self._schema(file) for file in self._files]
        noted = (schemas[0].pandas_metadata or {}).get("index_columns", [])
        rows = {name for name in schemas[0].names if _INDEX.fullmatch(name) or name in noted} - {target}
        self.columns = list(columns or [name for name in schemas[0].names if name not in {*rows, target}])
        if len({*self.columns, target}) <= max(1, len(self.columns)):
            raise DataError(
                f"{who}: columns must be those to predict from, at least one, each once and not the target {target!r}, "
                f"got {self.columns} of {str(self._files[0].path)!r}"
            )
        for file, schema in zip(self._files, schemas, strict=True):
            for name in (target, *self.columns):
                if (count := schema.names.count(name)) != 1:
                    raise DataError(
                        f"{who}: {str(file.path)!r} must have {name!r} once, got it {count} times among {schema.names}"
                    )
            wrong = [f"{name!r} ({kind})" for name in self.columns if not _is_number(kind := schema.field(name).type)]
            if wrong:
                raise DataError(
                    f"{who}: columns must hold numbers, got {', '.join(wrong)}; leave them out: columns=[…]"
                )
        self._kinds = [{name: schema.field(name).type for name in (*self.columns, target)} for schema in schemas]
        held = {own[name].to_pandas_dtype() for own in self._kinds for name in self.columns} - {np.object_}  # of nulls
        self.dtype = np.dtype(dtype or (np.float64 if csv else np.result_type(np.float32, *held)))

    def __len__(self) -> int:
        return sum(size for _, size in self.parts)

    @property
    def parts(self) -> list[tuple[Path, int]]:
        return [(file.path, size) for file, size in zip(self._files, self._survey[0], strict=True)]

    def blocks(self, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        _, is_text, is_whole = self._survey
        for file, kinds in zip(self._files, self._kinds, strict=True):
            types = {name: pa.bool_() if pa.types.is_boolean(kind) else pa.float64() for name, kind in kinds.items()}
            types |= {self.target: pa.string()} if is_text else {}
            for batch in self._batches(file, types, min(size, _BATCH)):
                *columns, y = (batch.column(name).to_numpy(zero_copy_only=False) for name in types)
                if is_text and self._csv:
                    y = y.astype(object)
                    y[y == ""] = None
                elif is_whole and np.isfinite(y).all():
                    y = y.astype(np.int64)
                yield np.stack(columns, 1, dtype=self.dtype, casting="unsafe"), y

    def _csv_dataset(self, file: File, types: Mapping[str, Any] | None = None) -> Any:
        delimiter, decimal = self._csv or ("", "")
        form: Any = pyarrow.dataset.CsvFileFormat(
            pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            convert_options=pyarrow.csv.ConvertOptions(column_types=types, decimal_point=decimal),
            read_options=pyarrow.csv.ReadOptions(block_size=_BYTES),
        )
        return pyarrow.dataset.dataset(file.path, format=form)

    def _schema(self, file: File) -> Any:
        with file.reading():
            return self._csv_dataset(file).schema if self._csv else pyarrow.parquet.read_schema(file.path)

    def _batches(self, file: File, types: Mapping[str, Any], size: int = _BATCH) -> Iterator[Any]:
        names = list(types)
        with file.reading():
            if self._csv:
                yield from self._csv_dataset(file, types).to_batches(names, batch_size=size, batch_readahead=2)
            else:  # a dataset would hold whole row groups
                with pyarrow.parquet.ParquetFile(file.path, memory_map=True) as opened:
                    yield from opened.iter_batches(size, columns=names)

    @functools.cached_property
    def _survey(self) -> tuple[list[int], bool, bool]:
        """The files' numbers of rows; whether targets are text, and integers. CSV files are read for it."""
        sizes, are_whole, are_codes = [], self._csv is not None, False
        is_text = any(not _is_number(kinds[self.target]) for kinds in self._kinds)
        for file in self._files:
            if self._csv is None:
                with file.reading():
                    sizes.append(pyarrow.parquet.read_metadata(file.path).num_rows)
                continue
            self._require_closed_quotes(file.path)
            sizes.append(0)
            for batch in self._batches(file, {self.target: pa.string()}):
                labels = batch.column(0)
                sizes[-1] += len(labels)
                are_whole &= _compute.all(_compute.match_substring_regex(labels, _WHOLE)).as_py() is not False
                are_codes |= _compute.any(_compute.match_substring_regex(labels, _CODE)).as_py() is True
        return sizes, is_text or (are_whole and are_codes), are_whole and not is_text

    def _require_closed_quotes(self, path: Path) -> None:
        """Check that quotes are in pairs: Arrow takes all rows after one that stays open for its value."""
        with path.open("rb") as file:
            count = sum(part.count(b'"') for part in iter(lambda: file.read(_BYTES), b""))
        if count % 2:
            raise DataError(f'{self._who}: {str(path)!r} has {count:,} quotes, of which one is open; write ""')


def _is_number(kind: Any) -> bool:
    types = pa.types
    return types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_null(kind)
