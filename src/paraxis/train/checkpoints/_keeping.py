"""The choice of checkpoints that stay."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

from paraxis._calls import arguments
from paraxis.errors import DataError

Notes = Callable[[int], Mapping[str, Any] | None]
"""The notes of a step's checkpoint; ``None`` if they cannot be read."""


@dataclasses.dataclass(frozen=True)
class Keeping:
    """The last ones, those of round steps, and the best one. The arguments are those of ``Checkpoints``."""

    last: int | None
    every: int | None
    best: tuple[str, str] | None

    def __post_init__(self) -> None:
        best = self.best
        is_pair = isinstance(best, (tuple, list)) and len(best) == 2 and all(isinstance(part, str) for part in best)
        if best is not None and not (is_pair and best[1] in {"min", "max"}):
            raise DataError(
                f"Checkpoints: best must be a number of the notes and which one is best, got "
                f"{arguments.described(best)}; "
                f"write best=('loss', 'min') or best=('accuracy', 'max')"
            )

    def check(self, notes: Mapping[str, Any]) -> None:
        """Check that notes have the number by which the best is found.

        Raises:
            DataError: if not.
        """
        if self.best is not None and not _is_number(notes.get(self.best[0])):
            name = self.best[0]
            raise DataError(
                f"save: best={self.best!r} needs a number in notes[{name!r}], which are {dict(notes)!r}; "
                f"write save(step, tree, {{{name!r}: float({name})}})"
            )

    def best_of(self, steps: Sequence[int], notes: Notes) -> int | None:
        """Return the best of the steps; the later one of two equal ones; not one whose number is NaN."""
        if self.best is None:
            return None
        name, which = self.best
        values = {step: (notes(step) or {}).get(name) for step in steps}
        found = {step: value for step, value in values.items() if _is_number(value) and value == value}  # not NaN
        sign = 1 if which == "max" else -1
        return max(found, key=lambda step: (sign * found[step], step), default=None)

    def going(self, steps: Sequence[int], just_saved: int, notes: Notes) -> list[int]:
        """Return the steps whose checkpoints may go. Never the one that was just saved, whatever its number.

        Nor one whose notes cannot be read just now, where they are asked for: it may be the best.
        """
        if self.last is None:
            return []
        stay = {just_saved, self.best_of(steps, notes), *steps[-self.last :]}
        if self.best is not None:
            stay |= {step for step in steps if notes(step) is None}
        return [step for step in steps if step not in stay and (self.every is None or step % self.every)]


def checked_count(name: str, value: Any) -> int | None:
    """Return a number of steps or checkpoints.

    Raises:
        DataError: if it is none.
    """
    if value is None:
        return None
    return arguments.count("Checkpoints", name, value, write=f"{name}=3", error=DataError)


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
