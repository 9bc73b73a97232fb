"""Records: JSON values that were written to a file, and are read back field by field against a table.

The table says what each field must be, and is made of the functions below::

    SHAPE = records.list_of(records.integer(0))
    LEAF = records.fields({"dtype": records.text()}, optional={"shape": SHAPE})

Whatever the bytes are, the outcome is a value of that form, or one error: ``Wrong``, which says which field is not.
"""

import json
import re
import reprlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paraxis._host import files

Check = Callable[[Any, str], None]
"""Raises ``Wrong`` if a value is not what it must be; the text says where the value stands."""

Described = Mapping[str, Sequence[Any] | Mapping[str, int]]
"""Things that a saved run depends on, by their names: texts and arrays, or numbers that an error tells."""

_LARGEST = 1 << 28  # bytes of a record
_LARGEST_INTEGER = 2**63 - 1


class Wrong(ValueError):  # noqa: N818  it says what a record is, and never leaves the library
    """A record that is not of the form that it must have."""


# --- what a field may be ----------------------------------------------------------------------------------------------


def anything(value: Any, where: str) -> None:
    """Accept any JSON value."""


def integer(least: int | None = None, most: int | None = _LARGEST_INTEGER) -> Check:
    """Accept integers within bounds; ``None``: there is no bound."""

    def check(value: Any, where: str) -> None:
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if not is_integer or (least is not None and value < least) or (most is not None and value > most):
            bounds = [f"at least {least}"] * (least is not None) + ["at most 2^63 - 1"] * (most == _LARGEST_INTEGER)
            bounds += [f"at most {most}"] * (most not in (None, _LARGEST_INTEGER))
            raise _wrong(value, where, " ".join(["an integer", *bounds[:1], *(f"and {one}" for one in bounds[1:])]))

    return check


def text(pattern: str | None = None) -> Check:
    """Accept texts, all of which match a pattern, if there is one."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, str) or (pattern is not None and re.fullmatch(pattern, value) is None):
            raise _wrong(value, where, "a text" if pattern is None else f"a text like {pattern}")

    return check


def list_of(check_item: Check, length: int | None = None) -> Check:
    """Accept lists of such items, of any length or of one."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, list) or (length is not None and len(value) != length):
            raise _wrong(value, where, "a list" if length is None else f"a list of {length}")
        for index, item in enumerate(value):
            check_item(item, f"{where}[{index}]")

    return check


def row(*checks: Check) -> Check:
    """Accept lists with one item for each check."""

    def check(value: Any, where: str) -> None:
        list_of(anything, len(checks))(value, where)
        for index, (check_item, item) in enumerate(zip(checks, value, strict=True)):
            check_item(item, f"{where}[{index}]")

    return check


def table_of(check_value: Check) -> Check:
    """Accept tables of such values, under any names."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise _wrong(value, where, "a table")
        for name, item in value.items():
            check_value(item, f"{where}[{name!r}]")

    return check


def fields(required: Mapping[str, Check], optional: Mapping[str, Check] | None = None, *, more: bool = False) -> Check:
    """Accept tables that have all of the required fields, and perhaps some of the optional ones.

    Others, of any value, only if there may be more.
    """
    known = {**required, **(optional or {})}

    def check(value: Any, where: str) -> None:
        table_of(anything)(value, where)
        missing, extra = [name for name in required if name not in value], [name for name in value if name not in known]
        if missing:
            raise Wrong(f"{where or 'the record'} has no field {missing[0]!r}")
        if extra and not more:
            raise Wrong(f"{where or 'the record'} has a field {reprlib.repr(extra[0])}, which is not known")
        for name, item in value.items():
            known.get(name, anything)(item, f"{where}.{name}" if where else name)

    return check


def _wrong(value: Any, where: str, expected: str) -> Wrong:
    return Wrong(f"{where or 'the record'} is {reprlib.repr(value)}, not {expected}")


# --- read and written -------------------------------------------------------------------------------------------------


def read(data: bytes, check: Check) -> Any:
    """Return a record from its bytes.

    Raises:
        Wrong: if they are not JSON, name a field twice, or are not what the check accepts.
    """
    try:
        value = json.loads(data.decode(), object_pairs_hook=_each_once)
    except Wrong:
        raise
    except RecursionError:
        raise Wrong("the record is nested too deeply") from None
    except ValueError as error:
        raise Wrong(f"the record cannot be read: {str(error)[:200]}") from None
    check(value, "")
    return value


def wrapped(version: int, record: Mapping[str, Any]) -> bytes:
    """Return a record with its checksum and the number of its format, as files have it."""
    text = json.dumps(record)
    return json.dumps({"format": version, "crc32": zlib.crc32(text.encode()), "record": text}).encode()


_WRAPPED = fields({"format": integer(1), "crc32": integer(0, 2**32 - 1), "record": text()})


def read_file(path: Path, version: int, check: Check, *, former: Mapping[int, Check] | None = None) -> Any:
    """Return a record as :func:`wrapped` made it, in this format or a former one. Links are not followed.

    Raises:
        Wrong: if it is not what was written.
        OSError: if there is none, or it may not be read.
    """
    found = read(files.contents(path, _LARGEST), _WRAPPED)
    known = {version: check, **(former or {})}
    if found["format"] not in known:
        newer = "; a newer Paraxis wrote it" if found["format"] > version else ""
        raise Wrong(f"it is of format {found['format']}, not {version}{newer}")
    data = found["record"].encode(errors="surrogatepass")
    if zlib.crc32(data) != found["crc32"]:
        raise Wrong("its checksum does not match")
    return read(data, known[found["format"]])


def _each_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise Wrong(f"the record names {reprlib.repr(twice)} twice")
    return found
