"""From columns of a file to the columns of a linear model: numbers, and an indicator for each level of a text.

They are brought to mean 0 and standard deviation 1. What is missing is then 0, which is the mean.
"""

import dataclasses
import shlex
from collections.abc import Callable, Sequence

import numpy as np

from paraxis.cli._errors import CommandError
from paraxis.cli.fit._csv import DIGITS, is_number
from paraxis.cli.fit._tables import Table, quoted
from paraxis.cli.fit._values import MARKS, Column

_MOST_LEVELS = 50


@dataclasses.dataclass(frozen=True)
class Source:
    """The source of a column of the model: a column of numbers, or one level of a column of text."""

    column: str
    level: str | None = None

    @property
    def name(self) -> str:
        """For people."""
        return self.column if self.level is None else f"{self.column}={self.level}"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The recipe for the columns of the model.

    Args:
        sources: one per column.
        means: of each, ``(d,)``.
        scales: standard deviations, ``(d,)``, positive.
    """

    sources: tuple[Source, ...]
    means: np.ndarray
    scales: np.ndarray

    @property
    def columns(self) -> list[str]:
        """The columns of a file that are needed."""
        return list(dict.fromkeys(source.column for source in self.sources))

    @property
    def text_columns(self) -> list[str]:
        """Those of them that hold text."""
        return list(dict.fromkeys(source.column for source in self.sources if source.level is not None))

    def design(self, table: Table) -> np.ndarray:
        """Return the model's columns of a table that has those needed, ``(n, d)`` float64."""
        made = np.empty((table.num_rows, len(self.sources)))
        for index, source in enumerate(self.sources):
            values = _values(table.columns[source.column], source)
            made[:, index] = (values - self.means[index]) / self.scales[index]
        return np.nan_to_num(made, copy=False, nan=0.0, posinf=None, neginf=None)


def usable(table: Table, names: Sequence[str], text: str, note: Callable[[str], None]) -> list[str]:
    """Return the columns a model can be fitted to, of those named.

    Args:
        table: the file.
        names: its columns but the target and those to ignore.
        text: what to do with text: ``fail``, ``drop`` or ``one-hot``.
        note: is told what is left out.

    Raises:
        CommandError: if one holds what cannot be used.
    """
    columns = [table.columns[name] for name in names]
    odd = [column for column in columns if column.kind == "other"]
    if odd:
        raise CommandError(
            f"{_named(odd)} hold{_s(odd)} neither numbers nor text but {odd[0].stored}; write "
            f"{_ignoring(odd)}, or turn {'it' if len(odd) == 1 else 'them'} into numbers"
        )
    merged = [column for column in columns if column.merged]
    if merged:
        raise CommandError(
            f"{_named(merged)} hold{_s(merged)} integers that are one float64, such as "
            f"{quoted(merged[0].merged or ())}; write {_ignoring(merged)}, or subtract the least of them from all"
        )
    texts = [column for column in columns if column.kind == "text"]
    if texts and text == "fail":
        raise CommandError(
            f"{_named(texts)} hold{_s(texts)} text, such as {_example(texts[0], table)}; write --text one-hot for a "
            f"column per level, or --text drop"
        )
    many = [(column, count) for column in texts if (count := len(_levels(column))) > _MOST_LEVELS]
    if many and text == "one-hot":
        column, count = many[0]
        raise CommandError(
            f"column {column.name!r} holds text of {count} levels, more than the {_MOST_LEVELS} that --text one-hot "
            f"takes; write {_ignoring([column for column, _ in many])}"
        )
    if texts and text == "drop":
        note(f"{_named(texts)} hold{_s(texts)} text and {'is' if len(texts) == 1 else 'are'} left out")
        return [column.name for column in columns if column.kind != "text"]
    return list(names)


def require_finite(table: Table, names: Sequence[str]) -> None:
    """Check for infinities.

    Raises:
        CommandError: naming the columns.
    """
    infinite = {name: np.isinf(column.values) for name, column in table.columns.items() if column.kind == "number"}
    found = {name: infinite[name] for name in names if name in infinite and infinite[name].any()}
    if found:
        raise CommandError(
            f"{table.path} holds {_counted(found, 'infinite value', table)}; make them missing, or leave those rows out"
        )


def require_present(table: Table, names: Sequence[str], advice: str) -> None:
    """Check for missing values.

    Raises:
        CommandError: naming the columns, and giving the advice.
    """
    found = {name: column.missing for name in names if (column := table.columns[name]).missing.any()}
    if found:
        raise CommandError(f"{table.path} holds {_counted(found, 'missing value', table)}; {advice}")


def tell_of_marks(table: Table, names: Sequence[str], note: Callable[[str], None]) -> None:
    """Tell what was made of words that may stand for a missing value, and of texts between numbers."""
    for name in names:
        column = table.columns[name]
        if column.marks:
            note(f"column {name!r}: {quoted(column.marks)} counts as a missing value")
        if column.kind != "text":
            continue
        found = set(column.values[~column.missing])
        if marks := sorted(MARKS & found):
            note(f"column {name!r}: {quoted(marks)} counts as text; leave out the text where a value is missing")
        odd = sorted(value for value in found - MARKS if not is_number(value))
        if odd and len(odd) < len(found - MARKS) / 2:
            row = int(np.flatnonzero(column.values == odd[0])[0])
            where = f"{odd[0]!r} in {table.place(row)}"
            note(f"column {name!r} holds text, such as {where}, among numbers: all of it counts as text")


def learn(table: Table, names: Sequence[str], note: Callable[[str], None]) -> Recipe:
    """Return the recipe for these columns, from the rows that are fitted to.

    Args:
        table: these rows.
        names: the columns.
        note: is told which are constant and so left out.

    Raises:
        CommandError: if none is left.
    """
    kept: list[tuple[Source, float, float]] = []
    constant: list[str] = []
    for name in names:
        column = table.columns[name]
        sources = [Source(name, level) for level in _levels(column)] if column.kind == "text" else [Source(name)]
        moments = [(source, *_moments(_values(column, source))) for source in sources]
        kept += [found for found in moments if found[2] > 0]
        constant += [name] if not any(found[2] > 0 for found in moments) else []
    if constant:
        one = len(constant) == 1
        listed = f"column{'' if one else 's'} {quoted(constant)}"
        note(f"{listed} {'is' if one else 'are'} the same in every row that is fitted to, and left out")
    if not kept:
        raise CommandError(f"{table.path} has no column to predict from: all are the target, left out or constant")
    sources, means, scales = zip(*kept, strict=True)
    return Recipe(sources, np.array(means), np.array(scales))


def unknown_levels(recipe: Recipe, table: Table) -> dict[str, list[str]]:
    """By column, the levels of its text that the recipe has no column for."""
    found = {}
    for name in recipe.text_columns:
        known = {source.level for source in recipe.sources if source.column == name}
        if new := [level for level in _levels(table.columns[name]) if level not in known]:
            found[name] = new
    return found


def text_of(column: Column) -> np.ndarray:
    """Return the values as they would be written, ``(n,)`` of strings."""
    if column.kind == "text":
        return column.values
    if column.kind == "boolean":
        return np.where(column.values, "true", "false").astype(object)
    if column.kind == "integer":
        return column.values.astype(str).astype(object)
    values = column.values.tolist()
    return np.array([f"{value:.0f}" if value.is_integer() else repr(value) for value in values], object)


def _values(column: Column, source: Source) -> np.ndarray:
    """``(n,)`` float64, NaN where missing."""
    if source.level is None:
        return column.numbers
    return np.where(column.missing, np.nan, (text_of(column) == source.level).astype(np.float64))


def _moments(values: np.ndarray) -> tuple[float, float]:
    """Mean and standard deviation with the missing ones at the mean; the latter 0 if all are the same."""
    present = values[~np.isnan(values)]
    if not len(present) or present.min() == present.max():
        return (float(present[0]) if len(present) else 0.0), 0.0
    unit = float(np.abs(present).max())  # squares of large numbers overflow
    mean = float(np.mean(present / unit))
    square = float(np.sum((present / unit - mean) ** 2) / len(values))
    return mean * unit, float(np.sqrt(square)) * unit


def _levels(column: Column) -> list[str]:
    return sorted(set(text_of(column)[~column.missing]))


def _example(column: Column, table: Table) -> str:
    present = column.values[~column.missing]
    odd = [value for value in present if not is_number(value)]
    if odd and len(odd) < len(present):
        where = table.place(int(np.flatnonzero(column.values == odd[0])[0]))
        return f"{odd[0]!r} in {where} among numbers (if it stands for a missing value, leave the cell empty)"
    if not len(present):
        return "nothing"
    return repr(present[0]) if column.stored not in DIGITS else f"{present[0]!r} ({column.stored})"


def _named(columns: Sequence[Column]) -> str:
    return f"column{'s' if len(columns) > 1 else ''} {quoted(column.name for column in columns)}"


def _s(columns: Sequence[Column]) -> str:
    return "s" if len(columns) == 1 else ""


def _ignoring(columns: Sequence[Column]) -> str:
    shown = [f"--ignore {shlex.quote(column.name)}" for column in columns[:3]]
    return " ".join(shown) + (" …" if len(columns) > 3 else "")


def _counted(found: dict[str, np.ndarray], what: str, table: Table) -> str:
    """Return how many there are by column, ``(n,)`` booleans, and where the first is."""
    counts = [(name, int(rows.sum())) for name, rows in found.items()]
    total = sum(count for _, count in counts)
    shown = ", ".join(f"{name!r} ({count})" for name, count in counts[:6])
    more = f" and {len(counts) - 6} more" if len(counts) > 6 else ""
    place = table.place(int(np.any(list(found.values()), 0).argmax()))
    listed = f"in column{'s' if len(counts) > 1 else ''} {shown}{more}"
    return f"{total} {what}{'s' if total > 1 else ''}, {listed}, {'the first ' if total > 1 else ''}in {place}"
