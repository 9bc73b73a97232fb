"""Parquet files as a source of elements: the rows that have the same value in one column."""

import functools
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paraxis._calls.extras import needed
from paraxis._tables import Unchanged
from paraxis.errors import DataError

_ROW_GROUPS_KEPT = 8


class Parquet:
    """Groups of rows of Parquet files, by a column; one element is a dict of the other columns.

    Only that column is read when it is made. Then row groups are read when an element of theirs is asked for, and the
    last few are kept: best if the files are sorted by the column.
    """

    def __init__(self, folder: Path, by: str) -> None:
        with needed("px.Groups.parquet", "tables"):
            import pyarrow.parquet  # noqa: F401

        self._by = by
        self._paths = [folder] if folder.is_file() else sorted(folder.glob("*.parquet"))
        if not self._paths:
            raise DataError(f"Groups.parquet: folder must have .parquet files, got none in {str(folder)!r}")
        parts: dict[Any, list[tuple[int, int, int, int]]] = {}
        self._files = [Unchanged.of("Groups.parquet", path) for path in self._paths]
        for number, path in enumerate(self._paths):
            self._note(number, path, parts)
        self.ids = list(parts)
        self._parts = list(parts.values())
        self.lengths = [sum(stop - start for _, _, start, stop in some) for some in self._parts]
        self._remember()

    def _remember(self) -> None:
        self._row_group = functools.lru_cache(_ROW_GROUPS_KEPT)(self._read_row_group)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_row_group"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._remember()

    def _note(self, number: int, path: Path, parts: dict[Any, list[tuple[int, int, int, int]]]) -> None:
        """Note where the rows of each group lie in a file: stretches of its row groups."""
        try:
            file = _opened(path)
            if self._by not in file.schema_arrow.names:
                raise DataError(
                    f"Groups.parquet: by must be a column of {str(path)!r}, which has "
                    f"{', '.join(file.schema_arrow.names)}; got {self._by!r}"
                )
            for group in range(file.num_row_groups):
                column = file.read_row_group(group, columns=[self._by]).column(0)
                values = column.to_numpy()
                if column.null_count or np.any(values != values):
                    raise DataError(
                        f"Groups.parquet: by must name the group of each row, but column {self._by!r} of {str(path)!r} "
                        f"has gaps; write a file without these rows, or with a name for them"
                    )
                edges = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(values)]
                for start, stop in itertools.pairwise(edges):
                    if stop > start:
                        name = values[start].item() if isinstance(values[start], np.generic) else values[start]
                        parts.setdefault(name, []).append((number, group, start, stop))
        except DataError:
            raise
        except Exception as error:
            raise DataError(f"Groups.parquet: {str(path)!r} cannot be read: {type(error).__name__}: {error}") from error

    def _read_row_group(self, number: int, group: int) -> Mapping[str, np.ndarray]:
        with self._files[number].reading():  # elements lie where they lay
            file = _opened(self._paths[number])
            names = [name for name in file.schema_arrow.names if name != self._by]
            table = file.read_row_group(group, columns=names)
            return {name: _as_array(table.column(name)) for name in names}

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        found = [
            {name: values[start:stop] for name, values in self._row_group(file, group).items()}
            for file, group, start, stop in self._parts[number]
        ]
        return {name: np.concatenate([part[name] for part in found]) for name in found[0]}


def _opened(path: Path) -> Any:
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(path)


def _as_array(column: Any) -> np.ndarray:
    """Return a column's values; lists of equal length become a second dimension."""
    values = column.to_numpy()
    if values.dtype == object and len(values) and isinstance(values[0], np.ndarray):
        return np.stack(values)
    return values
