"""A folder's files as one table: in the order of their names, unchanged for as long as they are read."""

import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paraxis._calls import arguments
from paraxis._calls.extras import needed
from paraxis.errors import DataError

_ALIGNED = 64
"""Bytes: where a device's block begins at a multiple of them, it is used where it is."""

_PANDAS_INDEX = re.compile(r"|__index_level_\d+__|Unnamed: 0")

_NUMBER = re.compile(r"\s*[+-]?[\d.,]*\d[.,]?([eE][+-]?\d+)?\s*")
_TILE = 1 << 20  # bytes of rows that are filled column by column, and stay in a cache meanwhile


class Described(NamedTuple):
    """The files of a folder, as known before their rows are read.

    Args:
        files: in order.
        columns: the names of those to predict from.
        kinds: the Arrow types of these, and of the target, in each file.
    """

    files: list["Unchanged"]
    columns: list[str]
    kinds: list[dict[str, Any]]


def described(
    who: str,
    folder: Path,
    suffix: str,
    target: str,
    columns: Sequence[str] | None,
    schema: Callable[[Path], Any],
) -> Described:
    """Look at the files of a folder, or at the one file that it is; ``schema`` gives a file's columns and types.

    Columns into which pandas wrote the names of rows are left out, unless they are asked for.

    Raises:
        DataError: if there are none, a file has other columns than the first, or columns hold no numbers.
    """
    paths = found(who, folder, suffix)
    files = [Unchanged.of(who, path) for path in paths]
    asked = None if columns is None else {*columns, target}
    kinds: list[dict[str, Any]] = []
    names_rows: set[str] | None = None
    for path in paths:
        with named(who, path):
            own = schema(path)
            _ = own.names  # Arrow decodes them now
        if names_rows is None:  # what the first file notes holds for all
            names_rows = {*row_names(own.names, own.metadata or {})} - {target}
        names = [name for name in own.names if (name not in names_rows if asked is None else name in asked)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            headless = suffix == ".csv" and no_header(twice, len(own.names))
            write = headless or "give each column a name of its own"
            raise DataError(f"{who}: {str(path)!r} has {told(twice)} twice; {write}")
        kinds.append({name: own.field(name).type for name in names})
        for argument, wanted in (("target", [target]), ("columns", list(columns or ()))):
            absent = [name for name in wanted if name not in kinds[-1]]
            if absent:
                near = [name for name in (arguments.nearest(one, own.names) for one in absent) if name is not None]
                headless = suffix == ".csv" and no_header(own.names, len(own.names))
                hint = f"; did you mean {told(near)}?" if near else f"; {headless}" if headless else ""
                raise DataError(
                    f"{who}: {argument} must be among the columns of {str(path)!r}, {told(own.names)}; got "
                    f"{told(absent)}{hint}"
                )
        _require_same(who, paths[0], list(kinds[0]), path, names)
    chosen = [name for name in (columns or kinds[0]) if name != target]
    if not chosen:
        index = f" and an index of pandas, {told(sorted(names_rows))}" if names_rows else ""
        write = f"write columns={sorted(names_rows)}" if names_rows else "give some to predict from"
        raise DataError(f"{who}: {str(paths[0])!r} has no column besides the target {target!r}{index}; {write}")
    _require_numbers(who, {name: kind for own in kinds for name, kind in own.items() if not is_number(kind)}, chosen)
    return Described(files, chosen, kinds)


def found(who: str, folder: Path, suffix: str) -> list[Path]:
    """Return the files of a folder with this suffix, be it in capitals, sorted by name; or the one file that it is.

    Raises:
        DataError: if there are none.
    """
    kind = kind_at(folder) if folder.exists() else None
    is_other = folder.is_file() and kind not in (None, suffix[1:])
    paths = [] if is_other else [folder] if folder.is_file() else sorted(_ending_in(folder, suffix))
    if not paths:
        got = "which is another" if is_other else "which has none" if folder.is_dir() else "which is not there"
        write = table_of(folder) if kind else f"px.{who}('rows/', …)"
        raise DataError(f"{who}: folder must have {suffix} files, or be one, got {str(folder)!r}, {got}; write {write}")
    return paths


def _ending_in(folder: Path, suffix: str) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.lower().endswith(suffix)] if folder.is_dir() else []


def row_names(names: Sequence[str], metadata: Mapping[bytes, bytes]) -> list[str]:
    """Return the columns into which pandas wrote an index, by their names, or by what it noted in a file's metadata.

    They name rows and say nothing of them; of sorted rows, they tell the target. An index that only counts rows is in
    no column of a Parquet file, and in one without a name of a CSV file.
    """
    try:
        noted = list(json.loads(metadata.get(b"pandas", b"{}"))["index_columns"])
    except (ValueError, KeyError, TypeError):
        noted = []
    return [name for name in names if _PANDAS_INDEX.fullmatch(name) or name in noted]


def _require_same(who: str, first: Path, names: list[str], path: Path, own: list[str]) -> None:
    lacks, has = [n for n in names if n not in own], [n for n in own if n not in names]
    if lacks or has:
        differ = [f"lacks {told(lacks)}"] * bool(lacks) + [f"has {told(has)} besides"] * bool(has)
        raise DataError(
            f"{who}: {str(path)!r} {' and '.join(differ)}, compared with {str(first)!r}; give all files the same "
            f"columns, or choose those that all have: columns=[…]"
        )


def _require_numbers(who: str, kinds: dict[str, Any], chosen: Sequence[str]) -> None:
    wrong = [name for name in chosen if name in kinds]
    if wrong:
        shown = ", ".join(f"{name!r} ({kinds[name]})" for name in wrong[:6]) + ", …" * (len(wrong) > 6)
        left = [name for name in chosen if name not in kinds]
        without = f"leave them out, columns=[{told(left)}], or " if left else ""
        raise DataError(
            f"{who}: columns must hold numbers, got {shown}; {without}write them into the files as numbers: a column "
            f"of 0 and 1 for each value"
        )


def table_of(source: Any) -> str:
    """Return the call that makes a table of the files at a path, as far as that is one and their suffixes tell."""
    place = Path(source) if isinstance(source, (str, Path)) else Path("rows")
    kind = kind_at(place) or "parquet"
    asked = "" if kind == "npy" else ", target='y'"
    return f"px.Table.{kind}({str(place)!r}{asked})"


def kind_at(place: Path) -> str | None:
    """Return the kind of the files at a path of which there is a table, if it can be looked at."""
    try:
        suffixes = {path.suffix.lower() for path in (place.iterdir() if place.is_dir() else [place])}
    except (OSError, ValueError):  # of a text that is no path, too
        return None
    return next((kind for kind in ("parquet", "csv", "npy") if f".{kind}" in suffixes), None)


def no_header(names: Sequence[str], num_columns: int) -> str:
    """Return what to write if the names of columns, or some of them, read as numbers, most of them; else nothing."""
    if 2 * sum(_NUMBER.fullmatch(name) is not None for name in names) <= len(names):
        return ""
    header = ",".join([*(f"x{number}" for number in range(1, min(num_columns, 6))), *["…"] * (num_columns > 6), "y"])
    return f"its first line reads as numbers: if the names of the columns are missing, write them before it, {header}"


def told(names: Sequence[str]) -> str:
    """Return some names for a message, not all of very many."""
    return ", ".join(map(repr, names[:6])) + ", …" * (len(names) > 6)


def is_number(kind: Any) -> bool:
    """Return whether an Arrow type is one of numbers."""
    with needed("px.Table", "tables"):
        import pyarrow.types as types

    return types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_null(kind)


@contextlib.contextmanager
def named(who: str, path: Path) -> Iterator[None]:
    """Within, an error of Arrow's, or of the system's, names the file."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{who}: {str(path)!r} cannot be read: {type(error).__name__}: {reason[:300]}") from error


@dataclasses.dataclass(frozen=True)
class Unchanged:
    """A file as it was when it was first looked at."""

    who: str
    path: Path
    size: int
    time: int

    @classmethod
    def of(cls, who: str, path: Path) -> "Unchanged":
        stat = path.stat()
        return cls(who, path, stat.st_size, stat.st_mtime_ns)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Within, the file is read: errors name it, and it is the same before and after."""
        self.require()
        with named(self.who, self.path):
            yield
        self.require()

    def require(self) -> None:
        """Check that it still is.

        Raises:
            DataError: naming the file, if it has changed, or is gone.
        """
        try:
            stat = self.path.stat()
        except OSError as error:
            raise DataError(f"{self.who}: {str(self.path)!r} is gone since it was looked at first: {error}") from error
        if (stat.st_size, stat.st_mtime_ns) != (self.size, self.time):
            raise DataError(
                f"{self.who}: {str(self.path)!r} has changed since it was looked at first, from {self.size:,} bytes "
                f"to {stat.st_size:,}; begin anew when the file is complete"
            )


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return memory that begins where devices may use it without a copy, on CPU."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    found = np.empty(size + _ALIGNED, np.uint8)
    start = -found.ctypes.data % _ALIGNED
    return found[start : start + size].view(dtype).reshape(shape)


def as_rows(columns: Sequence[np.ndarray], dtype: np.dtype[Any]) -> np.ndarray:
    """Return columns ``(n,)`` side by side, ``(n, d)`` with a row's values together."""
    size = len(columns[0])
    rows = empty((size, len(columns)), dtype)
    step = max(64, _TILE // max(1, rows.itemsize * len(columns)))
    for start in range(0, size, step):
        tile = rows[start : start + step]
        for at, column in enumerate(columns):
            tile[:, at] = column[start : start + step]
    return rows


Parts = Iterator[tuple[np.ndarray, np.ndarray]]


def in_blocks(parts: Parts, size: int) -> Parts:
    """Yield the rows of parts of any size in blocks of ``size``, the last one perhaps shorter."""
    held: list[tuple[np.ndarray, np.ndarray]] = []
    count = 0
    for X, y in parts:
        start = 0
        while count + len(X) - start >= size:
            stop = start + size - count
            yield _joined([*held, (X[start:stop], y[start:stop])])
            held, count, start = [], 0, stop
        if start < len(X):
            held.append((X[start:], y[start:]))
            count += len(X) - start
    if held:
        yield _joined(held)


def _joined(parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    if len(parts) == 1:
        return parts[0]
    X = empty((sum(len(X) for X, _ in parts), parts[0][0].shape[1]), parts[0][0].dtype)
    return np.concatenate([X for X, _ in parts], out=X), np.concatenate([y for _, y in parts])


def place(files: Sequence[Unchanged], sizes: Sequence[int], row: int) -> str:
    """Return where a row of all is, for messages."""
    for file, size in zip(files, sizes, strict=False):
        if row < size:
            return f"{str(file.path)!r}, row {row}"
        row -= size
    return f"row {row}"
