"""The target: the objective that fits it, and its values as the objective takes them."""

import dataclasses
from typing import Any

import numpy as np

from paraxis.cli._errors import CommandError
from paraxis.cli.fit._csv import DIGITS
from paraxis.cli.fit._tables import quoted
from paraxis.cli.fit._values import Column, Kind

FEW = 20  # so many different integers, and no more, are taken for classes
UNKNOWN = -1
_EXACT = 2**53  # from here on, a float may be one of several integers


@dataclasses.dataclass(frozen=True)
class Target:
    """The target.

    Args:
        name: of its column.
        objective: ``logistic``, ``squared`` or ``poisson``.
        classes: the labels in order, of a logistic objective; else empty.
        kind: what its column held.
    """

    name: str
    objective: str
    classes: tuple[Any, ...]
    kind: Kind

    def encoded(self, column: Column) -> np.ndarray:
        """``(n,)``: the numbers of the classes, ``UNKNOWN`` if it is none of them; or the values."""
        if self.objective != "logistic":
            return column.numbers
        # Python compares integers with floats exactly, and neither is equal to a text.
        number = {label: index for index, label in enumerate(self.classes)}
        if column.kind == "text":
            return np.array([number.get(label, UNKNOWN) for label in column.values])
        found, places = np.unique(column.values, return_inverse=True)
        return np.array([number.get(label, UNKNOWN) for label in found.tolist()])[places]

    def labels(self, numbers: np.ndarray) -> np.ndarray:
        """Return the labels of classes by their numbers, in the type of the target's column."""
        whole = np.uint64 if self.kind == "integer" and self.classes[-1] > np.iinfo(np.int64).max else np.int64
        dtypes = {"text": object, "boolean": bool, "integer": whole}
        return np.array(self.classes, dtypes.get(self.kind, np.float64))[numbers]


def choose(column: Column, asked: str) -> tuple[Target, str]:
    """Return the target with the objective asked for, or that suits it; and why, in words.

    Raises:
        CommandError: if the column cannot be the target of that objective.
    """
    name = column.name
    if column.kind == "other":
        raise CommandError(
            f"the target {name!r} holds neither numbers nor text but {column.stored}; turn it into one of these"
        )
    objective, reason = (asked, "as asked for") if asked != "auto" else _suitable(column)
    if objective == "logistic":
        classes = _classes(column)
        alike = _alike(classes)
        note = f"; {quoted(alike)} are different classes: they differ in case or spaces" if alike else ""
        return Target(name, objective, classes, column.kind), reason + note
    if column.kind == "text":
        raise CommandError(
            f"--objective {objective} needs numbers, but the target {name!r} holds text, such as "
            f"{column.values[0]!r}; write --objective logistic",
            remedies=[{"objective": "logistic"}],
        )
    if column.merged:
        raise CommandError(
            f"the target {name!r} holds integers that are one float64, such as {quoted(column.merged)}; subtract the "
            f"least of them from all"
        )
    if objective == "poisson" and column.values.min() < 0:
        raise CommandError(
            f"--objective poisson needs counts, but the target {name!r} holds {column.values.min():g}; "
            f"write --objective squared",
            remedies=[{"objective": "squared"}],
        )
    if objective == "poisson" and column.values.max() == 0:
        raise CommandError(f"--objective poisson needs a count above 0, but all of the target {name!r} are 0")
    if column.values.min() == column.values.max():
        raise CommandError(f"the target {name!r} is {column.values[0]:g} in every row; there is nothing to predict")
    return Target(name, objective, (), column.kind), reason


def _alike(classes: tuple[Any, ...]) -> list[str]:
    """Return labels that are the same but for case and spaces."""
    plain = [" ".join(str(label).casefold().split()) for label in classes]
    return [label for label, own in zip(classes, plain, strict=True) if plain.count(own) > 1][:6]


def _suitable(column: Column) -> tuple[str, str]:
    name = column.name
    different = 0 if column.kind == "text" else len(np.unique(column.values))
    if column.kind in ("text", "boolean"):
        held = column.stored if column.stored in DIGITS else "text" if column.kind == "text" else "true and false"
        return "logistic", f"{name!r} holds {held}"
    if column.kind == "integer" and different <= FEW:
        return "logistic", f"{name!r} holds {different} different integers; for quantities, write --objective squared"
    if column.kind == "integer":
        return "squared", f"{name!r} holds many different integers"
    if (column.values != np.round(column.values)).any():
        return "squared", f"{name!r} holds fractions"
    hint = "; for classes, write --objective logistic" if different <= FEW else ""
    return "squared", f"{name!r} holds whole numbers written with a decimal point{hint}"


def _classes(column: Column) -> tuple[Any, ...]:
    name = column.name
    if column.kind == "number" and (column.values != np.round(column.values)).any():
        fraction = column.values[column.values != np.round(column.values)][0]
        raise CommandError(
            f"--objective logistic needs classes, but the target {name!r} holds fractions, such as {fraction:g}; "
            f"write --objective squared",
            remedies=[{"objective": "squared"}],
        )
    found = np.unique(column.values).tolist()
    if column.kind == "number":
        if max(abs(found[0]), abs(found[-1])) >= _EXACT:
            raise CommandError(
                f"the target {name!r} holds labels from 2^53 on as {column.stored}, which does not tell all of them "
                f"apart; store them as integers or as text"
            )
        found = [int(label) for label in found]
    if len(found) < 2:
        raise CommandError(f"the target {name!r} holds one class only, {quoted(found)}; there is nothing to tell apart")
    return tuple(found)
