"""Searches for a step along a direction, and what a search of your own has to be.

:func:`zoom` keeps a bracket, whose lower end is better than where the search began and goes further down, and whose
upper end is worse, or goes up. Between the two lies a step that will do (Moré and Thuente 1994). Near a minimum, where
values differ by rounding, slopes alone decide (the approximate Wolfe test of Hager and Zhang 2005).
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.solve import _trees as trees
from paraxis.solve._problem import Trial
from paraxis.solve._streaming import while_loop

_DECREASE = 1e-4  # of what the first slope promises: c1 of the Wolfe conditions
_MAX_TRIALS = 30
_GROWTH = (1.5, 5.0)  # how much further to look while nothing bounds the step
_MARGIN = 0.1  # of a bracket's width is left at its ends
_TRIALS_OF_NOISE = 8  # where even the whole of what a step promises is rounding, no more trials than this
_NOISE = 32  # roundings of the value that count as none


class SearchResult(NamedTuple):
    """What a :class:`LineSearch` returns."""

    stepsize: Any  # 0 if it failed
    trial: Trial  # at that step
    failed: Any  # whether nothing better was found
    num_trials: Any


class LineSearch(Protocol):
    """A search for a step along a line, for ``LBFGS(fun, linesearch=…)``: a function, or an object that is called.

    It is traced by JAX, so it loops by ``jax.lax``. Of a linear model, a trial reads no rows.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> def whole(origin, at, first):  # takes the first step, whatever it leads to
        ...     trial = at(first)
        ...     return px.solve.SearchResult(first, trial, ~jnp.isfinite(trial.value), 1)
        >>> fun = lambda p: jnp.sum((p - 1) ** 2)
        >>> px.solve.LBFGS(fun, linesearch=whole).run(jnp.zeros(2))[0]
        Array([1., 1.], dtype=float32)
    """

    def __call__(self, origin: Trial, at: Callable[[Any], Trial], first: Any, /) -> SearchResult:
        """Search from ``origin``, where the step is 0, the step ``first`` being tried first.

        ``at(stepsize)`` returns the :class:`Trial` of a step: its value, slope and curvature along the line, scalars.
        """
        ...


def noise(value: Any) -> Any:
    """By how much two values of this size may differ and mean the same."""
    return _NOISE * jnp.finfo(value.dtype).eps * abs(value)


def _is_lower(origin: Trial, trial: Trial, stepsize: Any) -> Any:
    """Whether a step keeps to what the slope promises, or to the value, as far as rounding lets one tell."""
    # The difference is exact where it is small; adding what was promised to the value would round it away.
    change = trial.value - origin.value
    return (change <= _DECREASE * stepsize * origin.slope) | (abs(change) <= noise(origin.value))


def backtracking(
    origin: Trial, at: Callable[[Any], Trial], first: Any, *, shrink: float = 0.5, max_trials: int = _MAX_TRIALS
) -> SearchResult:
    """Shorten the step until the value decreases by a part of what the slope promises (Armijo 1966)."""
    xp = trees.numpy_of(origin.value)

    def go_on(so_far: SearchResult) -> Any:
        can_tell = abs(origin.slope) * so_far.stepsize >= noise(origin.value)
        return so_far.failed & (so_far.num_trials < max_trials) & (can_tell | (so_far.num_trials == 0))

    def shortened(so_far: SearchResult) -> SearchResult:
        stepsize = so_far.stepsize * xp.where(so_far.num_trials == 0, 1, shrink).astype(first.dtype)
        trial = at(stepsize)
        failed = ~xp.asarray(_is_lower(origin, trial, stepsize))
        return SearchResult(stepsize, trial, failed, so_far.num_trials + 1)

    begin = SearchResult(first, origin, xp.asarray(True), xp.zeros((), int))
    last = while_loop(xp is np, go_on, shortened, begin)
    stepsize = xp.where(last.failed, 0, last.stepsize).astype(first.dtype)
    return last._replace(stepsize=stepsize, trial=trees.choose(last.failed, origin, last.trial))


class _Bracket(NamedTuple):
    stepsize: jax.Array  # to try next
    low: jax.Array  # an end's step size, value and slope
    high: jax.Array
    best: Trial  # at low, or what was accepted
    accepted: jax.Array
    num_trials: jax.Array


def zoom(origin: Trial, at: Callable[[Any], Trial], first: Any, *, slope_left: float = 0.9) -> SearchResult:
    """Search for a step of the strong Wolfe conditions, with Newton's trials where curvatures are known.

    ``slope_left`` is what a step may leave of the first slope: c2 of the conditions.
    """
    dtype = origin.value.dtype
    most = jnp.where(jnp.abs(origin.slope) * first < noise(origin.value), _TRIALS_OF_NOISE, _MAX_TRIALS)

    def body(state: _Bracket) -> _Bracket:
        trial = at(state.stepsize)
        finite = jnp.isfinite(trial.value)  # what is not has no slope that one could follow
        here = jnp.stack([state.stepsize, trial.value, jnp.where(finite, trial.slope, jnp.nan)])
        lower = _is_lower(origin, trial, state.stepsize) & finite & jnp.isfinite(trial.slope)
        accepted = lower & (jnp.abs(trial.slope) <= -slope_left * origin.slope)
        goes_up = ~lower | (trial.slope > 0)
        low, high = jnp.where(goes_up, state.low, here), jnp.where(goes_up, here, state.high)
        following = _next(low, high, trial, state.stepsize, state.num_trials, noise(origin.value))
        return _Bracket(
            jnp.where(accepted, state.stepsize, following).astype(dtype),
            jnp.where(accepted, here, low),
            high,
            trees.choose(accepted | ~goes_up, trial, state.best),
            accepted,
            state.num_trials + 1,
        )

    begin, nowhere = jnp.stack([0 * origin.value, origin.value, origin.slope]), jnp.full(3, jnp.inf, dtype)
    bracket = _Bracket(jnp.asarray(first, dtype), begin, nowhere, origin, jnp.array(False), jnp.zeros((), int))
    last = jax.lax.while_loop(lambda state: ~state.accepted & (state.num_trials < most), body, bracket)
    failed = ~last.accepted & ~(last.low[1] < origin.value)
    stepsize = jnp.where(failed, 0, last.low[0])
    return SearchResult(stepsize, trees.choose(failed, origin, last.best), failed, last.num_trials)


def _next(low: Any, high: Any, trial: Trial, at: jax.Array, count: jax.Array, rounding: jax.Array) -> jax.Array:
    """Return where to look next, after a trial at ``at``."""
    (start, value, slope), (stop, value_high, slope_high), curvature = low, high, trial.curvature
    width, is_known = stop - start, (curvature > 0) & jnp.isfinite(trial.value)
    newton = at - trial.slope / jnp.where(is_known, curvature, 1)  # to where the slope would vanish
    # Else: the minimum of the cubic through both ends (Nocedal and Wright 2006, equation 3.59), or by slopes alone.
    d1 = slope + slope_high - 3 * (value_high - value) / width
    d2 = jnp.sqrt(jnp.maximum(d1**2 - slope * slope_high, 0))
    cubic = stop - width * (slope_high + d2 - d1) / (slope_high - slope + 2 * d2)
    secant = start - slope * width / (slope_high - slope)
    inside = jnp.where(jnp.abs(value_high - value) > rounding, cubic, secant)
    inside, margin = jnp.where(is_known, newton, inside), _MARGIN * width
    usable = jnp.isfinite(inside) & (count % 3 != 2)
    inside = jnp.where(usable, jnp.clip(inside, start + margin, stop - margin), start + 0.5 * width)
    further = jnp.clip(jnp.where(is_known, newton, 2 * at), _GROWTH[0] * at, _GROWTH[1] * at)
    return jnp.where(jnp.isfinite(stop), inside, further)
