"""One pass over rows that are read a part at a time: what is checked of each, and what is kept of all.

That is what has one number for each row (the target, the weight, whether the row counts), and of each column, whether
it holds text and which.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from paraxis.cli._errors import CommandError
from paraxis.cli.fit import _columns as columns
from paraxis.cli.fit._columns import Source
from paraxis.cli.fit._parts import Parts
from paraxis.cli.fit._rows import Streamed
from paraxis.cli.fit._tables import Table
from paraxis.cli.fit._values import Column, joined

Check = Callable[[Table], tuple[Table, list[str]]]
"""A part → what is left of it without rows that have missing values, and the columns to predict from."""


@dataclasses.dataclass(frozen=True)
class Survey:
    """Facts about all rows.

    Args:
        rows: themselves, without those that are left out.
        table: the columns of which all values are kept, of these rows.
        sources: of the columns to predict from; there is no row for some, perhaps, among those that are fitted to.
        names: all columns of the files.
        num_dropped: how many rows are left out.
    """

    rows: Streamed
    table: Table
    sources: list[Source]
    names: list[str]
    num_dropped: int


def surveyed(files: Parts, kept: list[str], as_text: frozenset[str], check: Check, engine: Any) -> Survey:
    """Read all parts once; again, if a column turns out to hold text in some of them only.

    Args:
        files: the parts.
        kept: the columns of which all values are kept.
        as_text: columns that are read as text.
        check: refuses what cannot be used.
        engine: for what reads the rows later.

    Raises:
        CommandError: if a part is refused.
    """
    while True:
        found = _surveyed(files, kept, as_text, check, engine)
        if isinstance(found, Survey):
            return found
        as_text |= found


def _surveyed(
    files: Parts, kept: list[str], as_text: frozenset[str], check: Check, engine: Any
) -> Survey | frozenset[str]:
    """Return what there is to know, or the columns that must be read as text."""
    values: dict[str, list[Column]] = {name: [] for name in kept}
    kinds: dict[str, set[str]] = {}
    levels: dict[str, set[str]] = {}
    there: list[np.ndarray] = []
    numbers: list[np.ndarray] = []
    names: list[str] | None = None
    naming: set[str] | None = None
    first = None
    for part in files.read(as_text):
        first = part if first is None else first
        for name, column in part.columns.items():
            kinds.setdefault(name, set()).update([] if column.missing.all() else [column.kind])
        mixed = {name for name, own in kinds.items() if len(own) > 1 and own & {"text", "boolean", "other"}}
        if mixed and not part.is_csv:
            name = min(mixed)
            raise CommandError(
                f"{part.path}: column {name!r} holds {part.columns[name].stored}, and {first.columns[name].stored} in "
                f"{first.path}; give all files the same types"
            )
        if not mixed <= as_text:
            return frozenset(mixed)
        left, usable = check(part)
        names = usable if names is None else [name for name in names if name in usable]
        found = set(columns.naming_rows(part, usable))
        naming = found if naming is None else naming & found
        for name in usable:
            if part.columns[name].kind == "text" and len(levels.setdefault(name, set())) <= columns.MOST_LEVELS:
                levels[name].update(columns.levels_of(part.columns[name]))
        columns.refuse_many({name: own for name, own in levels.items() if name in names}, part)
        there.append(np.isin(part.numbers, left.numbers))
        numbers.append(left.numbers)
        for name in kept:
            values[name].append(left.columns[name])
    assert first is not None
    assert names is not None
    columns.refuse_naming(sorted(naming or ()))
    table = dataclasses.replace(
        first, numbers=np.concatenate(numbers), columns={name: joined(own) for name, own in values.items()}, before=0
    )
    sources = [source for name in names for source in columns.sources(name, levels.get(name))]
    mask = np.concatenate(there)
    rows = Streamed(files, as_text, mask, engine)
    return Survey(rows, table, sources, list(first.columns), int((~mask).sum()))
