"""Engines as solvers ask them, for rows of a table: how many at once, where a run is shown and saved."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import ClassVar

from paraxis._host.records import Described
from paraxis.engines._job import Part, digest
from paraxis.engines._journal import Journal
from paraxis.engines._progress import Progress, shown
from paraxis.engines._run import Engine

ENOUGH = 1 << 24
"""Bytes of rows of a table that are read at once; more only takes longer. The memory of parts up to 32 MB is used
again; that of larger ones is new each time, and its pages then cost more than reading (`bench_table.py`)."""


class OfTables(Engine):
    """An engine that solvers and estimators take for a :class:`px.Table`. What follows they ask; users need not.

    Attributes:
        not_of_tables: options that say nothing about tables, and why.
    """

    not_of_tables: ClassVar[Mapping[str, str]] = {"keep": "values by row are always kept, on the devices"}

    def _require_for_tables(self, write: str) -> None:
        for name, why in self.not_of_tables.items():
            if (given := getattr(self, name)) != getattr(type(self), name):
                raise ValueError(
                    f"{self._name}: {name} is not for a px.Table, got {name}={given!r}; {why}: write {write}"
                )

    @contextlib.contextmanager
    def rows_shown(self) -> Iterator[Callable[[int, int, int], None]]:
        """Give what a solver tells of its passes: the rows that are done, the number of all, and that of the pass."""
        with shown(self.verbose) as show:
            yield lambda done, rows, number: show(Progress("rows", done, rows, number, None, None))

    @contextlib.contextmanager
    def rows_saved(self, described: Described) -> Iterator[Journal | None]:
        """Give the journal of a solver's run, if there is a folder.

        Args:
            described: what the run depends on. What comes first may be why a part that follows differs.

        Raises:
            CheckpointError: if the folder holds another run, or cannot be used.
        """
        if self.folder is None:
            yield None
            return
        parts = self._described()
        for name, of in described.items():
            told = {one: (str(number), "") for one, number in of.items()} if isinstance(of, Mapping) else None
            parts[name] = Part.of({name: ("", digest(*of))} if told is None else told)
        journal = Journal(self._name, Path(self.folder), parts, self.save_every)
        try:
            yield journal
            journal.clear()
        finally:
            journal.close()
