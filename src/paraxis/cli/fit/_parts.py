"""A file, or a folder of files, read a part at a time: each part is a table of its own, as if it were the file.

A part of a CSV file is its header and some of its rows, cut where a row ends. What one part holds may be numbers, and
another text: whoever reads all parts asks for such a column as text.
"""

import contextlib
import dataclasses
import re
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as arrow_parquet

from paraxis._tables import Piece, Table as OnDisk, Unchanged, num_lines, pieces, row_names
from paraxis.cli._errors import CommandError
from paraxis.cli.fit._csv import NoReadingError, read_bytes, require_bytewise, require_closed
from paraxis.cli.fit._options import CsvForm
from paraxis.cli.fit._tables import IN_PARTS, Table, assembled, quoted, reading, require_no_form
from paraxis.cli.fit._values import Column, of_arrow, of_numpy
from paraxis.errors import DataError

_BYTES = 1 << 22  # of numbers in a part


class Parts:
    """The rows of a file or folder, in order, as often as they are asked for.

    Args:
        path: a CSV or Parquet file, or a folder of such files, or of ``X*.npy`` and ``y*.npy``.
        form: how it is written, if it is CSV.
        command: who asks, for errors.

    Raises:
        CommandError: if it is none of these.
    """

    def __init__(self, path: Path, form: CsvForm, command: str) -> None:
        self._path, self._form = path, form
        kind = _kind(path)
        self._kind = kind
        if kind != ".csv":
            require_no_form(path, form)
        paths = sorted(path.glob(f"*{kind}")) if path.is_dir() else [path]
        self._files = [Unchanged.of(command, file) for file in paths]
        self._npy = None
        if kind == ".npy":
            with _named():
                self._npy = OnDisk.npy(path)

    def read(self, as_text: Container[str] = ()) -> Iterator[Table]:
        """Yield tables with some of the rows each, whose numbers go on from one to the next.

        Args:
            as_text: columns that are text even where all of a part are digits.

        Raises:
            CommandError: if a part cannot be read, the files have different columns, or there are no rows.
        """
        first, path, before, end = None, None, 0, 0
        with _named():
            for part in self._tables(as_text):
                first = part if first is None else first
                if set(part.columns) != set(first.columns):
                    lacks = [name for name in first.columns if name not in part.columns]
                    has = [name for name in part.columns if name not in first.columns]
                    differ = [f"lacks {quoted(lacks)}"] * bool(lacks) + [f"has {quoted(has)} besides"] * bool(has)
                    raise CommandError(
                        f"{part.path} {' and '.join(differ)}, compared with {first.path}; give all files the same "
                        f"columns"
                    )
                if part.path != path:
                    path, before = part.path, end
                end = before + int(part.numbers[-1]) + 1
                yield dataclasses.replace(part, numbers=part.numbers + before, before=before)
        if not end:
            raise CommandError(f"{self._path} is empty: it holds no rows")

    def _tables(self, as_text: Container[str]) -> Iterator[Table]:
        if self._npy is not None:
            yield from self._npy_parts(self._npy)
            return
        for file in self._files:
            file.require()
            with reading(file.path):
                yield from (self._csv_parts if self._kind == ".csv" else self._parquet_parts)(file.path, as_text)
            file.require()

    def _csv_parts(self, path: Path, as_text: Container[str]) -> Iterator[Table]:
        number = quotes = 0
        with path.open("rb") as file:
            require_bytewise(file.read(4), self._form)
        for piece, shift in self._csv_pieces(path):
            with _said_of_all(shift):
                columns, numbers, notes, length = read_bytes(piece.header + piece.rows, self._form, as_text)
            if len(numbers):
                notes = tuple(_shifted(note, shift) for note in notes)
                yield assembled(path, self._form, columns, (), number + numbers, notes)
            number += length
            quotes += piece.rows.count(b'"')
        if quotes % 2:  # one may have taken rows into a value that ends in another piece's
            for piece, shift in self._csv_pieces(path):
                with _said_of_all(shift):
                    require_closed(piece.header + piece.rows, self._form)

    def _csv_pieces(self, path: Path) -> Iterator[tuple[Piece, int]]:
        """Yield the pieces, and how many lines further each row is in the whole file than after its header."""
        lines = 0
        for piece in pieces(path, self._form.delimiter):
            yield piece, lines - num_lines(piece.header)
            lines += num_lines(piece.rows)

    def _parquet_parts(self, path: Path, as_text: Container[str]) -> Iterator[Table]:
        del as_text  # its types are known
        number = 0
        with arrow_parquet.ParquetFile(path, memory_map=True) as file:
            schema = file.schema_arrow
            index = tuple(row_names(schema.names, schema.metadata or {}))
            size = max(1, _BYTES // (8 * max(1, len(schema.names))))
            for batch in file.iter_batches(size):
                if batch.num_rows:
                    columns = [of_arrow(name, batch.column(at)) for at, name in enumerate(schema.names)]
                    numbers = number + np.arange(batch.num_rows)
                    yield assembled(path, self._form, columns, index, numbers, ())
                    number += batch.num_rows

    def _npy_parts(self, table: OnDisk) -> Iterator[Table]:
        number = 0
        for X, y in table.blocks(max(1, _BYTES // (8 * len(table.columns)))):
            columns = [_of_numbers(name, X[:, at]) for at, name in enumerate(table.columns)]
            columns.append(_of_numbers(table.target, y))
            yield assembled(self._path, self._form, columns, (), number + np.arange(len(y)), ())
            number += len(y)


def _kind(path: Path) -> str:
    if path.is_dir():
        found = sorted({file.suffix for file in path.iterdir() if file.suffix in IN_PARTS})
        if len(found) != 1:
            got = f"files {' and '.join(found)}" if found else "none of these"
            raise CommandError(f"{path} must hold files of one kind, {', '.join(IN_PARTS)}, and holds {got}")
        return found[0]
    if path.suffix.lower() not in IN_PARTS[:2]:
        raise CommandError(
            f"{path} is not read in parts: --stream takes .csv and .parquet files, or a folder of "
            f"{', '.join(IN_PARTS)}; leave out --stream, or write np.save('rows/X.npy', X), np.save('rows/y.npy', y)",
            remedies=[{"stream": lambda _: None, "stream_folder": None}, {"stream": False}],
        )
    if not path.exists():
        raise CommandError(f"{path} cannot be read: No such file or directory")
    return path.suffix.lower()


class _named:  # noqa: N801  it is used as a function
    """Around what reads files: tell of them as the command does."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if isinstance(error, DataError):
            raise CommandError(str(error)) from None


def _of_numbers(name: str, values: np.ndarray) -> Column:
    return of_numpy(name, values, np.zeros(len(values), bool), str(values.dtype))


@contextlib.contextmanager
def _said_of_all(lines: int) -> Iterator[None]:
    """Within, an error of a part tells a line of the whole file."""
    try:
        yield
    except NoReadingError as error:
        said = _shifted(str(error), lines)
        raise NoReadingError(said, error.remedies, certain=error.certain) from None


def _shifted(said: str, lines: int) -> str:
    """Return the same of the whole file, of which it tells a line."""
    return re.sub(r"\bline (\d+)", lambda found: f"line {int(found[1]) + lines}", said, count=1)
