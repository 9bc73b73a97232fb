"""The weight of each row: by a column of the file, by its class, or both."""

import dataclasses
import difflib
import math
from collections.abc import Sequence

import numpy as np

from paraxis.cli._errors import CommandError
from paraxis.cli.fit._columns import require_no_marks
from paraxis.cli.fit._options import FitOptions
from paraxis.cli.fit._tables import Table, quoted
from paraxis.cli.fit._targets import Target
from paraxis.cli.fit._values import Column

_BALANCED = "balanced"


@dataclasses.dataclass(frozen=True)
class Weight:
    """The weights of the rows.

    Args:
        own: of the column, ``(num_rows,)``; by these, metrics count.
        factors: by class, of a row's own, ``(num_rows,)``.
        words: the same for people.
    """

    own: np.ndarray
    factors: np.ndarray
    words: str

    def fitted(self, rows: np.ndarray) -> np.ndarray:
        """Return the weights of some rows, of mean 1: a strength means the same whatever their unit is."""
        weight = self.own[rows] * self.factors[rows]
        return weight / weight.mean()


def require_numbers(columns: Sequence[Column], table: Table) -> None:
    """Check columns of weights, whatever is missing there.

    Raises:
        CommandError: if there are other things than numbers that are finite and not negative.
    """
    for column in columns:
        require_no_marks(table, [column] if column.kind == "text" else [])
        if not column.is_number:
            raise CommandError(
                f"--weights {column.name} holds {column.stored}; weights must be numbers; write --weights with another "
                f"column, or leave it out"
            )
        present = column.numbers[~column.missing]
        wrong = present[(present < 0) | ~np.isfinite(present)]
        if len(wrong):
            raise CommandError(
                f"--weights {column.name} holds {wrong[0]:g}; weights must be finite and not negative: leave those "
                f"rows out"
            )


def found(
    options: FitOptions, table: Table, target: Target, y: np.ndarray, train: np.ndarray, test: np.ndarray
) -> Weight | None:
    """Return the weights that are asked for; ``None`` if none are.

    Raises:
        CommandError: if rows that are fitted to, or those held out, do not count; or a class has no such weight.
    """
    if options.weights is None and not options.class_weight:
        return None
    own = np.ones(len(y)) if options.weights is None else table.columns[options.weights].numbers
    factors = _factors(options.class_weight, target, y, own, train)[y] if options.class_weight else np.ones(len(y))
    by_class = target.objective == "logistic"
    counted = np.bincount(y[train], own[train] * factors[train], len(target.classes)) if by_class else own[train].sum()
    if not np.all(counted > 0) or (len(test) and not own[test].any()):
        where = f"class {target.classes[int(np.argmin(counted))]!r}" if by_class else "the target"
        raise CommandError(f"{where} has no row that counts among those fitted to or held out: all weights are 0 there")
    words = [options.weights] if options.weights is not None else []
    return Weight(own, factors, ", ".join([*words, *options.class_weight]))


def _factors(given: Sequence[str], target: Target, y: np.ndarray, own: np.ndarray, train: np.ndarray) -> np.ndarray:
    """Return the factor of each class, ``(num_classes,)``."""
    if target.objective != "logistic":
        raise CommandError(
            f"--class-weight needs classes, but the target {target.name!r} holds values; leave it out",
            remedies=[{"class_weight": lambda _: ()}],
        )
    if _BALANCED in given:
        if len(given) > 1:
            raise CommandError(
                f"--class-weight {_BALANCED} says it for all classes; leave the others out",
                remedies=[{"class_weight": lambda _: (_BALANCED,)}],
            )
        totals = np.bincount(y[train], own[train], len(target.classes))
        return totals.sum() / (len(totals) * np.where(totals > 0, totals, 1))
    labels = [_label(label) for label in target.classes]
    factors = np.ones(len(labels))
    for text in given:
        label, _, number = text.rpartition("=")
        factor = _number(number)
        if factor is None or not label:
            raise CommandError(
                f"--class-weight {text!r} must be LABEL=NUMBER, with a finite number above 0; write --class-weight "
                f"{labels[0]}=2"
            )
        if label not in labels:
            near = difflib.get_close_matches(label, labels, n=1)
            others = tuple(other for other in given if other != text) + tuple(f"{name}={number}" for name in near)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise CommandError(
                f"--class-weight {text!r} names no class; they are {quoted(labels)}{hint}",
                remedies=[{"class_weight": lambda _, others=others: others}],
            )
        factors[labels.index(label)] = factor
    return factors


def _label(label: object) -> str:
    return str(label).lower() if isinstance(label, bool) else str(label)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 < number < math.inf else None
