"""What comes out of a run, what is told of its iterations; and when it stops: solved, out of digits, or broken."""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paraxis._core import arrays
from paraxis.solve import _trees as trees
from paraxis.solve._problem import Point
from paraxis.solve._search import noise

_CONFIRMATIONS = 3  # of a solution, that may fail


class OptStep(NamedTuple):
    """Parameters and a solver's state: after one more iteration from ``update``, at the end from ``run``."""

    params: Any
    state: Any


class Status(enum.IntEnum):
    """The reason why a solver stopped, or that it has not stopped.

    Only ``CONVERGED`` means that the test for a solution was passed. A state holds the number as an array, so that it
    works under ``jit`` and ``vmap``; ``Status(int(state.status)).words`` is the reason in words.

    Example:
        >>> import paraxis as px
        >>> px.solve.Status(2).words
        'the limit of iterations was reached before the error was as small as tol asks'
    """

    words: str

    def __new__(cls, number: int, words: str) -> "Status":
        status = int.__new__(cls, number)
        status._value_, status.words = number, words
        return status

    RUNNING = 0, "the solver has not stopped"
    CONVERGED = 1, "the error is as small as tol asks"
    ITERATION_LIMIT = 2, "the limit of iterations was reached before the error was as small as tol asks"
    LINE_SEARCH_FAILED = 3, "no step downhill makes the value smaller: is the gradient the derivative of the value?"
    NOT_FINITE = 4, "the value or its gradient is not finite where the solver started or went"
    PRECISION = 5, "rounding allows no smaller value or gradient; a wider dtype, or columns on one scale, may"
    INTERRUPTED = 6, "Ctrl-C ended the run before the error was as small as tol asks"


class Interrupted(KeyboardInterrupt):
    """Raised when Ctrl-C has ended a run after an iteration; it holds the result so far.

    Attributes:
        params: the parameters after the last iteration.
        state: the solver's state, whose ``status`` is ``INTERRUPTED`` unless the run was over.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> try:
        ...     params, state = px.solve.LBFGS(lambda p: jnp.sum((p - 1) ** 2)).run(jnp.zeros(3))
        ... except px.solve.Interrupted as stopped:
        ...     params, state = stopped.params, stopped.state
    """

    __module__ = "paraxis.solve"  # as a traceback names it

    def __init__(self, params: Any, state: Any) -> None:
        super().__init__("the run was interrupted; the exception has its params and state so far")
        self.params = params
        self.state = state


class Iteration(NamedTuple):
    """One iteration, in Python numbers, as passed to the function that you give as ``verbose``.

    Args:
        iter_num: iterations so far, this one included.
        value: what is minimised; with an operator of your own, ``ProximalGradient`` does not know its penalty.
        error: the error that is compared with ``tol``.
        stepsize: the step size.
        data_passes: how often all data were read so far.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> seen = []
        >>> solver = px.solve.LBFGS(lambda p: jnp.sum((p - 1) ** 2), verbose=seen.append)
        >>> _ = solver.run(jnp.zeros(2))
        >>> [(one.iter_num, one.value) for one in seen][-1]
        (2, 0.0)
    """

    iter_num: int
    value: float
    error: float
    stepsize: float
    data_passes: int


Watch = Callable[[Iteration], Any]


def tell(verbose: Any, iter_num: Any, value: Any, error: Any, stepsize: Any, data_passes: Any) -> None:
    """Print a line about an iteration; or call the function that is to know of it."""
    seen = Iteration(int(iter_num), float(value), float(error), float(stepsize), int(data_passes))
    if callable(verbose):
        verbose(seen)
        return
    print(  # noqa: T201
        f"iteration {seen.iter_num}: value {seen.value:.8g}, error {seen.error:.3g}, step {seen.stepsize:.3g}, "
        f"{seen.data_passes} passes over the data",
        flush=True,
    )


class Progress(NamedTuple):
    """The best so far, by which it is told that rounding allows no more."""

    best_value: jax.Array
    best_error: jax.Array
    num_stalled: jax.Array
    first_value: jax.Array
    num_refuted: jax.Array  # solutions that were none when predictions were computed anew


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class State:
    """What the states of all solvers have; they are pytrees."""

    iter_num: jax.Array
    value: jax.Array
    grad: Any
    stepsize: jax.Array
    error: jax.Array
    aux: Any
    failed_linesearch: jax.Array
    num_fun_eval: jax.Array
    num_grad_eval: jax.Array
    num_linesearch_iter: jax.Array
    status: jax.Array
    data_passes: jax.Array
    progress: Progress
    cache: Any

    _replace = dataclasses.replace

    @property
    def reason(self) -> str:
        """The reason why the solver stopped, in words; for a single problem, not for a batch."""
        return Status(int(self.status)).words

    def __repr__(self) -> str:
        """Return what one looks for in a state, on one line."""
        if arrays.is_traced(self.status) or jnp.ndim(self.status):
            return f"{type(self).__name__}(… {jnp.shape(self.status)})"
        numbers = (f"{name}={getattr(self, name):.8g}" for name in Iteration._fields)
        return f"{type(self).__name__}({Status(int(self.status)).name}, {', '.join(numbers)}, …)"


def begun(problem: Any, point: Point, error: jax.Array, tol: float) -> dict[str, Any]:
    """Return the fields that the states of all solvers begin with."""
    status = jnp.where(error <= tol, Status.CONVERGED, Status.RUNNING)
    finite = jnp.isfinite(point.value) & trees.all_finite(point.grad)
    zero, one = jnp.zeros((), jnp.int32), jnp.ones((), jnp.int32)
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
        "status": jnp.where(finite, status, Status.NOT_FINITE).astype(jnp.int32),
        "data_passes": one if problem.is_table else 2 * one,
        "progress": Progress(point.value, error, zero, point.value, zero),
    }


def recheck(state: Any, problem: Any, point: Point, error: jax.Array, options: Any) -> Any:
    """Return a state at a point that was computed anew, with its status by the error there.

    If a solution is none after all, the run goes on; if that does not help, rounding allows none. Where no step helped
    any more, the status says so still, unless this is a solution. ``options`` are the solver's ``tol`` and ``maxiter``.
    """
    new = begun(problem, point, error, options.tol)
    before, status, progress = state.status, new["status"], new["progress"]
    refuted = (before == Status.CONVERGED) & (status == Status.RUNNING) & (state.iter_num < options.maxiter)
    num_refuted = state.progress.num_refuted + refuted
    is_stuck = (before == Status.PRECISION) | (before == Status.LINE_SEARCH_FAILED)
    still = jnp.where(state.iter_num >= options.maxiter, Status.ITERATION_LIMIT, Status.RUNNING)
    still = jnp.where(refuted & (num_refuted > _CONFIRMATIONS), Status.PRECISION, still)
    still = jnp.where(is_stuck, before, still)
    return state._replace(
        value=point.value,
        grad=point.grad,
        error=error,
        cache=point.cache,
        status=jnp.where(status == Status.RUNNING, still, status).astype(jnp.int32),
        progress=progress._replace(first_value=state.progress.first_value, num_refuted=num_refuted),
        data_passes=state.data_passes + new["data_passes"],
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
