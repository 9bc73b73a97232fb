"""Parquet and CSV files as a table, read by Arrow. What Arrow does in silence with a table's columns is refused."""

import abc
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from paraxis._calls.extras import needed
from paraxis._tables import _files as files
from paraxis.errors import DataError

with needed("px.Table", "tables"):
    import pyarrow as pa
    import pyarrow.compute
    import pyarrow.csv
    import pyarrow.parquet

_compute: Any = pyarrow.compute  # its functions are made when it is imported, unseen by type checkers

_BYTES = 1 << 24  # of a CSV file that are parsed at a time; a row may be as long
_BATCH = 1 << 16  # rows of a Parquet file that are decoded at a time
_INDEX = re.compile(r"|__index_level_\d+__|Unnamed: 0")
_CODE = r"^[ \t]*[+-]?0[0-9]+[ \t]*$"
_WHOLE = r"^[ \t]*([+-]?[0-9]+)?[ \t]*$"  # or missing


class _Arrow(abc.ABC):
    """Rows of a folder's files, whose columns are the same, in any order.

    Columns into which pandas wrote the names of rows are left out, unless they are asked for: of sorted rows, they
    tell the target.
    """

    who: ClassVar[str]
    suffix: ClassVar[str]

    def __init__(self, folder: Path, target: str, columns: Sequence[str] | None) -> None:
        self.target = target
        paths = files.found(self.who, folder, self.suffix)
        self._files = [files.Unchanged.of(self.who, path) for path in paths]
        schemas = [self._schema(file) for file in self._files]
        rows = {*_row_names(schemas[0])} - {target}
        self.columns = list(columns or [name for name in schemas[0].names if name not in {*rows, target}])
        if not self.columns:
            raise DataError(
                f"{self.who}: {str(paths[0])!r} has no column to predict from besides the target {target!r}"
            )
        if len({*self.columns, target}) <= len(self.columns):
            raise DataError(
                f"{self.who}: columns must be those to predict from, each once and not the target {target!r}, got "
                f"{self.columns}"
            )
        for path, schema in zip(paths, schemas, strict=True):
            self._require(path, schema, None if columns else {*schemas[0].names})
        self._kinds = [{name: schema.field(name).type for name in (*self.columns, target)} for schema in schemas]

    def _require(self, path: Path, schema: Any, expected: set[str] | None) -> None:
        """Check that a file has the columns, of numbers, each once, and, if all are chosen, no others."""
        for name in (self.target, *self.columns):
            count = schema.names.count(name)
            if count != 1:
                raise DataError(
                    f"{self.who}: {str(path)!r} must have {name!r} once, got it {count} times among {schema.names}"
                )
        others = set() if expected is None else {*schema.names} - expected - {*_row_names(schema)}
        if others:
            raise DataError(
                f"{self.who}: {str(path)!r} has {sorted(others)} besides the columns of the first file; give all files "
                f"the same columns, or choose those that all have: columns={self.columns}"
            )
        wrong = [f"{name!r} ({schema.field(name).type})" for name in self.columns if not _is_number(schema.field(name))]
        if wrong:
            raise DataError(
                f"{self.who}: columns must hold numbers, got {', '.join(wrong)}; leave them out with columns=[…], or "
                f"write them into the files as numbers: a column of 0 and 1 for each value"
            )

    @property
    @abc.abstractmethod
    def sizes(self) -> list[int]:
        """The numbers of rows of the files."""

    @abc.abstractmethod
    def _schema(self, file: files.Unchanged) -> Any:
        """Return the names and types of a file's columns."""

    @abc.abstractmethod
    def _parts(self) -> files.Parts:
        """Yield rows and targets, some at a time."""

    def __len__(self) -> int:
        return sum(self.sizes)

    def blocks(self, size: int) -> files.Parts:
        return files.in_blocks(self._parts(), size)

    def place(self, row: int) -> str:
        return files.place(self._files, self.sizes, row)


class Parquet(_Arrow):
    """Rows of Parquet files. Their metadata are read when it is made."""

    who = "Table.parquet"
    suffix = ".parquet"

    def __init__(self, folder: Path, target: str, columns: Sequence[str] | None, dtype: Any) -> None:
        self._sizes: list[int] = []
        super().__init__(folder, target, columns)
        held = [np.dtype(own[name].to_pandas_dtype()) for own in self._kinds for name in self.columns]
        self.dtype = np.result_type(np.float32, *held) if dtype is None else np.dtype(dtype)

    @property
    def sizes(self) -> list[int]:
        return self._sizes

    def _schema(self, file: files.Unchanged) -> Any:
        with file.reading(), pyarrow.parquet.ParquetFile(file.path, memory_map=True) as opened:
            self._sizes.append(opened.metadata.num_rows)
            return opened.schema_arrow

    def _parts(self) -> files.Parts:
        names = [*self.columns, self.target]
        for file in self._files:
            with file.reading(), pyarrow.parquet.ParquetFile(file.path, memory_map=True) as opened:
                for batch in opened.iter_batches(_BATCH, columns=names):
                    *found, y = (batch.column(name).to_numpy(zero_copy_only=False) for name in names)
                    yield files.as_rows(found, self.dtype), y


class Csv(_Arrow):
    """Rows of CSV files, each with a header. To count them, they are read once, when that is asked for.

    Columns to predict from are numbers of double precision, whatever their first rows look like. Targets are, too,
    unless some are text, or all are whole and some have zeros in front: as numbers, ``007`` and ``7`` were one label.
    """

    who = "Table.csv"
    suffix = ".csv"

    def __init__(
        self, folder: Path, target: str, columns: Sequence[str] | None, dtype: Any, delimiter: str, decimal: str
    ) -> None:
        self._delimiter, self._decimal = delimiter, decimal
        self._surveyed: tuple[list[int], bool] | None = None
        super().__init__(folder, target, columns)
        self.dtype = np.dtype(np.float64 if dtype is None else dtype)

    @property
    def sizes(self) -> list[int]:
        return self._survey()[0]

    def _schema(self, file: files.Unchanged) -> Any:
        with file.reading(), self._open(file.path, pyarrow.csv.ConvertOptions(decimal_point=self._decimal)) as opened:
            return opened.schema

    def _open(self, path: Path, convert: Any) -> Any:
        parse = pyarrow.csv.ParseOptions(delimiter=self._delimiter, newlines_in_values=True)
        return pyarrow.csv.open_csv(path, pyarrow.csv.ReadOptions(block_size=_BYTES), parse, convert)

    def _read(self, types: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Any]]:
        """Yield the number of the file, and some of its rows."""
        for number, (file, own) in enumerate(zip(self._files, types, strict=True)):
            convert = pyarrow.csv.ConvertOptions(
                column_types=own, include_columns=list(own), decimal_point=self._decimal
            )
            with file.reading(), self._open(file.path, convert) as opened:
                for batch in opened:
                    yield number, batch

    def _survey(self) -> tuple[list[int], bool]:
        """Return the numbers of rows of the files, and whether targets are text."""
        if self._surveyed is None:
            for file in self._files:
                _require_closed_quotes(self.who, file.path)
            sizes, are_whole, are_codes = [0] * len(self._files), True, False
            for number, batch in self._read([{self.target: pa.string()}] * len(self._files)):
                labels = batch.column(0)
                sizes[number] += len(labels)
                are_whole = (
                    are_whole and _compute.all(_compute.match_substring_regex(labels, _WHOLE)).as_py() is not False
                )
                are_codes = are_codes or _compute.any(_compute.match_substring_regex(labels, _CODE)).as_py() is True
            is_text = any(not _is_number(own[self.target]) for own in self._kinds)
            self._surveyed = sizes, is_text or (are_whole and are_codes)
        return self._surveyed

    def _parts(self) -> files.Parts:
        is_text = self._survey()[1]
        types = [{name: pa.bool_() if pa.types.is_boolean(kind) else pa.float64() for name, kind in own.items()}
                 for own in self._kinds]  # fmt: skip
        if is_text:
            types = [{**own, self.target: pa.string()} for own in types]
        for _, batch in self._read(types):
            y, *found = (batch.column(name).to_numpy(zero_copy_only=False) for name in (self.target, *self.columns))
            if is_text:
                y = y.astype(object)
                y[y == ""] = None
            yield files.as_rows(found, self.dtype), y

    def as_targets(self, y: np.ndarray) -> np.ndarray:
        """Return targets as integers, if all are, and floats tell them apart: what a file shows as 1 is no 1.0."""
        is_whole = y.dtype.kind == "f" and np.all(np.trunc(y) == y) and np.all(np.abs(y) < 2**53)
        return y.astype(np.int64) if is_whole else y


def _require_closed_quotes(who: str, path: Path) -> None:
    """Check that quotes are in pairs: Arrow leaves out all rows after one that stays open."""
    with path.open("rb") as file:
        count = sum(part.count(b'"') for part in iter(lambda: file.read(_BYTES), b""))
    if count % 2:
        raise DataError(f'{who}: {str(path)!r} has {count:,} quotes, of which one is open; write one in a value as ""')


def _is_number(field: Any) -> bool:
    kind, types = getattr(field, "type", field), pa.types
    return types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_null(kind)


def _row_names(schema: Any) -> list[str]:
    """Return the columns into which pandas wrote an index, by their names, or by what it noted in a file's metadata."""
    try:
        noted = list(json.loads((schema.metadata or {}).get(b"pandas", b"{}"))["index_columns"])
    except (ValueError, KeyError, TypeError):
        noted = []
    return [name for name in schema.names if _INDEX.fullmatch(name) or name in noted]
