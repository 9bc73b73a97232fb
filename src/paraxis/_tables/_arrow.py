"""Parquet and CSV files as a table, read by Arrow. What Arrow does in silence with a table's columns is refused."""

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paraxis._core.check import needed
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
_NUMBER = r"^[ \t]*[+-]?([0-9]+[.]?[0-9]*|[.][0-9]+)([eE][+-]?[0-9]+)?[ \t]*$"
_GAPS = pyarrow.csv.ConvertOptions().null_values  # and what Arrow reads as no finite number
_GAPS += ["inf", "-inf", "+inf", "Inf", "-Inf", "+Inf", "INF", "-INF", "+INF", "infinity", "-infinity"]
_PACKED = "", ".gz", ".bz2", ".zst", ".lz4"
_WHOLE = r"^[ \t]*([+-]?[0-9]+)?[ \t]*$"  # or missing
_Form = tuple[str, str, str]


class File:
    """A file as it was when it was first looked at.

    Attributes:
        added: the columns that its folders ``name=value`` add, as Hive has it, each with its one value.
    """

    def __init__(self, who: str, path: Path, folders: Sequence[str]) -> None:
        self.who, self.path, self._stat = who, path, _size_and_time(path)
        pairs = (name.partition("=") for name in folders if "=" in name)
        self.added = {name: _value(text) for name, _, text in pairs}

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Within, the file is read; a DataError names it if it cannot be, or has changed before or after."""
        self._require_same()
        try:
            yield
        except Exception as error:
            reason = " ".join(str(error).split())[-300:]  # Arrow says last what was wrong
            raise DataError(
                f"{self.who}: {str(self.path)!r} cannot be read: {type(error).__name__}: {reason}"
            ) from error
        self._require_same()

    def _require_same(self) -> None:
        with contextlib.suppress(OSError):
            if _size_and_time(self.path) == self._stat:
                return
        raise DataError(
            f"{self.who}: {str(self.path)!r} has changed or is gone since it was looked at first; make the table "
            "anew when the file is complete"
        )


class Files:
    """Rows of the files in a folder, and in folders of that, whose columns are the same, in any order.

    Columns into which pandas wrote the names of rows are left out, unless they are asked for: of sorted rows, they
    tell the target. In CSV files, columns to predict from are numbers of double precision, whatever their first rows
    look like; targets are so, too, or integers, or text, or of a type that is ``known``. ``csv`` has the delimiter, the
    decimal point and the encoding.
    """

    def __init__(
        self, who: str, folder: Path, target: str, columns: Any, dtype: Any, csv: _Form | None = None, known: Any = None
    ) -> None:
        self.target, self._who, self._csv = target, who, csv
        self._known = {name: pa.type_for_alias(kind) for name, kind in (known or {}).items()}
        suffix = ".parquet" if csv is None else ".csv"
        paths = [folder] if folder.is_file() else sorted(folder.rglob("*"))
        endings = tuple(suffix + packed for packed in _PACKED)
        within = ((path, path.relative_to(folder).parts[:-1]) for path in paths if path.name.lower().endswith(endings))
        self._files = [File(who, *pair) for pair in within if not any(name[0] in "._" for name in pair[1])]
        if not self._files:
            raise DataError(f"{who}: folder must have {suffix} files, or be one, got {str(folder)!r}, which has none")
        schemas = [self._schema(file) for file in self._files]
        names, first = schemas[0].names, repr(str(self._files[0].path))
        noted = (schemas[0].pandas_metadata or {}).get("index_columns", [])
        rows = {name for name in names if _INDEX.fullmatch(name) or name in noted} - {target}
        self.columns = list(columns or [name for name in names if name not in {*rows, target}])
        if len({*self.columns, target}) <= max(1, len(self.columns)):
            raise DataError(
                f"{who}: columns must be those to predict from, at least one, each once and not the target {target!r}, "
                f"got {self.columns} of {first}"
            )
        for file, schema in zip(self._files, schemas, strict=True):
            path = repr(str(file.path))
            for name in (target, *self.columns):
                if (count := schema.names.count(name)) != 1:
                    raise DataError(f"{who}: {path} must have {name!r} once, got it {count} times among {schema.names}")
            kinds = ((name, schema.field(name).type) for name in self.columns)
            if wrong := ", ".join(f"{name!r} ({kind})" for name, kind in kinds if not _is_number(kind)):
                raise DataError(f"{who}: columns must hold numbers, got {wrong} in {path}; leave them out: columns=[…]")
            if columns is None and (more := ({*schema.names} ^ {*names}) - rows):
                raise DataError(f"{who}: {path} has other columns than {first}: {sorted(more)[:3]}; give columns=[…]")
            kinds = [each.field(target).type for each in (schema, schemas[0])]
            if csv is None and len({*map(_is_number, kinds)}) > 1:
                raise DataError(
                    f"{who}: target {target!r} is {kinds[0]} in {path}, and {kinds[1]} in {first}; write one type"
                )
        self._kinds = [{name: schema.field(name).type for name in (*self.columns, target)} for schema in schemas]
        dtypes = {x[name].to_pandas_dtype() for x in self._kinds for name in self.columns} - {np.object_}  # of nulls
        self.dtype = np.dtype(dtype or (np.float64 if csv else np.result_type(np.float32, *dtypes)))

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
                *columns, y = (_numbers(batch.column(name)).to_numpy(zero_copy_only=False) for name in types)
                if is_text and self._csv:
                    y = y.astype(object)
                    y[y == ""] = None
                elif is_whole and np.isfinite(y).all():
                    y = y.astype(np.int64)
                yield np.stack(columns, 1, dtype=self.dtype, casting="unsafe"), y

    def _csv_dataset(self, file: File, types: Mapping[str, Any] | None = None) -> Any:
        delimiter, decimal, encoding = self._csv or ("", "", "")
        form: Any = pyarrow.dataset.CsvFileFormat(
            pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            convert_options=pyarrow.csv.ConvertOptions(column_types=types or self._known, decimal_point=decimal),
            read_options=pyarrow.csv.ReadOptions(block_size=_BYTES, encoding=encoding),
        )
        return pyarrow.dataset.dataset(file.path, format=form)

    def _schema(self, file: File) -> Any:
        with file.reading():
            schema = self._csv_dataset(file).schema if self._csv else pyarrow.parquet.read_schema(file.path)
            list(schema.names)  # which decodes them
            for name, value in file.added.items():
                schema = schema.append(pa.field(name, value.type))
            return schema

    def _batches(self, file: File, types: Mapping[str, Any], size: int = _BATCH) -> Iterator[Any]:
        names = [name for name in types if name not in file.added]
        with file.reading(), contextlib.ExitStack() as stack:
            if self._csv:
                batches = self._csv_dataset(file, types).to_batches(names, batch_size=size, batch_readahead=2)
            else:  # a dataset would hold whole row groups
                parquet = stack.enter_context(pyarrow.parquet.ParquetFile(file.path, memory_map=True))
                batches = parquet.iter_batches(size, columns=names)
            for batch in batches:
                for name, value in file.added.items():
                    batch = batch.append_column(name, pa.repeat(value, len(batch)))
                yield batch

    @functools.cached_property
    def _survey(self) -> tuple[list[int], bool, bool]:
        """The files' numbers of rows; whether targets are text, and integers. CSV files are read for it."""
        sizes, are_whole, are_codes = [], self._csv is not None, False
        kinds = [kinds[self.target] for kinds in self._kinds]  # by their first rows
        is_text = not all(map(_is_number, kinds))
        may_be_text = not is_text and not any(map(pa.types.is_boolean, kinds)) and self.target not in self._known
        number = _NUMBER.replace("[.]", f"[{self._csv[1]}]") if self._csv else ""
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
                matches = functools.partial(_compute.match_substring_regex, labels)
                known = _compute.or_(matches(number), _compute.is_in(labels, pa.array(_GAPS)))
                is_text |= may_be_text and _compute.all(known).as_py() is False
                are_whole &= _compute.all(matches(_WHOLE)).as_py() is not False
                are_codes |= may_be_text and _compute.any(matches(_CODE)).as_py() is True
        return sizes, is_text or (are_whole and are_codes), are_whole and not is_text

    def _require_closed_quotes(self, path: Path) -> None:
        """Check that quotes are in pairs: Arrow takes all rows after one that stays open for its value."""
        with pa.input_stream(str(path), compression="detect") as file:
            count = sum(part.count(b'"') for part in iter(lambda: file.read(_BYTES), b""))
        if count % 2:
            raise DataError(f'{self._who}: {str(path)!r} has {count:,} quotes, of which one is open; write ""')


def _size_and_time(path: Path) -> tuple[int, int]:
    return path.stat().st_size, path.stat().st_mtime_ns


def _value(text: str) -> Any:
    """Return the value in a folder's name: a number, of the least type that has it, or text."""
    with contextlib.suppress(ValueError):
        number = float(text)
        return pa.scalar(np.min_scalar_type(int(number)).type(number) if number.is_integer() else number)
    return pa.scalar(text)


def _is_number(kind: Any) -> bool:
    return any(getattr(pa.types, f"is_{n}")(kind) for n in ("integer", "floating", "decimal", "boolean", "null"))


def _numbers(column: Any) -> Any:
    """Return a column whose decimals, which NumPy has as objects, are floats."""
    return column.cast(pa.float64()) if pa.types.is_decimal(column.type) else column
