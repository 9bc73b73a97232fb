"""A forgotten mask, found by running a chunk of each pass again, with other rows as padding.

What uses the mask gives the same bits, by the same compiled program: at the shared values at hand, and at others, since
at some, such as weights of zero, all rows give the same. The very last row stays, and the others are the element's own,
so that ``x[-1]``, a maximum, or a shift by one changes nothing.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

_ROUNDING = 64  # units in the last place, of the largest number, that a shift which cancels out may cost


def counted(run: Callable[..., Any], shared: list[Any], rows: list[Any], lengths: dict[int, np.ndarray]) -> int | None:
    """Return the number of a result that depends on padding; of padded ``rows``, ``lengths`` are the elements' own."""
    others = [_otherwise(x, lengths[n]) if n in lengths else x for n, x in enumerate(rows)]
    random = np.random.default_rng(0)
    for values in (shared, [_near(x, random) for x in shared]):
        found, given = run(values, rows), run(values, others)
        if any(np.asarray(a).tobytes() != np.asarray(b).tobytes() for a, b in zip(found, given, strict=True)):
            for number, results in enumerate(zip(found, given, run(values, rows), strict=True)):
                if _differ(*results):
                    return number
    return None


def _otherwise(rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return rows with others of the same element as padding, but for the very last one."""
    at, own = np.arange(rows.shape[1]), np.maximum(lengths, 1)[:, None]
    places = np.where((at < own) | (at == at[-1]), np.minimum(at, own - 1), at % own)
    return np.take_along_axis(rows, places.reshape(*places.shape, *[1] * (rows.ndim - 2)), axis=1)


def _near(x: Any, random: np.random.Generator) -> Any:
    """Return other numbers near a shared value's."""
    if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
        return x
    host = np.asarray(x, np.float64)
    return (host + 0.1 * (1 + np.abs(host)) * random.normal(size=host.shape)).astype(jnp.result_type(x))


def _differ(found: Any, given: Any, again: Any) -> bool:
    """Return whether results differ by more than rounding, and more than those of the same rows do on some devices."""
    eps = float(jnp.finfo(found.dtype).eps) if jnp.issubdtype(found.dtype, jnp.inexact) else 0.0
    a, b, c = (np.asarray(x).astype(complex) for x in (found, given, again))
    with np.errstate(invalid="ignore"):
        size, noise = (np.nan_to_num(np.abs(x), nan=0.0, posinf=0.0).max(initial=0.0) for x in (a, a - c))
    return not np.allclose(a, b, rtol=0.0, atol=min(_ROUNDING * eps, 0.01) * size + 100 * noise, equal_nan=True)
