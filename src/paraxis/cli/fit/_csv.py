"""CSV as it is: each cell is text first, and a column is numbers only if all of its cells are.

Nothing is guessed: what has two readings (a decimal comma, an encoding, an open quote) is refused with its line, and
with the options that would settle it.
"""

import csv
import dataclasses
import functools
import io
import itertools
import re
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv as arrow_csv

from paraxis._tables import has_codes
from paraxis.cli._errors import Remedy
from paraxis.cli.fit._options import CsvForm
from paraxis.cli.fit._settling import shell_word
from paraxis.cli.fit._values import MARKS, Column, of_arrow

pc: Any = pyarrow.compute  # its functions are made when it is imported, unseen by type checkers

_BYTE_ORDER_MARKS = (
    (b"\xef\xbb\xbf", "utf-8-sig"),
    (b"\xff\xfe\x00\x00", "utf-32"),
    (b"\x00\x00\xfe\xff", "utf-32"),
    (b"\xff\xfe", "utf-16"),
    (b"\xfe\xff", "utf-16"),
)
_TRUTHS = {"true", "True", "TRUE", "false", "False", "FALSE"}
# Of digits and separators, but no number: with a comma for the point, or with thousands set apart.
_FOREIGN = re.compile(r"[+-]?(\d*[.,]\d+([eE][+-]?\d+)?|\d{1,3}([.,'\u00a0\u202f ]\d{3})+([.,]\d+)?)")
# Digits in threes: a comma may be the decimal point there, or set thousands apart, of which there is one at least.
_TWO_READINGS = re.compile(r"[+-]?[1-9]\d{0,2}([.,'\u00a0\u202f ]\d{3})+")
_SEPARATORS = ",.'\u00a0\u202f "  # between thousands
_TOO_LARGE = 2**63
_HEAD = 2**16  # characters, in which a header is looked for first
_CODES, _BEYOND = "digits with zeros in front", "integers of more than 64 bits"
DIGITS = (_CODES, _BEYOND)
"""Descriptions of columns of text that consist of digits only."""
_DELIMITERS = {",": "','", ";": "';'", "\t": "tab", "|": "'|'"}
_UNREADABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


class NoReadingError(ValueError):
    """A file that has no one reading.

    Attributes:
        remedies: options with which it has one.
        certain: whether there is no doubt about them.
    """

    def __init__(self, message: str, remedies: Sequence[Remedy] = (), *, certain: bool = True) -> None:
        super().__init__(message)
        self.remedies, self.certain = remedies, certain


class Csv(NamedTuple):
    """The columns of a file, the numbers of its rows in it, from 0, what to tell of how it was read, and its length.

    That is the number of rows with those that are left out.
    """

    columns: list[Column]
    numbers: np.ndarray
    notes: tuple[str, ...]
    length: int


def read_csv(path: Path, form: CsvForm, as_text: Container[str]) -> Csv:
    """Read a file.

    Args:
        path: the file.
        form: how it is written.
        as_text: columns that are text whatever is in them.

    Raises:
        NoReadingError: if it has no one reading; says where.
    """
    return read_bytes(path.read_bytes(), form, as_text)


def read_bytes(data: bytes, form: CsvForm, as_text: Container[str]) -> Csv:
    """Read the same of what is in a file."""
    text = _decoded(data, form)
    names = _names(text if text.find("\n", 0, _HEAD) < 0 else text[:_HEAD], form)
    numbers, notes, length = None, (), None
    try:
        table = _cells(text, names, form)
    except pa.ArrowInvalid:
        even = _even_rows(len(names), text, form)
        if even is None:
            raise
        text_of_even, numbers, notes, length = even
        table = _cells(text_of_even, names, form)
    if text.count('"') % 2 or any("\n" in (column[-1].as_py() if len(column) else "") for column in table.columns):
        _require_closed(text, form)
    numbers = np.arange(table.num_rows) if numbers is None else numbers
    length = table.num_rows if length is None else length
    names = numbered(table.schema.names) if form.same_names == "number" else table.schema.names

    def line(row: int) -> int:
        return line_of(text, form, int(numbers[row]))

    columns, refused = [], []
    for name, cells in zip(names, table.columns, strict=True):
        is_text = name in as_text
        try:
            columns.append(_column(name, cells, form, is_text, line))
        except NoReadingError as error:
            refused.append(error)
    if refused:  # one that leaves no doubt tells how to read the others
        raise next((error for error in refused if error.certain), refused[0])
    return Csv(columns, numbers, notes, length)


def require_bytewise(beginning: bytes, form: CsvForm) -> None:
    """Check that a byte for a line's end, or a quote, is one and nothing else, so that a file can be cut there.

    Raises:
        NoReadingError: if not.
    """
    encoding = form.encoding or _marked(beginning) or "utf-8"
    if encoding != "utf-8-sig" and '\n"'.encode(encoding) != b'\n"':
        raise NoReadingError(
            f"it is in {encoding.upper()}, of which parts are not read; write it in UTF-8: iconv -f {encoding} -t utf-8"
        )


def require_closed(data: bytes, form: CsvForm) -> None:
    """Check that each quote is closed where a value ends, in a file or some of its rows.

    Raises:
        NoReadingError: if one is not.
    """
    _require_closed(_decoded(data, form), form)


def numbered(names: Sequence[str]) -> list[str]:
    """Return names of which no two are the same: the second x is x.2, or the next that is free."""
    taken, found = set(names), []
    for index, name in enumerate(names):
        new, count = name, itertools.count(2)
        if name in names[:index]:
            new = next(one for one in (f"{name}.{number}" for number in count) if one not in taken)
            taken.add(new)
        found.append(new)
    return found


def require_delimiter(path: Path, form: CsvForm, names: Sequence[str]) -> None:
    """Check that columns that are not there are not there with another delimiter either.

    Raises:
        NoReadingError: if they are.
    """
    text = _beginning(path, form)
    for mark in _DELIMITERS:
        _, header = next(_records(text, dataclasses.replace(form, delimiter=mark)), (1, []))
        if set(names) <= set(header):
            _refuse_delimiter(mark)


def _beginning(path: Path, form: CsvForm) -> str:
    with path.open("rb") as file:
        data = file.read(_HEAD)
    encoding = form.encoding or _marked(data) or "utf-8"
    return data.decode(encoding, "ignore")


def line_of(text: str | Path, form: CsvForm, row: int) -> int:
    """Return the line in the file, from 1, in which a row, from 0, begins."""
    if isinstance(text, Path):
        with text.open("rb") as file:
            encoding = form.encoding or _marked(file.read(4)) or "utf-8"
        with text.open(encoding=encoding, errors="replace", newline="") as file:
            return _line_of(file, form, row)
    return _line_of(io.StringIO(text, newline=""), form, row)


def _line_of(file: TextIO, form: CsvForm, row: int) -> int:
    records = itertools.islice(_records(file, form), row + 1, None)
    return next((line for line, _ in records), 0)


def _marked(beginning: bytes) -> str | None:
    return next((encoding for mark, encoding in _BYTE_ORDER_MARKS if beginning.startswith(mark)), None)


def _decoded(data: bytes, form: CsvForm) -> str:
    marked = _marked(data)
    encoding = form.encoding or marked or "utf-8"
    if encoding.startswith("utf-8"):
        _require_text(data, data[: data.find(b"\0")].decode(encoding, "replace") if b"\0" in data else None)
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        line = _line(data[: error.start].decode(encoding, "replace"))
        written = f"line {line} is not in {encoding.upper().removesuffix('-SIG')} ({error.reason})"
        other = None if marked and not form.encoding else _other_encoding(data, "utf-8", "latin-1", "cp1252")
        if other is None:
            raise NoReadingError(f"{written}; write --encoding with the one that it is in") from None
        message = f"{written}; write --encoding {other}, or whichever it is in"
        raise NoReadingError(message, [{"encoding": other}]) from None
    _require_text(data, text[: text.index("\0")] if "\0" in text else None)
    return text.removeprefix("\ufeff")


def _require_text(data: bytes, before_zero: str | None) -> None:
    if before_zero is None:
        return
    other = _other_encoding(data, "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be")
    found = f"line {_line(before_zero)} holds a character of number 0, so it is"
    if other is None:
        raise NoReadingError(f"{found} no text")
    message = f"{found} no text, or in another encoding; if it is {other[:6].upper()} without a mark, write --encoding"
    raise NoReadingError(f"{message} {other}", [{"encoding": other}])


def _other_encoding(data: bytes, *encodings: str) -> str | None:
    """Return the one in which it is most of all a text: of letters, and not of unusual ones."""
    found = {}
    for encoding in encodings:
        try:
            text = data.decode(encoding)
        except UnicodeDecodeError:
            continue
        if not _UNREADABLE.search(text):
            found[encoding] = sum(map(str.isascii, text)) / max(1, len(text))
    return max(found, key=lambda encoding: found[encoding]) if found else None


def _line(before: str) -> int:
    return before.replace("\r\n", "\n").replace("\r", "\n").count("\n") + 1


def _names(text: str, form: CsvForm) -> list[str]:
    _, names = next(_records(text, form), (1, []))
    if len(names) == 1 and (other := _other_delimiter(text, form)):
        _refuse_delimiter(other)
    return names


def _other_delimiter(text: str, form: CsvForm) -> str | None:
    """Return the one that gives most columns, and each row as many values if there is such a one."""
    found = {}
    for mark in _DELIMITERS.keys() - {form.delimiter}:
        try:
            rows = itertools.islice(_records(text, dataclasses.replace(form, delimiter=mark)), 9)
            sizes = [len(cells) for _, cells in rows]
        except ValueError:
            continue
        if sizes and sizes[0] > 1:
            found[mark] = (len(set(sizes)) == 1, sizes[0], mark)
    return max(found, key=lambda mark: found[mark]) if found else None


def _refuse_delimiter(other: str) -> None:
    message = f"its columns are separated by {other!r}; write --delimiter {_DELIMITERS[other]}"
    raise NoReadingError(message, [{"delimiter": other}])


def _records(text: str | TextIO, form: CsvForm, *, strict: bool = False) -> Iterator[tuple[int, list[str]]]:
    """Yield the line in which each record begins, and its cells; lines that are empty are no records.

    Raises:
        ValueError: if a quote is not closed; ``strict``: also if text follows one that is.
    """
    file = io.StringIO(text, newline="") if isinstance(text, str) else text
    reader = csv.reader(file, delimiter=form.delimiter, strict=strict)
    begins = 1
    try:
        for cells in reader:
            if cells:
                yield begins, cells
            begins = reader.line_num + 1
    except csv.Error as error:
        raise NoReadingError(
            f'line {begins} opens a quote that is not closed ({error}); write a quote within a value as ""'
        ) from None


def _cells(text: str, names: Sequence[str], form: CsvForm) -> pa.Table:
    return arrow_csv.read_csv(
        pa.BufferReader(text.encode()),
        parse_options=arrow_csv.ParseOptions(delimiter=form.delimiter, newlines_in_values=True),
        convert_options=arrow_csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string())),
    )


def _even_rows(size: int, text: str, form: CsvForm) -> tuple[str, np.ndarray, tuple[str, ...], int] | None:
    """Return the text without rows of another length, the numbers of its rows, what to tell, and how many rows it had.

    ``None`` if there are no such rows.

    Raises:
        NoReadingError: if they are not to be dropped.
    """
    _require_closed(text, form)
    records = list(_records(text, form))
    rows = records[1:]
    uneven = [(line, len(cells)) for line, cells in rows if len(cells) != size]
    if not uneven:
        return None
    if (other := _only_delimiter(text, form)) is not None:
        _refuse_delimiter(other)
    (line, length), *others = uneven
    has = f"line {line} has {length} value{'s' * (length != 1)}, but there are {size} columns"
    more = f", and {len(others):,} more row{'s' * (len(others) > 1)} of another length" if others else ""
    if form.uneven_rows != "drop":
        some_are_even = len(uneven) < len(rows)
        advice = f"put quotes around a value with {form.delimiter!r} in it"
        if some_are_even:
            advice += ", or write --uneven-rows drop to leave such rows out"
        raise NoReadingError(f"{has}{more}; {advice}", [{"uneven_rows": "drop"}] * some_are_even)
    kept = io.StringIO(newline="")
    writer = csv.writer(kept, delimiter=form.delimiter, lineterminator="\n")
    writer.writerows(cells for _, cells in records if len(cells) == size)
    numbers = np.array([number for number, (_, cells) in enumerate(rows) if len(cells) == size], int)
    told = f"{len(uneven):,} row{'s' * (len(uneven) > 1)} of another length left out: {has}{more}"
    return kept.getvalue(), numbers, (told,), len(rows)


def _only_delimiter(text: str, form: CsvForm) -> str | None:
    """Return a delimiter that gives all rows the same number of values, more than one, if there is such a one."""
    other = _other_delimiter(text, form)
    if other is None:
        return None
    sizes = {len(cells) for _, cells in _records(text, dataclasses.replace(form, delimiter=other))}
    return other if len(sizes) == 1 else None


def _require_closed(text: str, form: CsvForm) -> None:
    for _ in _records(text, form, strict=True):
        pass


def _column(name: str, cells: pa.ChunkedArray, form: CsvForm, is_text: bool, line: Callable[[int], int]) -> Column:
    if is_text:
        return of_arrow(name, _without(cells, form.na_values), "text")
    plain = _plain(cells) if form.decimal == "." and not form.na_values else None
    if plain is not None:
        return of_arrow(name, plain)
    encoded = cells.dictionary_encode().unify_dictionaries().combine_chunks()
    places = encoded.indices
    found = _of_distinct(name, encoded.dictionary, form, lambda cell: line(pc.index(places, cell).as_py()))
    return of_arrow(name, found.values.take(places), found.stored, found.marks)


def _without(cells: Any, words: Sequence[str]) -> Any:
    """Return the cells with nothing in place of those that are empty or one of the words, be it between blanks."""
    absent = pc.or_(pc.equal(cells, ""), pc.is_in(pc.utf8_trim_whitespace(cells), pa.array(words, pa.string())))
    return pc.if_else(absent, pa.scalar(None, pa.string()), cells)


def _plain(cells: pa.ChunkedArray) -> pa.ChunkedArray | None:
    """Return the numbers that all cells are, if they are written as is usual; a short cut for large files."""
    try:
        found = cells.cast(pa.int64())
        return None if pc.any(pc.match_substring_regex(cells, "^[+-]?0[0-9xX]")).as_py() else found
    except pa.ArrowInvalid:
        pass
    try:
        found = cells.cast(pa.float64())
    except pa.ArrowInvalid:
        return None
    whole = pc.equal(found, pc.floor(found))
    if pc.all(whole).as_py() or pc.any(pc.is_nan(found)).as_py():
        return None
    return None if pc.any(whole).as_py() and has_codes(cells) else found


class _Found(NamedTuple):
    """The kind of a column's distinct cells, its name, and which of them stand for nothing."""

    values: pa.Array
    stored: str = ""
    marks: tuple[str, ...] = ()


def _of_distinct(name: str, cells: pa.Array, form: CsvForm, line: Callable[[int], int]) -> _Found:
    text = _without(cells, form.na_values)
    bare = pc.utf8_trim_whitespace(text)
    absent = pc.is_in(bare, pa.array(["", *sorted(MARKS)]))
    there = pc.if_else(absent, pa.scalar(None, pa.string()), bare)
    marks = tuple(sorted(set(pc.unique(bare.filter(absent)).to_pylist()) - {"", None}))
    if there.null_count == len(there):
        return _Found(pa.nulls(len(there)), "nothing", marks)
    for cells in (there, *_stripped(there, form)):
        if has_codes(cells):
            continue
        for dtype in (pa.int64(), pa.uint64(), pa.float64()):
            found = _cast(cells, dtype, form)
            if found is not None:
                return _Found(found, marks=marks)
    return _other(name, text, there, form, marks, line)


def _stripped(cells: pa.Array, form: CsvForm) -> Iterator[pa.Array]:
    """Yield the cells without the words that are no part of numbers, if there are any.

    A unit is left out if all numbers have it: 34% beside 0.34 is another number.
    """
    for word in form.strip:
        has = pc.match_substring(cells, word)
        alike = pc.all(has)
        if word in _SEPARATORS:  # 1,5 is no 15
            alike = pc.all(pc.match_substring_regex(cells.filter(has), _in_threes(word)))
        cells = pc.utf8_trim_whitespace(pc.replace_substring(cells, word, "" if alike.as_py() else word))
    if form.strip:
        yield cells


def _in_threes(separator: str) -> str:
    """Return the pattern of digits that a separator sets apart in threes, with what is not digits around.

    No thousands begin with a zero.
    """
    mark = re.escape(separator)
    return rf"^[^0-9{mark}]*[1-9][0-9]{{0,2}}({mark}[0-9]{{3}})+([^0-9{mark}][^{mark}]*)?$"


def _cast(cells: pa.Array, dtype: pa.DataType, form: CsvForm) -> pa.Array | None:
    """Return the numbers that all cells are, or ``None``."""
    whole = pa.types.is_integer(dtype)
    if whole and pc.any(pc.match_substring_regex(cells, "^[+-]?0[xX]")).as_py():
        return None  # Arrow reads hexadecimal
    if form.decimal != "." and not whole:
        if pc.any(pc.match_substring(cells, ".")).as_py():
            return None
        cells = pc.replace_substring(cells, form.decimal, ".")
    try:
        found = pc.replace_substring_regex(cells, r"^\+([0-9.])", r"\1").cast(dtype)
    except pa.ArrowInvalid:
        return None
    if whole:
        return found
    beyond = pc.any(pc.greater_equal(pc.abs(found), float(_TOO_LARGE))).as_py()
    if beyond and pc.all(pc.match_substring_regex(cells, "^[+-]?[0-9]+$")).as_py():
        return None  # integers that a float would round
    # What Arrow takes for NaN beside the marks, such as nan(1), is no number.
    return None if pc.any(pc.is_nan(found)).as_py() else found


def _other(
    name: str, text: pa.Array, there: pa.Array, form: CsvForm, marks: tuple[str, ...], line: Callable[[int], int]
) -> _Found:
    """Truth values, dates, or text."""
    found = there.drop_null().to_pylist()
    if _TRUTHS.issuperset(found):
        return _Found(pc.equal(pc.utf8_lower(there), "true"), marks=marks)
    for dtype in (pa.date32(), pa.timestamp("ns")):
        try:
            return _Found(there.cast(dtype))
        except pa.ArrowInvalid:
            continue
    bare = next(_stripped(there, form), there)
    if error := _foreign(bare.drop_null().to_pylist(), form, name, lambda cell: line(pc.index(bare, cell).as_py())):
        raise error
    digits = all(re.fullmatch("[+-]?[0-9]+", cell) for cell in found)
    codes = has_codes(there)
    return _Found(text, (_CODES if codes else _BEYOND) if digits else "text")


def _foreign(cells: list[str], form: CsvForm, name: str, line: Callable[[str], int]) -> NoReadingError | None:
    """Return the error of a column of numbers with another decimal point, or thousands set apart, if it is one."""
    foreign = [cell for cell in cells if _FOREIGN.fullmatch(cell) and not is_number(cell, form.decimal)]
    if not foreign or not all(_FOREIGN.fullmatch(cell) or is_number(cell, form.decimal) for cell in cells):
        return None
    where = f"line {line(foreign[0])}, column {name!r}"
    other = {".": ",", ",": "."}[form.decimal]
    readable = all(is_number(cell, other) for cell in cells)
    advice = "numbers must not have separators between thousands"
    decimal, mark = next(_apart_by(cells, (form.decimal, other)), ("", ""))
    if mark:
        comma = f" --decimal {decimal}" * (decimal != form.decimal)
        advice = f"write --strip {shell_word(mark)}{comma} if {mark!r} sets thousands apart"
    both = next((cell for cell in cells if form.decimal in cell and is_number(cell, form.decimal)), None)
    if both is not None and not readable and not mark:
        advice = f"others are, such as {both!r}: write all with one decimal point"
    elif all(is_number(cell, ".") or is_number(cell, ",") for cell in cells):
        advice = advice.replace("write", "or write", 1)
        change = {
            ".": "write --decimal ',' if a comma is the decimal point",
            ",": "write --decimal . if a point is the decimal point",
        }
        advice = f"{change[form.decimal]}; {advice}"
    certain = not all(_TWO_READINGS.fullmatch(cell) for cell in foreign) if readable else bool(mark)
    apart: Remedy = {"strip": [mark]} if decimal == form.decimal else {"decimal": decimal, "strip": [mark]}
    point: Remedy = {"strip": lambda old: tuple(word for word in old if other not in word), "decimal": other}
    return NoReadingError(
        f"{where}: {foreign[0]!r} is no number with the decimal point {form.decimal!r}; {advice}",
        [point if readable else apart] * certain + [{"ignore": [name]}],
        certain=certain,
    )


def _apart_by(cells: Sequence[str], decimals: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each decimal point and separator of thousands by which all cells are numbers."""
    for decimal, mark in itertools.product(decimals, _SEPARATORS):
        pattern = re.compile(_in_threes(mark))
        plain = (cell.replace(mark, "") if pattern.match(cell) else cell for cell in cells)
        if mark != decimal and any(mark in cell for cell in cells) and all(is_number(cell, decimal) for cell in plain):
            yield decimal, mark


def is_number(cell: str, decimal: str = ".") -> bool:
    """Return whether a cell is a number by itself."""
    return _number(decimal).fullmatch(cell.strip()) is not None


@functools.cache
def _number(decimal: str) -> re.Pattern[str]:
    mark = re.escape(decimal)
    return re.compile(rf"[+-]?(\d+{mark}?\d*|{mark}\d+)([eE][+-]?\d+)?")
