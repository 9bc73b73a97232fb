"""A forgotten mask, noticed.

Elements of different length are filled up by repeating the last row. A function that uses the mask gives the same bits
whatever the rows between hold; a mean that counts them does not. So one chunk of each pass runs once more, by the same
compiled program, with other rows of the same elements there, and what it gives is compared. The very last row stays the
element's own last one, and the others are its own as well, so that ``x[-1]``, a maximum, or a shift by one changes
nothing either.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.errors import LoweringError

_ROUNDING = 64
"""Units in the last place, of the largest number, that a shift which cancels out may cost."""


class PaddingCountedError(LoweringError):
    """Says, by their numbers, what a pass gives that depends on padding, and which of its rows it depends on."""


def can_differ(lengths: np.ndarray, length: int) -> np.ndarray:
    """Return which elements have padding that can hold other rows: two, and two rows of their own."""
    return (lengths > 1) & (lengths < length - 1)


@dataclasses.dataclass(frozen=True)
class Probe:
    """The means to look at one chunk.

    Attributes:
        at: the chunk's number.
        lengths: its elements' own numbers of rows.
        filled: which of the pass's rows are filled up to the common length.
        compared: which of what the pass gives must not depend on padding.
    """

    at: int
    lengths: np.ndarray
    filled: Sequence[bool]
    compared: Sequence[int]

    def look(self, run: Callable[[list[Any]], Sequence[Any]], rows: Sequence[Any], found: Sequence[Any]) -> bool:
        """Run the chunk with other padding; return whether there was any, so that all is known.

        Args:
            run: the pass, as a function of the chunk's rows.
            rows: those of the chunk.
            found: what it gives for them.

        Raises:
            PaddingCountedError: if what it gives is not the same.
        """
        filled = [at for at, is_filled in enumerate(self.filled) if is_filled]
        others = {at: self._otherwise(np.asarray(rows[at])) for at in filled}
        if all(np.array_equal(others[at], np.asarray(rows[at])) for at in filled):
            return False

        def changed(places: Sequence[int]) -> list[int]:
            given = run([others[at] if at in places else x for at, x in enumerate(rows)])
            differ = [at for at in self.compared if not _equal(found[at], given[at])]
            again = run(list(rows)) if differ else found  # some devices add in an order of their own
            return [at for at in differ if _is_more(found[at], given[at], again[at])]

        wrong = changed(filled)
        if wrong:
            raise PaddingCountedError(wrong[0], [at for at in filled if changed([at])] or filled)
        return True

    def _otherwise(self, rows: np.ndarray) -> np.ndarray:
        """Return rows with others of the same element as padding, but for the very last one."""
        at, own = np.arange(rows.shape[1]), np.maximum(self.lengths, 1)[:, None]
        kept = (at < own) | (at == rows.shape[1] - 1)
        places = np.where(kept, np.minimum(at, own - 1), at % own)
        return np.take_along_axis(rows, places.reshape(*places.shape, *[1] * (rows.ndim - 2)), axis=1)


def _host(x: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.extended) else x)


def _equal(found: Any, given: Any) -> bool:
    a, b = _host(found), _host(given)
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _is_more(found: Any, given: Any, again: Any) -> bool:
    """Return whether two results differ by more than rounding, and more than those of the same rows do."""
    a, b, c = _host(found), _host(given), _host(again)
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return bool((a == c).all())
    unit = float(jnp.finfo(a.dtype).eps)
    a, b, c = (
        x.astype(np.result_type(x.dtype, np.float64)) if x.dtype.kind in "fc" else x.astype(float) for x in (a, b, c)
    )
    with np.errstate(invalid="ignore"):
        size, noise = (np.nan_to_num(np.abs(x), nan=0.0, posinf=0.0).max(initial=0.0) for x in (a, a - c))
        near = np.abs(a - b) <= min(_ROUNDING * unit, 0.01) * size + 100 * noise
    return not bool((near | (a == b) | (np.isnan(a) & np.isnan(b))).all())
