"""The rows that a model is fitted to and scored on: in memory, or read a part at a time from files."""

import abc
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from paraxis._tables import Table as OnDisk, in_blocks
from paraxis.cli.fit._columns import Recipe
from paraxis.cli.fit._model import Model
from paraxis.cli.fit._parts import Parts
from paraxis.cli.fit._tables import Table


class Rows(abc.ABC):
    """The rows of a file, by their numbers from 0."""

    @abc.abstractmethod
    def parts(self, chosen: np.ndarray) -> Iterator[Table]:
        """Yield tables that have all chosen rows, in the order of their numbers here."""

    @abc.abstractmethod
    def design(self, recipe: Recipe, chosen: np.ndarray, dtype: Any) -> Any:
        """Return the model's columns of chosen rows: an array ``(n, d)``, or a :class:`Design`."""

    def linear(self, model: Model, chosen: np.ndarray) -> np.ndarray:
        """Return the linear model's predictions for chosen rows, ``(n, k)``."""
        return np.concatenate([model.linear(part) for part in self.parts(chosen)])


@dataclasses.dataclass(frozen=True)
class Held(Rows):
    """Rows in memory."""

    table: Table

    def parts(self, chosen: np.ndarray) -> Iterator[Table]:
        yield self.table.rows(chosen)

    def design(self, recipe: Recipe, chosen: np.ndarray, dtype: Any) -> np.ndarray:
        return recipe.design(self.table.rows(chosen)).astype(dtype)


@dataclasses.dataclass(frozen=True)
class Streamed(Rows):
    """Rows that are read a part at a time. Chosen ones are asked for in the order of their numbers.

    Args:
        files: where they are.
        as_text: columns that are read as text.
        there: which of the files' rows they are, ``(num_in_files,)`` booleans.
        engine: says how many a solver reads at once.
    """

    files: Parts
    as_text: frozenset[str]
    there: np.ndarray
    engine: Any

    def parts(self, chosen: np.ndarray) -> Iterator[Table]:
        wanted = np.zeros(len(self.there), bool)
        wanted[np.flatnonzero(self.there)[chosen]] = True
        start = 0
        for part in self.files.read(self.as_text):
            here = wanted[start : start + part.num_rows]
            start += part.num_rows
            if here.any():
                yield part.rows(here)

    def design(self, recipe: Recipe, chosen: np.ndarray, dtype: Any) -> "Design":
        return Design(self, recipe, chosen, np.dtype(dtype))


@dataclasses.dataclass(frozen=True)
class Design:
    """The model's columns of rows that are read a part at a time, ``(n, d)``; a source of a table, with targets."""

    rows: Streamed
    recipe: Recipe
    chosen: np.ndarray
    dtype: np.dtype[Any]
    y: np.ndarray | None = None
    target = "y"

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def columns(self) -> list[str]:
        return [source.name for source in self.recipe.sources]

    @property
    def engine(self) -> Any:
        return self.rows.engine

    def with_targets(self, y: np.ndarray) -> OnDisk:
        """Return a table of the same, with targets ``(n,)``."""
        return OnDisk(dataclasses.replace(self, y=y))

    def blocks(self, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield rows and targets, of the size that a table asks for."""
        assert self.y is not None
        return in_blocks(self._parts(self.y), size)

    def parts(self) -> Iterator[np.ndarray]:
        """Yield the rows, as many at once as are read."""
        for part in self.rows.parts(self.chosen):
            yield self.recipe.design(part).astype(self.dtype)

    def _parts(self, y: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        start = 0
        for X in self.parts():
            yield X, y[start : start + len(X)]
            start += len(X)
