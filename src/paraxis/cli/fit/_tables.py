"""Files as columns with names. CSV and Parquet are read by Arrow, NPZ by NumPy, without pickles."""

import contextlib
import dataclasses
import difflib
import hashlib
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv as arrow_csv
import pyarrow.parquet as arrow_parquet

from paraxis._host import files
from paraxis._tables import no_header, row_names
from paraxis.cli._errors import CommandError
from paraxis.cli.fit._csv import NoReadingError, line_of, numbered, read_csv, require_delimiter
from paraxis.cli.fit._options import CsvForm
from paraxis.cli.fit._values import Column, of_arrow, of_numpy

pc: Any = pyarrow.compute  # its functions are made when it is imported, unseen by type checkers

SUFFIXES = (".csv", ".parquet", ".npz")
IN_PARTS = (".csv", ".parquet", ".npy")
"""Suffixes of the files of a folder, which are read a part at a time."""

_NAMED = 6  # a message names no more columns than that
_QUOTED = r'[",\r\n]'  # in text; by "needed", Arrow quotes all text


@dataclasses.dataclass(frozen=True)
class Table:
    """The columns of a file, all ``(num_rows,)``, by their names in order.

    Args:
        path: the file.
        numbers: of the rows in the file, from 0, ``(num_rows,)``.
        columns: all of them.
        index: those that name rows, and so say nothing about them.
        form: how it is written, if it is CSV.
        notes: what to tell of how it was read.
        before: of a part of several files, how many rows come before the first of this file.
    """

    path: Path
    numbers: np.ndarray
    columns: dict[str, Column]
    index: tuple[str, ...]
    form: CsvForm
    notes: tuple[str, ...] = ()
    before: int = 0

    @property
    def num_rows(self) -> int:
        return len(self.numbers)

    @property
    def is_csv(self) -> bool:
        return self.path.suffix.lower() == ".csv"

    def rows(self, chosen: np.ndarray) -> "Table":
        """Return some of the rows, by a mask or by their numbers."""
        columns = {name: column.rows(chosen) for name, column in self.columns.items()}
        return dataclasses.replace(self, numbers=self.numbers[chosen], columns=columns)

    def place(self, row: int) -> str:
        """Return where a row is in the file, for people."""
        number = int(self.numbers[row]) - self.before
        return f"line {line_of(self.path, self.form, number)}" if self.is_csv else f"row {number}"

    def required(self, names: Sequence[str], what: str, option: str = "") -> None:
        """Check that there are columns of these names, which an option gave.

        Raises:
            CommandError: naming those that are missing, what is there, and what is nearly the same.
        """
        absent = [name for name in names if name not in self.columns]
        if not absent:
            return
        if self.is_csv:
            with reading(self.path):
                require_delimiter(self.path, self.form, names)
        close = {name: _nearest(name, [*self.columns]) for name in absent}
        meant = [f"{match[0]!r}" for match in close.values() if match]
        hint = f"; did you mean {', '.join(meant[:_NAMED])}?" if meant else ""

        def mended(given: str | Sequence[str] | None) -> Any:
            if isinstance(given, str):
                return next(iter(close[given]), given)
            renamed = [new for name in given or () for new in close.get(name, [name])]
            return tuple(dict.fromkeys(renamed))

        several = what.replace("column", "columns", 1) if len(absent) > 1 else what
        if (
            self.is_csv
            and option == "target"
            and not hint
            and (headless := no_header([*self.columns], len(self.columns)))
        ):
            hint = f"; {headless}"
        raise CommandError(
            f"{self.path} has no {several} {quoted(absent)}; its columns are {quoted(self.columns)}{hint}",
            remedies=[{option: mended}] * bool(option),
            aside={option: None} if option == "weights" else None,
        )


def _nearest(name: str, names: Sequence[str]) -> list[str]:
    """Return the name that was meant, if one is like it."""
    same = [other for other in names if other.strip().casefold() == name.strip().casefold()]
    return same[:1] or difflib.get_close_matches(name, names, n=1)


def read_table(path: Path, form: CsvForm, *, as_text: Container[str] = ()) -> Table:
    """Read a file.

    Args:
        path: its suffix tells its kind.
        form: how it is written, if it is CSV.
        as_text: columns of a CSV file that are text even where all of it are digits.

    Raises:
        CommandError: if it cannot be read, or holds no rows.
    """
    kind = path.suffix.lower()
    if path.is_dir() and any(file.suffix in IN_PARTS for file in path.iterdir()):
        raise CommandError(
            f"{path} is a folder, whose files are read a part at a time; write --stream",
            remedies=[{"stream": lambda old: True if old is False else "2GB"}],
        )
    if kind not in SUFFIXES:
        raise CommandError(
            f"{path}: cannot tell what it is from its suffix {path.suffix!r}; it must be one of "
            f"{', '.join(SUFFIXES)}; call a text file .csv, and write --delimiter tab if tabs separate its values"
        )
    if kind != ".csv":
        require_no_form(path, form)
    index: tuple[str, ...] = ()
    numbers, notes = None, ()
    with reading(path):
        if kind == ".csv":
            columns, numbers, notes, _ = read_csv(path, form, as_text)
        elif kind == ".parquet":
            columns, index = _read_parquet(path)
        else:
            columns = _read_npz(path)
    found = assembled(path, form, columns, index, numbers, notes)
    if not found.num_rows:
        raise CommandError(f"{path} is empty: it holds no rows")
    return found


def assembled(
    path: Path,
    form: CsvForm,
    columns: list[Column],
    index: tuple[str, ...],
    numbers: np.ndarray | None,
    notes: tuple[str, ...],
) -> Table:
    """Return columns that were read as a table.

    Raises:
        CommandError: if several have the same name.
    """
    if form.same_names == "number":
        names = numbered([column.name for column in columns])  # of CSV they are by now
        columns = [dataclasses.replace(column, name=name) for column, name in zip(columns, names, strict=True)]
    names = [column.name for column in columns]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice and path.suffix.lower() == ".csv" and (headless := no_header(twice, len(names))):
        raise CommandError(f"{path} has several columns named {quoted(twice)}; {headless}")
    if twice:
        raise CommandError(
            f"{path} has several columns named {quoted(twice)}; give each a name of its own, or write --same-names "
            f"number to call them {twice[0]!r}, {numbered([twice[0]] * 2)[1]!r} and so on",
            remedies=[{"same_names": "number"}],
        )
    num_rows = len(columns[0].values) if columns else 0
    # Without a name or with one that pandas makes: an index that was written with the columns. A second one without a
    # name was numbered by its place.
    by_place = [name for place, name in enumerate(names) if name == f".{place}" and "" in names]
    index += tuple(name for name in [*row_names(names, {}), *by_place] if name not in index)
    numbers = np.arange(num_rows) if numbers is None else numbers
    return Table(path, numbers, {column.name: column for column in columns}, index, form, notes)


def require_no_form(path: Path, form: CsvForm) -> None:
    """Check that nothing is said of how a file is written that is no CSV.

    Raises:
        CommandError: if it is.
    """
    usual = dataclasses.replace(CsvForm(), same_names=form.same_names)
    if form != usual:
        fields = {field.name: lambda _, name=field.name: getattr(usual, name) for field in dataclasses.fields(form)}
        raise CommandError(
            f"{path} is no CSV file; leave out --encoding, --delimiter, --decimal, --na-values, --strip and "
            f"--uneven-rows",
            remedies=[fields],
        )


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Around what reads a file: tell of it in its name."""
    try:
        yield
    except files.ABSENT as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}") from None
    except (pa.ArrowException, ValueError, OSError) as error:
        reason = " ".join(str(error).split())
        remedies = error.remedies if isinstance(error, NoReadingError) else ()
        kind = path.suffix[1:].upper()
        raise CommandError(f"{path} cannot be read as {kind}: {reason[:300]}", remedies=remedies) from None


def digest_of(path: Path) -> str:
    """By which a file is known again; or a folder, by the files in it."""
    if path.is_dir():
        files_of = sorted(file for file in path.iterdir() if file.is_file())
        return hashlib.sha256("".join(file.name + digest_of(file) for file in files_of).encode()).hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Writer:
    """Columns written to a file as CSV or Parquet, some rows after the other.

    Args:
        file: open, for bytes.
        suffix: ``.csv`` or ``.parquet``.
    """

    def __init__(self, file: Any, suffix: str) -> None:
        self._file, self._is_csv = file, suffix == ".csv"
        self._parquet: arrow_parquet.ParquetWriter | None = None
        self._is_begun = False

    def write(self, columns: dict[str, Column | np.ndarray]) -> None:
        """Write rows.

        Raises:
            CommandError: if a Parquet file's column has another type than before.
        """
        arrays = {
            name: pa.array(kept.values, mask=kept.missing) if isinstance(kept, Column) else pa.array(kept)
            for name, kept in columns.items()
        }
        table = pa.table(arrays)
        if self._is_csv:
            if not self._is_begun:
                arrow_csv.write_csv(table.slice(0, 0), self._file)
                self._is_begun = True
            texts = [array for array in table.columns if array.type == pa.string()]
            quoting = (
                "needed" if any(pc.any(pc.match_substring_regex(text, _QUOTED)).as_py() for text in texts) else "none"
            )
            options = arrow_csv.WriteOptions(include_header=False, quoting_style=quoting)
            arrow_csv.write_csv(table, self._file, options)
            return
        if self._parquet is None:
            self._parquet = arrow_parquet.ParquetWriter(self._file, table.schema)
        try:
            self._parquet.write_table(table.cast(self._parquet.schema))
        except (pa.ArrowInvalid, ValueError):
            other = [field.name for field in table.schema if not field.equals(self._parquet.schema.field(field.name))]
            raise CommandError(
                f"column {quoted(other)} is of one type in some rows and of another in others, which a Parquet file "
                f"cannot hold; write --out with a name that ends in .csv"
            ) from None

    def close(self) -> None:
        """End the file."""
        if self._parquet is not None:
            self._parquet.close()


def quoted(names: Iterable[object]) -> str:
    """Return a text for people: ``'a', 'b' and 12 more``."""
    listed = list(names)
    shown = ", ".join(f"{name!r}" for name in listed[:_NAMED])
    return shown if len(listed) <= _NAMED else f"{shown} and {len(listed) - _NAMED} more"


def _read_parquet(path: Path) -> tuple[list[Column], tuple[str, ...]]:
    with path.open("rb") as file:
        table = arrow_parquet.ParquetFile(file).read()
    columns = [of_arrow(name, table.column(index)) for index, name in enumerate(table.schema.names)]
    return columns, tuple(row_names(table.schema.names, table.schema.metadata or {}))


def _read_npz(path: Path) -> list[Column]:
    with path.open("rb") as opened:
        try:
            # Of a file that is no archive, NumPy gives the array that it is.
            loaded = np.load(opened, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                arrays = None
            else:
                with loaded as archive:
                    arrays = {name: archive[name] for name in archive.files}
        except OSError:
            raise
        except Exception as error:  # of NumPy, which says in many ways that bytes are not what was written
            if "allow_pickle" not in str(error):
                raise NoReadingError(str(error)) from error
            raise NoReadingError(
                "it is no archive, or holds Python objects, which are not loaded; write np.savez(path, X=X, y=y) with "
                "arrays of numbers or text, y.astype(str)"
            ) from None
    if arrays is None:
        raise NoReadingError("it is one array, not an archive; write np.savez(path, X=X, y=y)")
    columns = [column for name, array in arrays.items() for column in _of_array(name, array)]
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise NoReadingError(
            f"its arrays have different numbers of rows, {lengths}; each row needs a value in every array"
        )
    return columns


def _of_array(name: str, array: np.ndarray) -> list[Column]:
    if array.ndim not in (1, 2):
        raise NoReadingError(f"its array {name!r} has shape {array.shape}; an array must be (rows,) or (rows, columns)")
    if array.ndim == 2:
        return [column for i in range(array.shape[1]) for column in _of_array(f"{name}{i}", array[:, i])]
    return [of_numpy(name, array, np.zeros(len(array), bool), str(array.dtype))]
