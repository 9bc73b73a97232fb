"""From columns of a file to the columns of a linear model: numbers, and an indicator for each level of a text.

They are brought to mean 0 and standard deviation 1. What is missing is then 0, which is the mean.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from paraxis.cli._errors import CommandError, Remedy
from paraxis.cli.fit._csv import DIGITS, is_number
from paraxis.cli.fit._settling import shell_word
from paraxis.cli.fit._tables import Table, quoted, read_table
from paraxis.cli.fit._values import MARKS, Column, Kind

MOST_LEVELS = 50
_MOST_KNOWN = 10_000  # levels, or large integers, that are counted
_FEW_WORDS = 5  # so many different ones among numbers, and no more, may stand for missing values
_FEW_ROWS = 20
# A word with a digit, and no date; or an e-mail address.
_LIKE_ID = re.compile(r"(?!\d{1,4}[-/:]\d\d?([-/:]|$))[\w:/#-]*\d[\w:/#-]*|[^@\s]+@[^@\s]+")
_UNIT = re.compile(r"([+-]?)\s*([$€£¥]?)\s*([+-]?[0-9.,][0-9.,'\u00a0\u202f ]*)([$€£¥%]?)")
_NAMES_ROWS = re.compile(r"(?i:(^|[\W_])(id|uuid|guid)([\W_]|$))|[a-z](Id|ID)$")


@dataclasses.dataclass(frozen=True)
class Source:
    """The source of a column of the model: a column of numbers, or one level of a column of text."""

    column: str
    level: str | None = None

    @property
    def name(self) -> str:
        """Return the name for people."""
        return self.column if self.level is None else f"{self.column}={self.level}"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The recipe for the columns of the model.

    Args:
        sources: one per column.
        means: of each, ``(d,)``.
        scales: standard deviations, ``(d,)``, positive.
        fills: whether values were missing where it was learnt.
    """

    sources: tuple[Source, ...]
    means: np.ndarray
    scales: np.ndarray
    fills: bool = False

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


def naming_rows(table: Table, names: Sequence[str]) -> list[str]:
    """Return the columns that name the rows: by their own name, and by values of which no two are the same."""
    return [name for name in names if _NAMES_ROWS.search(name) and _all_differ(table.columns[name])]


class Outline:
    """The facts about columns that are read a part at a time, gathered before they are judged."""

    def __init__(self) -> None:
        self.texts: dict[str, Texts] = {}
        self._kinds: dict[str, dict[Kind, str]] = {}
        self._large: dict[str, set[int]] = {}
        self._naming: dict[str, None] = {}
        self._repeating: set[str] = set()

    def add(self, part: Table, names: Sequence[str]) -> None:
        """Look at one more part, and at which of the named columns name its rows."""
        for name, column in part.columns.items():
            if not column.missing.all():
                self._kinds.setdefault(name, {}).setdefault(column.kind, column.stored)
            if column.kind == "text":
                self.texts.setdefault(name, Texts()).add(column, part)
            elif column.kind == "integer" and len(own := self._large.setdefault(name, set())) <= _MOST_KNOWN:
                own.update(column.large)
        found = naming_rows(part, names)
        self._naming.update(dict.fromkeys(found))
        many = (name for name in names if part.num_rows - part.columns[name].missing.sum() > 1)
        self._repeating.update(set(many).difference(found))

    @property
    def mixed(self) -> set[str]:
        """The columns that are text, truth values or dates in one part, and not in another."""
        return {name for name, own in self._kinds.items() if len(own) > 1 and own.keys() & {"text", "boolean", "other"}}

    @property
    def naming(self) -> list[str]:
        """The columns that name the rows, as far as those within a part tell."""
        return [name for name in self._naming if name not in self._repeating]

    def of(self, table: Table) -> Table:
        """Return a table with all columns as of their kind in all parts, and of their values those that matter."""
        return dataclasses.replace(table, columns={name: self._column(name) for name in table.columns})

    def _column(self, name: str) -> Column:
        kinds = self._kinds.get(name, {"number": "nothing"})
        kind = next(iter(kinds)) if len(kinds) == 1 else "number"
        values = np.array(sorted(self._large.get(name, ())) if kind == "integer" else [])
        return Column(name, kind, values, np.zeros(len(values), bool), kinds.get(kind, "double"))


def refuse_naming(naming: Sequence[str]) -> None:
    """Refuse columns that name the rows.

    Raises:
        CommandError: if there are any.
    """
    if naming:
        one = len(naming) == 1
        raise CommandError(
            f"column{'' if one else 's'} {quoted(naming)} name{'s' if one else ''} the rows: no two values are the "
            f"same; write {_option_id(naming)}, or rename {'it' if one else 'them'} to predict from",
            remedies=[{"id": [*naming]}],
        )


class Texts:
    """The contents of a column of text, whose parts are looked at one after the other.

    Attributes:
        levels: its values; of very many, some.
    """

    def __init__(self) -> None:
        self.levels: set[str] = set()
        self._odd: set[str] = set()
        self._num_odd = self._num_present = self._num_numbers = 0
        self._has_codes = self._has_others = False
        self._first = self._first_odd = ""
        self._units: set[str] = set()

    @classmethod
    def of(cls, column: Column, table: Table) -> "Texts":
        """Return what a column of a table holds."""
        found = cls()
        found.add(column, table)
        return found

    def add(self, column: Column, table: Table) -> None:
        """Look at one more part of the column."""
        counts = collections.Counter(column.values[~column.missing].tolist())
        self._has_others |= len(counts) < counts.total() or not self.levels.isdisjoint(counts)
        self._has_others = self._has_others or not all(map(_LIKE_ID.fullmatch, counts))
        if len(self.levels) <= _MOST_KNOWN:
            self.levels.update(counts)
        for value, count in counts.items():
            bare = value.strip()
            is_odd = not is_number(value, table.form.decimal)
            if not self._first:
                self._first = repr(value) if column.stored not in DIGITS else f"{value!r} ({column.stored})"
            if is_odd and not self._first_odd and bare not in MARKS:
                place = table.place(int(np.flatnonzero(column.values == value)[0]))
                self._first_odd = f"{value!r} in {place} among numbers"
            self._num_numbers += 0 if is_odd else count
            self._has_codes |= re.fullmatch("[+-]?0[0-9]+", bare) is not None
            if bare in MARKS:
                continue
            self._units.add(_unit(bare))
            self._num_present += count
            self._num_odd += count if is_odd else 0
            if is_odd and len(self._odd) <= _FEW_WORDS:
                self._odd.add(bare)

    @property
    def words(self) -> list[str]:
        """The few words of a column of which more than half is numbers; else nothing."""
        few = len(self._odd) <= _FEW_WORDS and self._num_odd < self._num_present / 2
        return sorted(self._odd) if few and not self._has_codes else []

    @property
    def unit(self) -> str:
        """The sign at all numbers of a column, of percent or a currency; else nothing."""
        return next(iter(self._units)) if len(self._units) == 1 else ""

    @property
    def are_ids(self) -> bool:
        """Return whether they look like names of the rows: words with digits, many, of which no two are the same."""
        return len(self.levels) > _FEW_ROWS and not self._has_others and not self.words

    @property
    def example(self) -> str:
        """A value, for people; where some are numbers, one that is none, and where it is."""
        return (self._first_odd if self._num_numbers else "") or self._first or "nothing"


def usable(
    table: Table,
    names: Sequence[str],
    text: str,
    note: Callable[[str], None],
    *,
    texts_in: Mapping[str, Texts] | None = None,
    naming: Sequence[str] | None = None,
) -> list[str]:
    """Return the columns a model can be fitted to, of those named.

    Args:
        table: the file; or an outline of it, see below.
        names: its columns but the target and those to ignore.
        text: what to do with text: ``fail``, ``drop`` or ``one-hot``.
        note: is told what is left out.
        texts_in: what the columns of text hold, if the table does not have all of it.
        naming: the columns that name the rows, likewise; then it is not looked at which of them count the rows.

    Raises:
        CommandError: if one holds what cannot be used.
    """
    columns = [table.columns[name] for name in names]
    refuse_naming(naming_rows(table, names) if naming is None else naming)
    for name in (column.name for column in columns if naming is None and _counts(column)):
        note(f"column {name!r} counts the rows; if that says nothing about them, write {_option_id([name])}")
    odd = [column for column in columns if column.kind == "other"]
    if odd:
        raise CommandError(
            f"{_named(odd)} hold{_s(odd)} neither numbers nor text but {odd[0].stored}; write "
            f"{_ignoring(odd)}, or turn {'it' if len(odd) == 1 else 'them'} into numbers",
            remedies=[_ignored(odd)],
        )
    merged = [column for column in columns if column.merged]
    if merged:
        raise CommandError(
            f"{_named(merged)} hold{_s(merged)} integers that are one float64, such as "
            f"{quoted(merged[0].merged or ())}; write {_ignoring(merged)}, or subtract the least of them from all",
            remedies=[_ignored(merged)],
        )
    texts = [column for column in columns if column.kind == "text"]
    if texts and text == "drop":
        note(f"{_named(texts)} hold{_s(texts)} text and {'is' if len(texts) == 1 else 'are'} left out")
        return [column.name for column in columns if column.kind != "text"]
    known = {column.name: Texts.of(column, table) for column in texts} if texts_in is None else texts_in
    if ids := [column.name for column in texts if known[column.name].are_ids]:
        one = len(ids) == 1
        raise CommandError(
            f"column{'' if one else 's'} {quoted(ids)} hold{'s' if one else ''} text such as {known[ids[0]].example}, "
            f"of which no two values are the same; write {_option_id(ids)}, or --ignore to leave "
            f"{'it' if one else 'them'} out of predictions, too",
            remedies=[{"id": ids}],
        )
    many = [column for column in texts if len(known[column.name].levels) > MOST_LEVELS]
    as_levels = "" if many else ", or --text one-hot to take the numbers for text, too"
    require_no_marks(table, many if text == "one-hot" else texts, as_levels, texts_in=known)
    if many:
        counts = {_about(len(known[column.name].levels)) for column in many}
        most = max(len(known[column.name].levels) for column in many)
        up_to = "up to " * (len(counts) > 1)
        examples = ", ".join(dict.fromkeys(known[column.name].example for column in many[:3]))
        raise CommandError(
            f"{_named(many)} hold{_s(many)} text of {up_to}{_about(most)} levels, such as {examples}, more "
            f"than the {MOST_LEVELS} that --text one-hot takes; write {_ignoring(many)}",
            remedies=[_ignored(many)],
        )
    if texts and text == "fail":
        raise CommandError(
            f"{_named(texts)} hold{_s(texts)} text, such as {known[texts[0].name].example}; write --text one-hot for a "
            f"column per level, or --text drop",
            remedies=[{"text": "one-hot"}],
        )
    return list(names)


def require_no_marks(
    table: Table, texts: Sequence[Column], otherwise: str = "", *, texts_in: Mapping[str, Texts] | None = None
) -> None:
    """Check that columns of text are not numbers: with a unit, or with a few words in place of missing values.

    Raises:
        CommandError: naming them and the unit or the words, and what to write otherwise.
    """
    known = texts_in or {}
    own = {column.name: known.get(column.name) or Texts.of(column, table) for column in texts}
    if (with_units := [column for column in texts if own[column.name].unit]) and table.is_csv:
        units = sorted({own[column.name].unit for column in with_units})
        shown = " ".join(f"--strip {shell_word(unit)}" for unit in units)
        raise CommandError(
            f"{_named(with_units)} hold{_s(with_units)} numbers with {quoted(units)}, such as "
            f"{own[with_units[0].name].example}; write {shown} to read them as numbers",
            remedies=[{"strip": units}, _ignored(with_units)],
        )
    marked = {name: found for name, found in own.items() if found.words}
    if not marked or not table.is_csv:
        return
    words = sorted({word for found in marked.values() for word in found.words})
    others = [other for other in table.columns.values() if other.kind == "text" and other.name not in marked]
    values = [known[other.name].levels if other.name in known else other.values.tolist() for other in others]
    elsewhere = any(not set(words).isdisjoint(own) for own in values)
    shown = " ".join(f"--na-values={shell_word(word)}" for word in words)
    one = len(marked) == 1
    raise CommandError(
        f"column{'' if one else 's'} {quoted(marked)} hold{'s' if one else ''} text, such as "
        f"{next(iter(marked.values())).example}; write {shown}{otherwise}",
        remedies=[{"na_values": words}] * (not elsewhere) + [{"ignore": list(marked)}],
    )


def require_finite(table: Table, names: Sequence[str], *, is_part: bool = False) -> None:
    """Check for infinities; of a part, it is not looked at how they are written in the file.

    Raises:
        CommandError: naming the columns.
    """
    infinite = {name: np.isinf(column.values) for name, column in table.columns.items() if column.kind == "number"}
    found = {name: infinite[name] for name in names if name in infinite and infinite[name].any()}
    if found:
        counted = "at least " * is_part + _counted(found, "infinite value", table)
        raise CommandError(
            f"{table.path} holds {counted}; make them missing, or leave those rows out",
            remedies=[{"na_values": [] if is_part else _infinite_words(table, found)}, {"ignore": list(found)}],
        )


def require_present(table: Table, names: Sequence[str], advice: str, remedy: Remedy, *, is_part: bool = False) -> None:
    """Check for missing values; a part of a file does not tell how many there are.

    Raises:
        CommandError: naming the columns, and giving the advice, which the remedy is.
    """
    found = {name: column.missing for name in names if (column := table.columns[name]).missing.any()}
    if found:
        counted = "at least " * is_part + _counted(found, "missing value", table)
        raise CommandError(f"{table.path} holds {counted}; {advice}", remedies=[remedy])


def missing_in(table: Table, names: Iterable[str]) -> collections.Counter[str]:
    """Return how many values are missing in each column."""
    return collections.Counter({name: int(table.columns[name].missing.sum()) for name in names})


def tell_of_filled(missing: Mapping[str, int], names: Sequence[str], mean: str, note: Callable[[str], None]) -> None:
    """Tell for how many missing values a mean stands, by column."""
    if counts := [(name, missing[name]) for name in names if missing.get(name)]:
        note(f"{_listed(counts, 'missing value')}: {mean} stands for each")


def emptiest(table: Table, names: Sequence[str], rows: np.ndarray) -> list[str]:
    """Return the columns to leave out, so that of some rows, a mask, half at least have a value in all others."""
    left = {name: table.columns[name].missing[rows] for name in names if rows.any()}
    gone: list[str] = []
    while left and (~np.any([*left.values()], axis=0)).mean() < 0.5:
        gone.append(max(left, key=lambda name: left[name].sum()))
        del left[gone[-1]]
    return gone


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
            note(f"column {name!r}: {quoted(marks)} counts as text; leave the cell empty where a value is missing")
        odd = sorted(value for value in found - MARKS if not is_number(value, table.form.decimal))
        if odd and len(odd) < len(found - MARKS) / 2:
            row = int(np.flatnonzero(column.values == odd[0])[0])
            where = f"{odd[0]!r} in {table.place(row)}"
            note(f"column {name!r} holds text, such as {where}, among numbers: all of it counts as text")


def sources_of(table: Table, names: Sequence[str]) -> list[Source]:
    """Return the sources that columns have: of text, one for each level."""
    levels = {name: levels_of(table.columns[name]) for name in names if table.columns[name].kind == "text"}
    return [source for name in names for source in sources(name, levels.get(name))]


def sources(name: str, levels: Iterable[str] | None) -> list[Source]:
    """Return the sources of a column of numbers, or of text with these levels."""
    return [Source(name)] if levels is None else [Source(name, level) for level in sorted(levels)]


def learn(parts: Iterable[Table], sources: Sequence[Source], path: Path, note: Callable[[str], None]) -> Recipe:
    """Return the recipe for the columns of these sources, from the rows that are fitted to.

    Args:
        parts: these rows, in any number of tables.
        sources: that there may be.
        path: the file, for an error.
        note: is told which columns are constant and so left out.

    Raises:
        CommandError: if none is left.
    """
    moments = [_Moments() for _ in sources]
    for table in parts:
        for source, own in zip(sources, moments, strict=True):
            own.add(_values(table.columns[source.column], source))
    found = [(source, *own.found, own.misses) for source, own in zip(sources, moments, strict=True)]
    kept = [one for one in found if one[2] > 0]
    there = {source.column for source, *_ in kept}
    constant = [name for name in dict.fromkeys(source.column for source in sources) if name not in there]
    if constant:
        one = len(constant) == 1
        listed = f"column{'' if one else 's'} {quoted(constant)}"
        note(f"{listed} {'is' if one else 'are'} the same in every row that is fitted to, and left out")
    if not kept:
        raise CommandError(f"{path} has no column to predict from: all are the target, left out or constant")
    used, means, scales, misses = zip(*kept, strict=True)
    return Recipe(used, np.array(means), np.array(scales), any(misses))


def unknown_levels(recipe: Recipe, table: Table) -> dict[str, list[str]]:
    """By column, the levels of its text that the recipe has no column for."""
    found = {}
    for name in recipe.text_columns:
        known = {source.level for source in recipe.sources if source.column == name}
        if new := [level for level in levels_of(table.columns[name]) if level not in known]:
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


class _Moments:
    """Mean and deviation of values that come in parts; the latter with the missing ones at the mean.

    Means and squares of parts are put together as by Chan, Golub and LeVeque (1979): what the values have in common
    is in no difference. All are in units of the largest, since squares of large numbers overflow.
    """

    def __init__(self) -> None:
        self._total = self._count = 0
        self._least, self._most = np.inf, -np.inf
        self._unit = self._mean = self._square = 0.0

    def add(self, values: np.ndarray) -> None:
        """Count more values in, ``(n,)``."""
        self._total += len(values)
        present = values[~np.isnan(values)]
        if not len(present):
            return
        self._least, self._most = min(self._least, present.min()), max(self._most, present.max())
        unit = max(self._unit, float(np.abs(present).max()))
        if unit == 0:
            self._count += len(present)
            return
        shrunk = self._unit / unit
        mean, square = self._mean * shrunk, self._square * shrunk**2
        own = float(np.mean(present / unit))
        count = self._count + len(present)
        away = own - mean
        square += float(np.sum((present / unit - own) ** 2)) + away**2 * (self._count * (len(present) / count))
        self._unit, self._mean, self._square = unit, mean + away * (len(present) / count), square
        self._count = count

    @property
    def misses(self) -> bool:
        """Return whether values were missing."""
        return self._count < self._total

    @property
    def found(self) -> tuple[float, float]:
        """Mean and standard deviation; the latter 0 if all are the same."""
        if self._least >= self._most:
            return (float(self._least) if self._count else 0.0), 0.0
        return self._mean * self._unit, float(np.sqrt(self._square / self._total)) * self._unit


def _unit(cell: str) -> str:
    """Return the sign of percent or a currency, if a cell is a number with one before or behind it; else nothing."""
    found = _UNIT.fullmatch(cell)
    return "" if found is None or bool(found[2]) == bool(found[4]) else found[2] or found[4]


def levels_of(column: Column) -> list[str]:
    return sorted(set(text_of(column)[~column.missing]))


def _all_differ(column: Column) -> bool:
    present = column.values[~column.missing]
    return column.kind in ("integer", "text") and 1 < len(present) == len(np.unique(present))


def _counts(column: Column) -> bool:
    """Return whether these are integers in a row, in any order, and not a few."""
    if column.kind != "integer" or column.missing.any() or len(column.values) <= _FEW_ROWS:
        return False
    return len(column.values) - 1 == int(column.values.max()) - int(column.values.min()) and _all_differ(column)


def _option_id(names: Sequence[str]) -> str:
    return " ".join(f"--id {shell_word(name)}" for name in names)


def _infinite_words(table: Table, names: Iterable[str]) -> list[str]:
    """Return how infinities are written in columns of a CSV file; nothing of another one."""
    if not table.is_csv:
        return []
    written = read_table(table.path, table.form, as_text=table.columns).columns
    return sorted({word.strip() for name in names for word in written[name].values if _is_infinite(word)})


def _is_infinite(word: str) -> bool:
    try:
        return math.isinf(float(word))
    except ValueError:
        return False


def _about(count: int) -> str:
    return str(count) if count <= _MOST_KNOWN else f"more than {_MOST_KNOWN:,}"


def _named(columns: Sequence[Column]) -> str:
    return f"column{'s' if len(columns) > 1 else ''} {quoted(column.name for column in columns)}"


def _s(columns: Sequence[Column]) -> str:
    return "s" if len(columns) == 1 else ""


def _ignored(columns: Sequence[Column]) -> Remedy:
    return {"ignore": [column.name for column in columns]}


def _ignoring(columns: Sequence[Column]) -> str:
    shown = [f"--ignore {shell_word(column.name)}" for column in columns[:3]]
    return " ".join(shown) + (" …" if len(columns) > 3 else "")


def _counted(found: dict[str, np.ndarray], what: str, table: Table) -> str:
    """Return how many there are by column, ``(n,)`` booleans, and where the first is."""
    counts = [(name, int(rows.sum())) for name, rows in found.items()]
    place = table.place(int(np.any(list(found.values()), 0).argmax()))
    first = "the first " if sum(count for _, count in counts) > 1 else ""
    return f"{_listed(counts, what)}, {first}in {place}"


def _listed(counts: Sequence[tuple[str, int]], what: str) -> str:
    """Return how many there are, and by column."""
    total = sum(count for _, count in counts)
    shown = ", ".join(f"{name!r} ({count})" for name, count in counts[:6])
    more = f" and {len(counts) - 6} more" if len(counts) > 6 else ""
    return f"{total} {what}{'s' if total > 1 else ''}, in column{'s' if len(counts) > 1 else ''} {shown}{more}"
