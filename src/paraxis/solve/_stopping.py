"""When a run stops, and why: solved, out of patience, out of digits, or broken."""

import enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paraxis.solve import _trees as trees
from paraxis.solve._problem import Point
from paraxis.solve._search import noise

_CONFIRMATIONS = 3  # of a solution, that may fail


class Status(enum.IntEnum):
    """The reason why a solver stopped, or that it has not stopped.

    Only ``CONVERGED`` means that the test for a solution was passed. A state holds the number as an array, so that it
    works under ``jit`` and ``vmap``; ``Status(int(state.status)).words`` is the reason in words.

    Example:
        >>> import paraxis as px
        >>> px.solve.Status(1)
        <Status.CONVERGED: 1>
        >>> px.solve.Status.ITERATION_LIMIT.words
        'the limit of iterations was reached before the error was as small as tol asks'
    """

    RUNNING = 0
    CONVERGED = 1
    ITERATION_LIMIT = 2
    LINE_SEARCH_FAILED = 3
    NOT_FINITE = 4
    PRECISION = 5
    INTERRUPTED = 6

    @property
    def words(self) -> str:
        """The reason in words."""
        return _WORDS[self]


_WORDS = {
    Status.RUNNING: "the solver has not stopped",
    Status.CONVERGED: "the error is as small as tol asks",
    Status.ITERATION_LIMIT: "the limit of iterations was reached before the error was as small as tol asks",
    Status.LINE_SEARCH_FAILED: (
        "no step along the direction of descent makes the value smaller: is the gradient the derivative of the value?"
    ),
    Status.NOT_FINITE: "the value or its gradient is not finite where the solver started or went",
    Status.PRECISION: (
        "neither the value nor the gradient becomes smaller by more than rounding lets one tell; a wider dtype, or "
        "columns on one scale, may allow more"
    ),
    Status.INTERRUPTED: "Ctrl-C ended the run before the error was as small as tol asks",
}


class Progress(NamedTuple):
    """The best so far, by which it is told that rounding allows no more."""

    best_value: jax.Array
    best_error: jax.Array
    num_stalled: jax.Array
    first_value: jax.Array
    num_refuted: jax.Array  # solutions that were none when predictions were computed anew


def begin(point: Point, error: jax.Array, tol: float) -> tuple[Progress, jax.Array]:
    """Before the first iteration, and the status."""
    status = jnp.where(error <= tol, Status.CONVERGED, Status.RUNNING)
    finite = jnp.isfinite(point.value) & trees.all_finite(point.grad)
    status = jnp.where(finite, status, Status.NOT_FINITE).astype(jnp.int32)
    zero = jnp.zeros((), jnp.int32)
    return Progress(point.value, error, zero, point.value, zero), status


def begun(problem: Any, point: Point, error: jax.Array, tol: float) -> dict[str, Any]:
    """Return the fields that the states of all solvers begin with."""
    (progress, status), zero, one = begin(point, error, tol), jnp.zeros((), jnp.int32), jnp.ones((), jnp.int32)
    return {
        "value": point.value,
        "grad": point.grad,
        "aux": point.aux,
        "cache": point.cache,
        "iter_num": zero,
        "error": error,
        "failed_linesearch": jnp.array(False),
        "num_fun_eval": one,
        "num_grad_eval": one,
        "num_linesearch_iter": zero,
        "status": status,
        "data_passes": one if problem.is_table else 2 * one,
        "progress": progress,
    }


def recheck(state: Any, problem: Any, point: Point, error: jax.Array, options: Any) -> Any:
    """Return a state at a point that was computed anew, with its status by the error there.

    If a solution is none after all, the run goes on; if that does not help, rounding allows none. Where no step helped
    any more, the status says so still, unless this is a solution. ``options`` are the solver's ``tol`` and ``maxiter``.
    """
    before = state.status
    begun, status = begin(point, error, options.tol)
    status = jnp.where((status == Status.RUNNING) & (state.iter_num >= options.maxiter), Status.ITERATION_LIMIT, status)
    unsolved = (status == Status.RUNNING) | (status == Status.ITERATION_LIMIT)
    refuted = (before == Status.CONVERGED) & (status == Status.RUNNING)
    status = jnp.where(refuted & (state.progress.num_refuted >= _CONFIRMATIONS), Status.PRECISION, status)
    is_stuck = (before == Status.PRECISION) | (before == Status.LINE_SEARCH_FAILED)
    status = jnp.where(is_stuck & unsolved, before, status).astype(jnp.int32)
    first, num_refuted = state.progress.first_value, state.progress.num_refuted + refuted
    return state._replace(
        value=point.value,
        grad=point.grad,
        error=error,
        cache=point.cache,
        status=status,
        progress=begun._replace(first_value=first, num_refuted=num_refuted),
        data_passes=state.data_passes + (1 if problem.is_table else 2),
    )


def advance(
    state: Any,
    value: jax.Array,
    error: jax.Array,
    options: Any,
    *,
    patience: int,
    counts: Any,
    promised: jax.Array,
    hopeless: jax.Array,
    finite: jax.Array,
) -> tuple[Progress, jax.Array]:
    """After an iteration from a state to a value and an error, and the status; ``options`` are the solver's.

    Args:
        patience: iterations without progress, or a quarter of all if that is more, before rounding is blamed.
        counts: whether an iteration without progress counts as one.
        promised: whether the step promised more than rounding can hide: then it is not to blame.
        hopeless: whether no step was found, and there is no other direction to try.
        finite: whether everything is.
    """
    progress, iter_num = state.progress, state.iter_num + 1
    lower = value < progress.best_value - noise(progress.best_value) / 8
    flatter = error < 0.9 * progress.best_error
    num_stalled = jnp.where(lower | flatter, 0, progress.num_stalled + counts).astype(jnp.int32)
    stuck = hopeless | (num_stalled >= jnp.maximum(patience, iter_num // 4))
    status = jnp.where(iter_num >= options.maxiter, Status.ITERATION_LIMIT, Status.RUNNING)
    status = jnp.where(stuck, jnp.where(promised, Status.LINE_SEARCH_FAILED, Status.PRECISION), status)
    status = jnp.where(error <= options.tol, Status.CONVERGED, status)
    status = jnp.where(finite, status, Status.NOT_FINITE).astype(jnp.int32)
    # Only what counts as progress is the new best: many small steps must add up.
    best_value = jnp.where(lower, value, progress.best_value)
    best_error = jnp.where(flatter, error, progress.best_error)
    return progress._replace(best_value=best_value, best_error=best_error, num_stalled=num_stalled), status
