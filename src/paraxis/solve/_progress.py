"""The end of a run: solved, out of patience, out of digits, or broken."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paraxis import _html as html
from paraxis._axes import arrays
from paraxis.errors import ShapeError
from paraxis.solve import _trees as trees, _watching as watching
from paraxis.solve._problem import Point, Problem
from paraxis.solve._search import noise
from paraxis.solve._status import Status

_PATIENCE = 10  # iterations without progress, or a quarter of all if that is more, before rounding is blamed
_PROMISE = 100  # times what rounding hides: a slope that promises so much, and does not keep it, is wrong


class Progress(NamedTuple):
    """The best so far, by which it is told that rounding allows no more."""

    best_value: jax.Array
    best_error: jax.Array
    num_stalled: jax.Array
    first_value: jax.Array


def begin(point: Point, error: jax.Array, tol: float) -> tuple[Progress, jax.Array]:
    """Before the first iteration, and the status."""
    status = jnp.where(error <= tol, Status.CONVERGED, Status.RUNNING)
    finite = jnp.isfinite(point.value) & trees.all_finite(point.grad)
    status = jnp.where(finite, status, Status.NOT_FINITE).astype(jnp.int32)
    return Progress(point.value, error, jnp.zeros((), jnp.int32), point.value), status


def confirmed(problem: Problem, params: Any, state: Any, *, tol: float, maxiter: int) -> Any:
    """Return a state that says it converged, judged by the point there computed anew.

    Predictions that were added up step by step carry the rounding of all steps, and so does their gradient.
    """
    if not problem.adds_up:
        return state
    point = problem.start(params)
    return judged_anew(state, problem, point, trees.norm(point.grad), tol=tol, maxiter=maxiter)


def judged_anew(state: Any, problem: Problem, point: Point, error: jax.Array, *, tol: float, maxiter: int) -> Any:
    """Return a state at a point that was computed anew, with its status by the error there."""
    begun, status = begin(point, error, tol)
    status = jnp.where((status == Status.RUNNING) & (state.iter_num >= maxiter), Status.ITERATION_LIMIT, status)
    return dataclasses.replace(
        state,
        value=point.value,
        grad=point.grad,
        error=error,
        cache=point.cache,
        status=status.astype(jnp.int32),
        progress=begun._replace(first_value=state.progress.first_value),
        data_passes=state.data_passes + problem.passes.start,
    )


def advance(
    progress: Progress,
    point: Point,
    error: jax.Array,
    *,
    tol: float,
    iter_num: jax.Array,
    maxiter: int,
    hopeless: jax.Array,
    slope: jax.Array,
) -> tuple[Progress, jax.Array]:
    """After an iteration, and the status.

    Args:
        progress: before it.
        point: after it.
        error: what ``tol`` is compared with, after it.
        tol: the error of a solution.
        iter_num: iterations, this one included.
        maxiter: how many are allowed.
        hopeless: whether no step was found, and there is no other direction to try.
        slope: along its direction.
    """
    lower = point.value < progress.best_value - noise(progress.best_value) / 8
    flatter = error < 0.9 * progress.best_error
    num_stalled = jnp.where(lower | flatter, 0, progress.num_stalled + 1)
    patience = jnp.maximum(_PATIENCE, iter_num // 4)
    # Where terms cancel, rounding is that of the terms, which the value at the start tells better than a value of 0.
    rounding = jnp.maximum(noise(point.value), noise(progress.first_value))
    promised = jnp.abs(slope) > _PROMISE * rounding
    stuck = jnp.where(promised, Status.LINE_SEARCH_FAILED, Status.PRECISION)
    status = jnp.where(iter_num >= maxiter, Status.ITERATION_LIMIT, Status.RUNNING)
    status = jnp.where(hopeless | (num_stalled >= patience), stuck, status)
    status = jnp.where(error <= tol, Status.CONVERGED, status)
    finite = jnp.isfinite(point.value) & jnp.isfinite(error)
    status = jnp.where(finite, status, Status.NOT_FINITE).astype(jnp.int32)
    # Only what counts as progress is the new best: many small steps must add up.
    best_value = jnp.where(lower, point.value, progress.best_value)
    best_error = jnp.where(flatter, error, progress.best_error)
    return Progress(best_value, best_error, num_stalled, progress.first_value), status


def words(state: Any) -> str:
    """Say why a solver with this state stopped.

    Raises:
        ShapeError: if the state is that of a batch.
    """
    if jnp.ndim(state.status):
        raise ShapeError(
            f"reason: this is the state of a batch of problems {jnp.shape(state.status)}; write "
            f"[px.solve.Status(int(s)).words for s in state.status.ravel()]"
        )
    return Status(int(state.status)).words


def shown(state: Any) -> str:
    """Return a state on one line: what one looks for in it, not all its arrays."""
    name = type(state).__name__
    if not _is_of_one(state):
        return f"{name}(… {getattr(state.status, 'shape', '')})"
    return (
        f"{name}({Status(int(state.status)).name}, iter_num={int(state.iter_num)}, value={float(state.value):.8g}, "
        f"error={float(state.error):.3g}, stepsize={float(state.stepsize):.3g}, "
        f"data_passes={int(state.data_passes)}, …)"
    )


def shown_as_html(state: Any) -> str:
    """Return a state as a table: why the solver stopped, in words, and the numbers of :func:`shown`."""
    name = type(state).__name__
    if not _is_of_one(state):
        return html.card(state)
    return html.titled(
        f"{name}: {Status(int(state.status)).name}",
        html.facts(
            {
                "reason": words(state),
                "iterations": int(state.iter_num),
                "value": f"{float(state.value):.8g}",
                "error": f"{float(state.error):.3g}",
                "stepsize": f"{float(state.stepsize):.3g}",
                "data passes": int(state.data_passes),
            }
        ),
    )


def _is_of_one(state: Any) -> bool:
    """Return whether it has values, and is not that of a batch of problems."""
    status = state.status
    return not arrays.is_traced(status) and isinstance(status, jax.Array) and not status.ndim


class Iteration(NamedTuple):
    """One iteration, in Python numbers, as passed to the function that you give as ``verbose``.

    The function is called while the solver runs; ``jax.effects_barrier()`` waits until it was called for all
    iterations.

    Args:
        iter_num: iterations so far, this one included.
        value: the objective; for a proximal solver, its smooth part.
        error: the error that is compared with ``tol``.
        stepsize: the step size.
        data_passes: how often all data were read so far.

    Example:
        >>> import jax, jax.numpy as jnp, paraxis as px
        >>> seen = []
        >>> solver = px.solve.LBFGS(lambda p: jnp.sum((p - 1) ** 2), verbose=seen.append)
        >>> _ = solver.run(jnp.zeros(2))
        >>> jax.effects_barrier()
        >>> [(one.iter_num, one.value) for one in seen][-1]
        (2, 0.0)
    """

    iter_num: int
    value: float
    error: float
    stepsize: float
    data_passes: int


Watch = Callable[[Iteration], None]


def say(state: Any, verbose: bool | Watch) -> None:
    """Print a line about an iteration when it has been computed; or tell the function that is to know of it."""
    if callable(verbose):
        numbers = (state.iter_num, state.value, state.error, state.stepsize, state.data_passes)
        jax.debug.callback(functools.partial(_tell, verbose), *numbers)
        return
    jax.debug.print(
        "iteration {i}: value {v:.8g}, error {e:.3g}, step {s:.3g}, {p} passes over the data",
        i=state.iter_num,
        v=state.value,
        e=state.error,
        s=state.stepsize,
        p=state.data_passes,
    )


def _tell(watch: Watch, *numbers: Any) -> None:
    watching.tell(watch, Iteration(*(np.asarray(number).item() for number in numbers)))
