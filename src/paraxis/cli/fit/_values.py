"""A column as it is in the file: integers stay integers, text stays text, and what is missing is known."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa

Kind = Literal["number", "integer", "boolean", "text", "other"]

MARKS = frozenset(
    [
        "#N/A",
        "#N/A N/A",
        "#NA",
        "-1.#IND",
        "-1.#QNAN",
        "-NaN",
        "-nan",
        "1.#IND",
        "1.#QNAN",
        "<NA>",
        "N/A",
        "NA",
        "NULL",
        "NaN",
        "None",
        "n/a",
        "nan",
        "null",
    ]
)
"""Words that pandas takes for missing values; among numbers they are that, among texts they are texts."""

_APART = 2**53  # float64 can tell integers apart up to it


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a file.

    Args:
        name: as in the file.
        kind: what it holds; ``other`` cannot be used.
        values: ``(n,)`` float64, int64, uint64, booleans or text objects, by its kind; where one is missing, anything.
        missing: ``(n,)`` booleans.
        stored: its type in the file, for people.
        marks: the words in the file that were taken for missing values.
    """

    name: str
    kind: Kind
    values: np.ndarray
    missing: np.ndarray
    stored: str
    marks: tuple[str, ...] = ()

    @property
    def is_number(self) -> bool:
        return self.kind in ("number", "integer", "boolean")

    @property
    def numbers(self) -> np.ndarray:
        """Return the values as quantities: ``(n,)`` float64, NaN where missing."""
        return np.where(self.missing, np.nan, self.values.astype(np.float64))

    @property
    def large(self) -> list[int]:
        """The different integers that are too large for float64 to tell them all apart."""
        found = self.values[~self.missing]
        return np.unique(found[(found > _APART) | (found < -_APART)]).tolist()

    @property
    def merged(self) -> tuple[Any, Any] | None:
        """Two different integers that are one float64, if there are such."""
        if self.kind != "integer":
            return None
        found = np.unique(self.values[~self.missing])
        if not len(found) or (int(found[0]) >= -_APART and int(found[-1]) <= _APART):
            return None
        same = np.flatnonzero(np.diff(found.astype(np.float64)) == 0)
        return (int(found[same[0]]), int(found[same[0] + 1])) if len(same) else None

    def shown(self) -> list[Any]:
        """Return the values for people, nothing where one is missing."""
        return ["" if absent else value for value, absent in zip(self.values.tolist(), self.missing, strict=True)]

    def of_type(self, dtype: np.dtype[Any]) -> "Column":
        """Return the same with values of another type of numbers; where all are missing, of any type."""
        if self.values.dtype == dtype:
            return self
        blank = np.full(len(self.values), "" if dtype == object else 0, dtype)
        values = blank if self.missing.all() else self.values.astype(dtype)
        return of_numpy(self.name, values, self.missing, self.stored, self.marks)

    def rows(self, chosen: np.ndarray) -> "Column":
        return dataclasses.replace(self, values=self.values[chosen], missing=self.missing[chosen])


def joined(columns: Sequence[Column]) -> Column:
    """Return a column of the values of several, which follow each other; they are all text, or none is.

    Those of which nothing is known, as all of it is missing, are of the others' kind.
    """
    told = [column for column in columns if not column.missing.all()] or columns
    kind = told[0].kind if len({column.kind for column in told}) == 1 else "number"
    missing = np.concatenate([column.missing for column in columns])
    blank = np.full(1, {"text": "", "boolean": False}.get(kind, 0), told[0].values.dtype)
    values = np.concatenate([np.repeat(blank, len(one.values)) if one.missing.all() else one.values for one in columns])
    marks = tuple(sorted({mark for column in columns for mark in column.marks}))
    values = values.astype(np.float64) if kind == "number" else values
    kind = "number" if values.dtype.kind == "f" else kind
    return Column(columns[0].name, kind, values, missing, told[0].stored, marks)


def of_arrow(name: str, chunks: pa.ChunkedArray | pa.Array, stored: str = "", marks: tuple[str, ...] = ()) -> Column:
    """Return the column that an array of Arrow is."""
    stored = stored or str(chunks.type)
    if pa.types.is_dictionary(chunks.type):
        chunks = chunks.cast(chunks.type.value_type)
    kind = _arrow_kind(chunks.type)
    missing = np.array(chunks.is_null(), bool)
    if kind == "other":
        return Column(name, kind, np.zeros(len(missing)), missing, stored)
    if pa.types.is_null(chunks.type):
        return Column(name, kind, np.full(len(missing), np.nan), missing, stored, marks)
    if pa.types.is_decimal(chunks.type):
        whole = _as_integers(chunks)
        kind, chunks = ("integer", whole) if whole is not None else ("number", chunks.cast(pa.float64(), safe=False))
    if kind == "text":
        values = np.array(chunks, object)
        values[missing] = ""
    else:
        values = np.array(chunks.fill_null(kind != "boolean" and 0) if missing.any() else chunks)
    return of_numpy(name, values, missing, stored, marks)


def of_numpy(name: str, array: np.ndarray, missing: np.ndarray, stored: str, marks: tuple[str, ...] = ()) -> Column:
    """Return the column that an array ``(n,)`` is; an array of objects is one of text."""
    kinds: dict[str, Kind] = {
        "b": "boolean", "i": "integer", "u": "integer", "f": "number", "U": "text", "O": "text",
    }  # fmt: skip
    kind = kinds.get(array.dtype.kind, "other")
    dtypes = {"b": np.bool_, "i": np.int64, "u": np.uint64, "f": np.float64, "U": object, "O": object}
    values = np.zeros(len(array)) if kind == "other" else array.astype(dtypes[array.dtype.kind])
    if kind == "number":
        missing = missing | np.isnan(values)
    return Column(name, kind, values, missing, stored, marks)


def _arrow_kind(stored: pa.DataType) -> Kind:
    tests: tuple[tuple[Kind, Callable[[Any], bool]], ...] = (
        ("boolean", pa.types.is_boolean),
        ("integer", pa.types.is_integer),
        ("number", lambda t: pa.types.is_floating(t) or pa.types.is_decimal(t) or pa.types.is_null(t)),
        ("text", lambda t: pa.types.is_string(t) or pa.types.is_large_string(t) or pa.types.is_string_view(t)),
    )
    for kind, holds in tests:
        if holds(stored):
            return kind
    return "other"


def _as_integers(decimals: Any) -> Any:
    """Return the same numbers as integers, if their type has no fractions and 64 bits are enough."""
    for dtype in (pa.int64(), pa.uint64()) if decimals.type.scale <= 0 else ():
        try:
            return decimals.cast(dtype)
        except pa.ArrowInvalid:
            continue
    return None
