"""Files as columns with names. CSV and Parquet are read by Arrow, NPZ by NumPy, without pickles."""

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as arrow_parquet

from paraxis._host import files
from paraxis.cli._errors import CommandError

Kind = Literal["number", "integer", "boolean", "text", "other"]

_NAMED = 6  # a message names no more columns than that
_LARGEST_BLOCK = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a file.

    Args:
        name: as in the file.
        kind: what it holds; ``other`` cannot be used.
        values: ``(n,)``, float64, of text objects; where one is missing, anything.
        missing: ``(n,)`` booleans; NaN is missing, too.
        stored: its type in the file, for people.
    """

    name: str
    kind: Kind
    values: np.ndarray
    missing: np.ndarray
    stored: str

    def rows(self, chosen: np.ndarray) -> "Column":
        return dataclasses.replace(self, values=self.values[chosen], missing=self.missing[chosen])


@dataclasses.dataclass(frozen=True)
class Table:
    """The columns of a file, all ``(num_rows,)``, by their names in order."""

    path: Path
    num_rows: int
    columns: dict[str, Column]

    def rows(self, chosen: np.ndarray) -> "Table":
        """Some of the rows, by a mask or by their numbers."""
        columns = {name: column.rows(chosen) for name, column in self.columns.items()}
        return Table(self.path, len(np.arange(self.num_rows)[chosen]), columns)

    def required(self, names: Sequence[str], what: str) -> None:
        """Check that there are columns of these names.

        Raises:
            CommandError: naming those that are missing, what is there, and what is nearly the same.
        """
        absent = [name for name in names if name not in self.columns]
        if not absent:
            return
        close = [difflib.get_close_matches(name, self.columns, n=1) for name in absent]
        meant = [f"{match[0]!r}" for match in close if match]
        hint = f"; did you mean {', '.join(meant[:_NAMED])}?" if meant else ""
        raise CommandError(f"{self.path} has no {what} {quoted(absent)}; its columns are {quoted(self.columns)}{hint}")


def read_table(path: Path, *, as_text: Iterable[str] = ()) -> Table:
    """Read a file.

    Args:
        path: its suffix tells its kind.
        as_text: columns of a CSV file that are text even where all of it are digits.

    Raises:
        CommandError: if it cannot be read, or holds no rows.
    """
    kind = path.suffix.lower()
    if kind not in _READERS:
        raise CommandError(f"{path}: cannot tell what it is from its suffix {path.suffix!r}; {SUFFIXES}")
    try:
        columns = _READERS[kind](path, list(as_text))
    except files.ABSENT as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}") from None
    except (pa.ArrowException, *files.DAMAGED) as error:
        reason = " ".join(str(error).split())
        raise CommandError(f"{path} cannot be read as {kind[1:].upper()}: {reason[:300]}") from None
    names = [column.name for column in columns]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise CommandError(f"{path} has several columns named {quoted(twice)}; give each a name of its own")
    num_rows = len(columns[0].values) if columns else 0
    if not num_rows:
        raise CommandError(f"{path} is empty: it holds no rows")
    return Table(path, num_rows, {column.name: column for column in columns})


def write_table(file: Any, suffix: str, columns: dict[str, np.ndarray]) -> None:
    """Write columns as CSV or Parquet."""
    table = pa.table({name: pa.array(values) for name, values in columns.items()})
    if suffix == ".csv":
        arrow_csv.write_csv(table, file)
    else:
        arrow_parquet.write_table(table, file)


def quoted(names: Iterable[object]) -> str:
    """For people: ``'a', 'b' and 12 more``."""
    listed = list(names)
    shown = ", ".join(f"{name!r}" for name in listed[:_NAMED])
    return shown if len(listed) <= _NAMED else f"{shown} and {len(listed) - _NAMED} more"


def _read_csv(path: Path, as_text: list[str]) -> list[Column]:
    # The type of a column is told from the first block: so there is one.
    block = min(path.stat().st_size + 1, _LARGEST_BLOCK)
    table = arrow_csv.read_csv(
        path,
        read_options=arrow_csv.ReadOptions(block_size=block),
        convert_options=arrow_csv.ConvertOptions(
            strings_can_be_null=True, column_types=dict.fromkeys(as_text, pa.string())
        ),
    )
    first = table.schema.names[0]
    other = next((mark for mark in (";", "\t", "|") if mark in first), None)
    if table.num_columns == 1 and other:
        raise ValueError(f"its columns are separated by {other!r}; separate them by commas")
    foreign = [field.name for field in table.schema if pa.types.is_binary(field.type)]
    if foreign:
        raise ValueError(f"its columns {quoted(foreign)} are not in UTF-8; save it with this encoding")
    return _of_arrow(table)


def _read_parquet(path: Path, as_text: list[str]) -> list[Column]:
    with path.open("rb") as file:
        return _of_arrow(arrow_parquet.ParquetFile(file).read())


def _read_npz(path: Path, as_text: list[str]) -> list[Column]:
    with path.open("rb") as opened:
        # Of a file that is no archive, NumPy gives the array that it is.
        loaded = np.load(opened, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            raise ValueError("it is one array, not an archive; write np.savez(path, X=X, y=y)")
        with loaded as archive:
            arrays = {name: archive[name] for name in archive.files}
    columns = [column for name, array in arrays.items() for column in _of_array(name, array)]
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"its arrays have different numbers of rows, {lengths}; each row needs a value in every array")
    return columns


_READERS: dict[str, Callable[[Path, list[str]], list[Column]]] = {
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".npz": _read_npz,
}
SUFFIXES = f"it must be one of {', '.join(_READERS)}"


def _of_arrow(table: pa.Table) -> list[Column]:
    return [_of_chunks(name, table.column(index)) for index, name in enumerate(table.schema.names)]


def _of_chunks(name: str, chunks: pa.ChunkedArray) -> Column:
    stored = str(chunks.type)
    if pa.types.is_dictionary(chunks.type):
        chunks = chunks.cast(chunks.type.value_type)
    kind = _arrow_kind(chunks.type)
    missing = chunks.is_null().to_numpy()
    if kind == "other":
        return Column(name, kind, np.zeros(len(missing)), missing, stored)
    if kind == "text":
        return Column(name, kind, chunks.fill_null("").to_numpy().astype(object), missing, stored)
    values = (
        np.zeros(len(missing)) if pa.types.is_null(chunks.type) else chunks.cast(pa.float64(), safe=False).to_numpy()
    )
    values = np.array(values, np.float64)
    return Column(name, kind, values, missing | np.isnan(values), stored)


def _arrow_kind(stored: pa.DataType) -> Kind:
    tests: tuple[tuple[Kind, Callable[[Any], bool]], ...] = (
        ("boolean", pa.types.is_boolean),
        ("integer", pa.types.is_integer),
        ("number", lambda t: pa.types.is_floating(t) or pa.types.is_decimal(t) or pa.types.is_null(t)),
        ("text", lambda t: pa.types.is_string(t) or pa.types.is_large_string(t) or pa.types.is_string_view(t)),
    )
    for kind, holds in tests:
        if holds(stored):
            return kind
    return "other"


def _of_array(name: str, array: np.ndarray) -> list[Column]:
    if array.ndim not in (1, 2):
        raise ValueError(f"its array {name!r} has shape {array.shape}; an array must be (rows,) or (rows, columns)")
    if array.ndim == 2:
        return [column for i in range(array.shape[1]) for column in _of_array(f"{name}{i}", array[:, i])]
    kinds: dict[str, Kind] = {"b": "boolean", "i": "integer", "u": "integer", "f": "number", "U": "text"}
    kind = kinds.get(array.dtype.kind, "other")
    missing = np.zeros(len(array), bool)
    if kind == "text":
        return [Column(name, kind, array.astype(object), missing, str(array.dtype))]
    values = np.zeros(len(array)) if kind == "other" else array.astype(np.float64)
    return [Column(name, kind, values, missing | np.isnan(values), str(array.dtype))]
