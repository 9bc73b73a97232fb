"""One pass over rows that are read a part at a time: what is checked of each, and what is kept of all.

That is what has one number for each row (the target, the weight, whether the row counts), and of each column, whether
it holds text and which.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from paraxis.cli._errors import CommandError
from paraxis.cli.fit import _columns as columns
from paraxis.cli.fit._columns import Outline, Source
from paraxis.cli.fit._options import CsvForm
from paraxis.cli.fit._parts import Parts
from paraxis.cli.fit._rows import Streamed
from paraxis.cli.fit._tables import Table
from paraxis.cli.fit._values import Column, joined


class Rules(NamedTuple):
    """The use that is made of the rows.

    Args:
        names: a part → its columns but the target and those to ignore.
        check: a part and these → what is left of it without rows that have missing values.
        judge: what is known of all parts, also as a table, and these → the columns to predict from.
    """

    names: Callable[[Table], list[str]]
    check: Callable[[Table, list[str]], Table]
    judge: Callable[[Outline, Table, list[str]], list[str]]


@dataclasses.dataclass(frozen=True)
class Survey:
    """Facts about all rows.

    Args:
        rows: themselves, without those that are left out.
        table: the columns of which all values are kept, of these rows.
        sources: of the columns to predict from; there is no row for some, perhaps, among those that are fitted to.
        names: all columns of the files.
        num_dropped: how many rows are left out.
        missing: how many values of these rows are missing, by column.
    """

    rows: Streamed
    table: Table
    sources: list[Source]
    names: list[str]
    num_dropped: int
    missing: Mapping[str, int]


class _Outlined(NamedTuple):
    """Facts about columns that a pass found out, be there rows that were refused.

    Args:
        outline: of all parts.
        first: the first of them.
        names: the columns that were looked at.
        as_text: those that were read as text.
    """

    outline: Outline
    first: Table
    names: list[str]
    as_text: frozenset[str]

    def judged_by(self, rules: Rules) -> list[str]:
        """Return the columns to predict from."""
        return rules.judge(self.outline, self.outline.of(self.first), rules.names(self.first))


class Passes:
    """The passes over the same files for one option after the other; what one has found spares the next.

    Other columns may be left out meanwhile: of the others, an earlier pass tells as much.
    """

    def __init__(self) -> None:
        self._form: CsvForm | None = None
        self._mixed: frozenset[str] = frozenset()
        self._seen: _Outlined | None = None

    def begin(self, form: CsvForm, as_text: frozenset[str], rules: Rules) -> tuple[frozenset[str], bool]:
        """Return the columns to read as text, and whether all columns were judged.

        Raises:
            CommandError: if they are refused.
        """
        if form != self._form:
            self._form, self._mixed, self._seen = form, frozenset(), None
        as_text |= self._mixed
        seen = self._seen
        if seen is None or not seen.as_text <= as_text or not {*rules.names(seen.first)} <= {*seen.names}:
            return as_text, False
        seen.judged_by(rules)
        return as_text, True

    def mix(self, found: frozenset[str]) -> None:
        """Note columns that hold text in some parts only."""
        self._mixed |= found

    def see(self, outlined: _Outlined) -> None:
        """Note what a pass found."""
        self._seen = outlined


def surveyed(
    files: Parts, form: CsvForm, kept: list[str], as_text: frozenset[str], rules: Rules, engine: Any, passes: Passes
) -> Survey:
    """Read all parts once; again, if a column turns out to hold text in some of them only.

    Args:
        files: the parts.
        form: how they are written.
        kept: the columns of which all values are kept.
        as_text: columns that are read as text.
        rules: refuse what cannot be used.
        engine: for what reads the rows later.
        passes: those before.

    Raises:
        CommandError: if columns are refused; or else for the first part that is.
    """
    while True:
        as_text, are_judged = passes.begin(form, as_text, rules)
        found = _surveyed(files, kept, as_text, rules, engine, passes, are_judged=are_judged)
        if isinstance(found, Survey):
            return found
        passes.mix(found)


def _surveyed(
    files: Parts,
    kept: list[str],
    as_text: frozenset[str],
    rules: Rules,
    engine: Any,
    passes: Passes,
    *,
    are_judged: bool,
) -> Survey | frozenset[str]:
    """Return what there is to know, or the columns that must be read as text."""
    values: dict[str, list[Column]] = {name: [] for name in kept}
    there: list[np.ndarray] = []
    numbers: list[np.ndarray] = []
    names: list[str] = []
    missing = collections.Counter[str]()
    outline, first, refused = Outline(), None, None
    for part in files.read(as_text):
        own = rules.names(part)
        if first is None:
            first, names = part, own
        outline.add(part, names)
        if outline.mixed and not part.is_csv:
            name = min(outline.mixed)
            raise CommandError(
                f"{part.path}: column {name!r} holds {part.columns[name].stored}, and {first.columns[name].stored} in "
                f"{first.path}; give all files the same types"
            )
        if refused is not None or not outline.mixed <= as_text:
            continue
        try:
            left = rules.check(part, names)
        except CommandError as error:  # what is wrong with the columns comes first, and is known at the end
            if are_judged:
                raise
            refused = error
            continue
        there.append(np.isin(part.numbers, left.numbers))
        numbers.append(left.numbers)
        missing.update(columns.missing_in(left, names))
        for name in kept:
            values[name].append(left.columns[name])
    assert first is not None
    if not outline.mixed <= as_text:
        return frozenset(outline.mixed)
    outlined = _Outlined(outline, first, names, as_text)
    passes.see(outlined)
    names = outlined.judged_by(rules)
    if refused is not None:
        raise refused
    table = dataclasses.replace(
        first, numbers=np.concatenate(numbers), columns={name: joined(own) for name, own in values.items()}, before=0
    )
    levels = {name: outline.texts[name].levels for name in names if name in outline.texts}
    sources = [source for name in names for source in columns.sources(name, levels.get(name))]
    mask = np.concatenate(there)
    rows = Streamed(files, as_text, mask, engine)
    return Survey(rows, table, sources, list(first.columns), int((~mask).sum()), missing)
