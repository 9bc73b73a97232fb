"""Parts of reductions put together in a fixed order, whatever made them and whenever they came.

As in a binary counter: two parts of equal weight become one of twice that weight. ``n`` parts are put together in the
same pairs, whoever computes them, and at most ``log2(n)`` are held. Sums of many parts lose less than one after the
other: the error grows with the logarithm of their number.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

_MERGE = {
    "sum": jnp.add,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "any": jnp.bitwise_or,
    "all": jnp.bitwise_and,
}


@dataclasses.dataclass
class Totals:
    """The parts so far, of several reductions at once: ``held[i]`` is of ``2**i`` chunks, or ``None``."""

    kinds: Sequence[str]
    held: list[list[Any] | None] = dataclasses.field(default_factory=list)

    def add(self, part: Sequence[Any]) -> None:
        """Add the parts of the next chunk."""
        self._add(list(part), 0)

    def join(self, others: Sequence[list[Any] | None]) -> None:
        """Merge the sums of the next ``2**i`` chunks, after a multiple of so many; or of the last ones."""
        for place, part in reversed(list(enumerate(others))):
            if part is not None:
                self._add(part, place)

    def _add(self, carried: list[Any], place: int) -> None:
        """Add the parts of ``2**place`` chunks."""
        self.held += [None] * (place + 1 - len(self.held))
        while (other := self.held[place]) is not None:
            self.held[place] = None
            carried = self._merged(other, carried)
            place += 1
            self.held += [None] * (place + 1 - len(self.held))
        self.held[place] = carried

    def result(self) -> list[Any]:
        """Return all of them together; later chunks are added to earlier ones."""
        total: list[Any] | None = None
        for part in self.held:
            if part is not None:
                total = part if total is None else self._merged(part, total)
        assert total is not None
        return total

    def _merged(self, left: Sequence[Any], right: Sequence[Any]) -> list[Any]:
        return _merged(tuple(self.kinds), list(left), list(right))


@functools.partial(jax.jit, static_argnums=0)
def _merged(kinds: tuple[str, ...], left: list[Any], right: list[Any]) -> list[Any]:
    return [_MERGE[kind](a, b) for kind, a, b in zip(kinds, left, right, strict=True)]
