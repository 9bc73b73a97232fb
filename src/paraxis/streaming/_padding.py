"""A forgotten mask, found by running a chunk of each pass again, with its elements padded to another length.

Padding repeats an element's last row, whatever the length, so the function sees nothing that no element has. What uses
the mask gives the same numbers, to rounding, at the shared values at hand, and at others: at some, such as weights of
zero, all rows give the same. ``x[-1]`` and a maximum do not depend on the length.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

_ROUNDING = 64  # units in the last place, of the largest number, that a sum in another order may cost


def counted(
    run: Callable[[bool, Sequence[Any]], list[np.ndarray]], shared: list[Any], shared_longer: list[Any], *, varies: bool
) -> int | None:
    """Return the number of a result that depends on padding.

    ``run`` gives the results for elements padded to their length, or to a longer one, and for shared values, of which
    there are some for both lengths; ``varies``: whether others than these may be tried.
    """
    for change in (0.0, 0.1) if varies else (0.0,):
        values = [_near(x, at, change) for at, x in enumerate(shared)]
        longer = run(True, [_near(x, at, change) for at, x in enumerate(shared_longer)])
        # Where large numbers cancel out, rounding is seen in what the least change of the shared values does.
        noisy = run(False, [_near(x, at, 4 * _eps(x)) for at, x in enumerate(values)])
        for at, (a, b, c) in enumerate(zip(run(False, values), longer, noisy, strict=True)):
            if a.shape == b.shape and _differ(a, b, c):
                return at
    return None


def _eps(x: Any) -> float:
    dtype = jnp.result_type(x)
    return float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.inexact) else 0.0


def _near(x: Any, seed: int, change: float) -> Any:
    """Return other numbers near a shared value's."""
    if not change or not jnp.issubdtype(jnp.result_type(x), jnp.floating):
        return x
    host = np.asarray(x, np.float64)
    return (host + change * (1 + np.abs(host)) * np.random.default_rng(seed).normal(size=host.shape)).astype(x.dtype)


def _differ(first: np.ndarray, longer: np.ndarray, again: np.ndarray) -> bool:
    """Return whether results differ by more than rounding, and more than those of nearly the same values do."""
    a, b, c = (np.asarray(x).astype(complex) for x in (first, longer, again))
    with np.errstate(invalid="ignore"):
        size, noise = (np.nan_to_num(np.abs(x), nan=0.0, posinf=0.0).max(initial=0.0) for x in (a, a - c))
    return not np.allclose(a, b, rtol=0.0, atol=min(_ROUNDING * _eps(first), 0.01) * size + 100 * noise, equal_nan=True)
