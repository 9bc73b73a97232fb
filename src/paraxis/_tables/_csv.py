"""CSV files as a table, parsed a few megabytes at a time."""

import bisect
import functools
import itertools
import operator
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paraxis._calls.extras import needed
from paraxis._tables import _files as files
from paraxis.errors import DataError

_WHO = "Table.csv"
_BYTES = 1 << 22  # of a piece; parsed, it takes about ten times as much
_LONGEST = 16  # pieces, that one row of a file may have
_MARK = b"\xef\xbb\xbf"  # of UTF-8, which a file may begin with
_CODE = r"^[ \t]*[+-]?0[0-9]+[ \t]*$"
_WHOLE = r"^[ \t]*([+-]?[0-9]+)?[ \t]*$"  # or missing


class Piece(NamedTuple):
    """Some rows of a file, which are a file of their own if they come after its header.

    Args:
        header: its first row; of the first piece nothing, whose rows begin with it.
        rows: whole.
        start: where these are in the file, in bytes.
    """

    header: bytes
    rows: bytes
    start: int


def pieces(path: Path, delimiter: str, start: int = 0) -> Iterator[Piece]:
    """Yield the rows of a CSV file, from those on that a piece starts with.

    Raises:
        ValueError: if a row does not end.
    """
    with path.open("rb") as file:
        header, left = b"", b""
        if start:
            header = _header(file.read(_BYTES), delimiter)
            file.seek(start)
        while True:
            data = file.read(_BYTES)
            block = left + data
            end = _end_of_rows(block, delimiter)
            if not header and end <= _num_blank(block):
                end = 0
            is_open = len(_quotes(block[end:], delimiter)) % 2 == 1
            if (is_open and not data) or len(block) - end > _LONGEST * _BYTES:
                within = f" within {len(block) - end:,} bytes" * bool(data)
                if not is_open:
                    raise ValueError(f"line {_line(path, start + end)} does not end{within}")
                raise ValueError(
                    f"line {_line(path, start + end)} opens a quote that is not closed{within}; write a quote within a "
                    f'value as ""'
                )
            rows, left = (block[:end], block[end:]) if data else (block, b"")
            if rows:
                yield Piece(header, rows, start)
            if not header and rows:
                header = _header(rows, delimiter)
            start += len(rows)
            if not data:
                return


def num_lines(data: bytes) -> int:
    """Return how many lines end in it: by a line feed, a carriage return, or both."""
    return data.count(b"\n") + data.count(b"\r") - data.count(b"\r\n")


def has_codes(cells: Any) -> bool:
    """Return whether some cells of an Arrow array of text have zeros in front of digits: these are labels, no numbers.

    As numbers, ``00`` and ``0`` would be the same.
    """
    import pyarrow.compute

    compute: Any = pyarrow.compute  # its functions are made when it is imported, unseen by type checkers
    return compute.any(compute.match_substring_regex(cells, _CODE)).as_py() is True


def _are_whole(cells: Any) -> bool:
    import pyarrow.compute

    compute: Any = pyarrow.compute
    return compute.all(compute.match_substring_regex(cells, _WHOLE)).as_py() is not False


def _line(path: Path, start: int) -> int:
    """Return the line, from 1, that begins there."""
    line, last = 1, b""
    with path.open("rb") as file:
        while data := file.read(min(_BYTES, start - file.tell())):
            line += num_lines(last + data) - num_lines(last)
            last = data[-1:]
    return line


def _header(rows: bytes, delimiter: str) -> bytes:
    """Return the first row that is not empty, with what is before it."""
    ends = _ends(rows, delimiter)
    return rows[: next(iter(ends[ends > _num_blank(rows)]), None)]


def _num_blank(rows: bytes) -> int:
    """Return how many bytes a file has before its header."""
    return len(rows) - len(rows.removeprefix(_MARK).lstrip(b"\r\n"))


def _end_of_rows(block: bytes, delimiter: str) -> int:
    """Return where the last row that is there whole ends."""
    if _has_lone_returns(block):
        return int(max(_ends(block, delimiter)[-1:], default=0))
    quotes = _quotes(block, delimiter)
    end = block.rfind(b"\n") + 1
    while end and (before := np.searchsorted(quotes, end)) % 2:  # from within a value to where it begins
        end = block.rfind(b"\n", 0, int(quotes[before - 1])) + 1
    return end


def _has_lone_returns(block: bytes) -> bool:
    return block.count(b"\r") != block.count(b"\r\n")


def _ends(block: bytes, delimiter: str) -> np.ndarray:
    """Return where rows end: after each line's end outside quotes. What a carriage return at the end is, is unknown."""
    data = np.frombuffer(block, np.uint8)
    is_end = data == ord("\n")
    if _has_lone_returns(block):
        is_end[:-1] |= (data[:-1] == ord("\r")) & ~is_end[1:]
    ends = np.flatnonzero(is_end)
    return ends[np.searchsorted(_quotes(block, delimiter), ends) % 2 == 0] + 1


def _quotes(block: bytes, delimiter: str) -> np.ndarray:
    """Return where quotes open and close, in turns, of rows: at the beginning of a value only, elsewhere they are text.

    Where all are at such places, each quote is one; a doubled one within closes and opens.
    """
    if b'"' not in block:
        return np.zeros(0, int)
    data = np.frombuffer(block, np.uint8)
    quotes = np.flatnonzero(data == ord('"'))
    opening = quotes[::2][quotes[::2] != (len(_MARK) if block.startswith(_MARK) else 0)]
    begins = np.zeros(256, bool)
    begins[[*f'\n\r"{delimiter}'.encode()]] = True
    if begins[data[opening - 1]].all():
        return quotes
    begin = rb"(?:\A(?:%b)?|(?<=[\r\n%b]))" % (_MARK, re.escape(delimiter.encode()))
    values = re.finditer(begin + rb'("[^"]*(?:""[^"]*)*)("?)', block)
    return np.array([at for value in values for at in (value.start(1), value.start(2)) if at < len(block)], int)


class Csv:
    """Rows of CSV files, each with a header. The beginnings are read when it is made; rows are counted when asked for.

    Columns to predict from are numbers of double precision, whatever their first rows look like. Targets are, too, or
    text, if the first rows of a file are, or all are whole numbers and some are codes: :func:`has_codes`.
    """

    def __init__(
        self,
        folder: Path,
        target: str,
        columns: Sequence[str] | None,
        dtype: Any,
        delimiter: str,
        decimal: str,
    ) -> None:
        with needed(f"px.{_WHO}", "tables"):
            import pyarrow.csv  # noqa: F401

        self._delimiter, self._decimal = delimiter, decimal
        try:
            found = files.described(_WHO, folder, ".csv", target, columns, self._schema)
        except DataError as error:
            if self._decimal == "." and (write := self._with_commas(folder)):
                raise DataError(f"{error}; or, of decimal commas, {write}") from None
            raise
        self._files, self.columns, kinds = found
        self.target = target
        self._is_text = any(not files.is_number(own[target]) for own in kinds)
        self._kinds = [{name: str(kind) for name, kind in own.items()} for own in kinds]
        self._flags = {name for own in self._kinds for name, kind in own.items() if kind == "bool"}
        self.dtype = np.dtype(np.float64 if dtype is None else dtype)

    def _schema(self, path: Path) -> Any:
        import pyarrow.csv as csv

        with path.open("rb") as file:
            header = _header(file.read(_BYTES), self._delimiter).decode(errors="replace")
        if self._delimiter not in header and (other := next((mark for mark in ";\t|," if mark in header), None)):
            raise DataError(
                f"{_WHO}: {str(path)!r} has a single column if {self._delimiter!r} separates them; write "
                f"delimiter={other!r}"
            )
        convert = csv.ConvertOptions(decimal_point=self._decimal)
        with csv.open_csv(path, csv.ReadOptions(block_size=_BYTES), self._parse, convert) as reader:
            return reader.schema

    def _with_commas(self, folder: Path) -> str:
        """Return what to write if commas are the decimal points of columns that are text without."""
        path = files.found(_WHO, folder, ".csv")[0]
        try:
            plain, self._decimal = self._schema(path), ","
            with_commas = self._schema(path)
        except Exception:  # which is told already
            return ""
        finally:
            self._decimal = "."
        pairs = zip(with_commas, plain, strict=True)
        numbers = [one.name for one, other in pairs if files.is_number(one.type) and not files.is_number(other.type)]
        return f"as in {files.told(numbers)}, write decimal=','" if numbers else ""

    @property
    def _parse(self) -> Any:
        import pyarrow.csv as csv

        return csv.ParseOptions(delimiter=self._delimiter, newlines_in_values=True)

    def __len__(self) -> int:
        return self._starts[-1][0]

    @functools.cached_property
    def _starts(self) -> list[tuple[int, int, int]]:
        """The first row of each piece, the number of its file, and where it starts there; last, the end of all."""
        return list(self._counted())

    def _counted(self) -> Iterator[tuple[int, int, int]]:
        """Yield the same, having looked for codes among the targets."""
        count, are_whole, are_codes = 0, True, False
        for number, start, (y,) in self._read([self.target], as_text=True):
            are_whole = are_whole and _are_whole(y)
            are_codes = are_whole and (are_codes or has_codes(y))
            yield count, number, start
            count += len(y)
        self._is_text = self._is_text or are_codes
        yield count, len(self._files), 0

    @property
    def part(self) -> int:
        """The most rows of a piece, which is parsed as a whole."""
        return max((after - first for (first, *_), (after, *_) in itertools.pairwise(self._starts)), default=0)

    def blocks(self, size: int, start: int = 0) -> files.Parts:
        first, number, begin = self._starts[
            bisect.bisect_right(self._starts, start, hi=len(self._starts) - 1, key=operator.itemgetter(0)) - 1
        ]
        return files.in_blocks(self._rows(number, begin, start - first), size)

    def _rows(self, number: int, start: int, skipped: int) -> files.Parts:
        for _, _, columns in self._read([self.target, *self.columns], number, start, as_text=self._is_text):
            y, *found = (column.to_numpy()[skipped:] for column in columns)
            skipped = max(0, skipped - len(columns[0]))
            if self._is_text:
                y = y.astype(object)
                y[y == ""] = None
            yield files.as_rows(found, self.dtype), y

    def _read(
        self, names: Sequence[str], number: int = 0, start: int = 0, *, as_text: bool
    ) -> Iterator[tuple[int, int, list[Any]]]:
        """Yield pieces' files, starts and columns, from the one on that starts there in the file of this number."""
        import pyarrow as pa
        import pyarrow.csv as csv

        for at, file in enumerate(self._files[number:], number):
            types = {name: pa.bool_() if self._is_flag(name, at) else pa.float64() for name in names}
            if as_text:
                types[self.target] = pa.string()
            convert = csv.ConvertOptions(column_types=types, include_columns=names, decimal_point=self._decimal)
            with file.reading():
                for piece in pieces(file.path, self._delimiter, start):
                    data = piece.header + piece.rows
                    whole = csv.ReadOptions(block_size=max(_BYTES, len(data)))  # where a row may be longer than 1 MB
                    read = csv.read_csv(pa.BufferReader(data), whole, self._parse, convert)
                    yield at, piece.start, [read[name] for name in names]
            start = 0

    def _is_flag(self, name: str, number: int) -> bool:
        """Return whether a column holds truth values in the file of this number, as far as its beginning tells."""
        kind = self._kinds[number][name]
        return kind == "bool" or (kind == "null" and name in self._flags)

    def place(self, row: int) -> str:
        firsts: dict[int, int] = {}
        for first, number, _ in self._starts:
            if first > row:
                break
            firsts.setdefault(number, first)
        number, first = list(firsts.items())[-1]
        return f"{str(self._files[number].path)!r}, row {row - first}"

    def as_targets(self, y: np.ndarray) -> np.ndarray:
        """Return targets as integers, if all are, and floats tell them apart: what a file shows as 1 is no 1.0."""
        is_whole = y.dtype.kind == "f" and np.all(np.trunc(y) == y) and np.all(np.abs(y) < 2**53)
        return y.astype(np.int64) if is_whole else y
