"""A forgotten mask, noticed.

Elements of different length are padded by repeating the last row. A function that uses the mask gives the same bits
whatever the rows between hold; a mean that counts them does not. So one chunk of each pass runs again, by the same
compiled program, with other rows of the same elements there, and the results are compared: with the shared values at
hand, and with others, because at some values, such as weights of zero, all rows give the same. The very last row stays
the element's own last one, and the others are its own as well, so that ``x[-1]``, a maximum, or a shift by one changes
nothing either.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from paraxis.streaming._resume import plain

_ROUNDING = 64
"""Units in the last place, of the largest number, that a shift which cancels out may cost."""


def can_differ(lengths: np.ndarray, length: int) -> np.ndarray:
    """Return which elements have padding that can hold other rows: two, and two rows of their own."""
    return (lengths > 1) & (lengths < length - 1)


def counted(
    run: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]],
    shared: Sequence[Any],
    rows: Sequence[Any],
    lengths: Sequence[np.ndarray | None],
    compared: Sequence[int],
) -> int | None:
    """Return the number of a result in which padding is counted; ``None`` if there is none.

    Args:
        run: a pass, as a function of shared values and of the chunk's rows.
        shared, rows: what it is given.
        lengths: for each of the rows, the elements' own numbers of rows; ``None``: it is not padded.
        compared: which results must not depend on padding.
    """
    others = [x if own is None else _otherwise(np.asarray(x), own) for x, own in zip(rows, lengths, strict=True)]
    random = np.random.default_rng(0)
    for values in (shared, [_elsewhere(x, random) for x in shared]):
        found, given = run(values, rows), run(values, others)
        differ = [at for at in compared if not _equal(found[at], given[at])]
        again = run(values, rows) if differ else found  # some devices add in an order of their own
        wrong = [at for at in differ if _is_more(found[at], given[at], again[at])]
        if wrong:
            return wrong[0]
    return None


def _otherwise(rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return rows with others of the same element as padding, but for the very last one."""
    at, own = np.arange(rows.shape[1]), np.maximum(lengths, 1)[:, None]
    kept = (at < own) | (at == rows.shape[1] - 1)
    places = np.where(kept, np.minimum(at, own - 1), at % own)
    return np.take_along_axis(rows, places.reshape(*places.shape, *[1] * (rows.ndim - 2)), axis=1)


def _elsewhere(x: Any, random: np.random.Generator) -> Any:
    """Return other numbers near a shared value's."""
    dtype = jnp.result_type(x)
    if not jnp.issubdtype(dtype, jnp.floating):
        return x
    near = np.asarray(x, np.float64)
    near = near * (1 + 0.1 * random.normal(size=near.shape)) + 0.1 * random.normal(size=near.shape)
    return near.astype(dtype)


def _equal(found: Any, given: Any) -> bool:
    a, b = plain(found), plain(given)
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _is_more(found: Any, given: Any, again: Any) -> bool:
    """Return whether two results differ by more than rounding, and more than those of the same rows do."""
    a, b, c = plain(found), plain(given), plain(again)
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
