"""What comes out of a run, what is told of its iterations; and when it stops: solved, out of digits, or broken."""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paraxis.solve import _trees as trees
from paraxis.solve._problem import Point
from paraxis.solve._search import noise

_POINT = "value", "grad", "aux", "cache"
_PLACE = "value", "grad", "error", "cache", "best_value", "best_error", "num_stalled"  # what a state at a place has
_CONFIRMATIONS = 3  # of a solution, that may fail
_HIDDEN = 100  # times what rounding hides: a slope that promises so much, and does not keep it, is wrong


class OptStep(NamedTuple):
    """Parameters and a solver's state: after one more iteration from ``update``, at the end from ``run``."""

    params: Any
    state: Any


class Status(enum.IntEnum):
    """The reason why a solver stopped, or that it has not stopped.

    Only ``CONVERGED`` claims a solution. A state holds the number as an array, for ``jit`` and ``vmap``;
    ``Status(int(state.status)).words`` is the reason in words.

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
    """Raised when Ctrl-C ends a run, with its ``params`` and ``state``, of status ``INTERRUPTED`` if it was not over.

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
        self.params, self.state = params, state


class Iteration(NamedTuple):
    """One iteration, in Python numbers, as passed to the function that you give as ``verbose``.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> history = []
        >>> solver = px.solve.LBFGS(lambda p: jnp.sum((p - 1) ** 2), verbose=history.append)
        >>> _ = solver.run(jnp.zeros(2))
        >>> [(one.iter_num, one.value) for one in history][-1]
        (2, 0.0)
    """

    iter_num: int  # so far, this one included
    value: float  # what is minimised; with an operator of your own, ProximalGradient does not know its penalty
    error: float  # which is compared with tol
    stepsize: float
    data_passes: int  # how often all data were read so far


Watch = Callable[[Iteration], Any]


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class State:
    """What the states of all solvers have; they are pytrees."""

    iter_num: jax.Array  # iterations so far; counts are of JAX's ``int``
    value: jax.Array  # what is minimised, at the parameters
    grad: Any  # the gradient of ``fun``
    stepsize: Any
    error: jax.Array  # which is compared with tol
    aux: Any  # what ``fun`` returned besides the value
    failed_linesearch: jax.Array  # whether the last search found nothing better
    num_fun_eval: jax.Array
    num_grad_eval: jax.Array
    num_linesearch_iter: jax.Array  # trials of all searches
    status: jax.Array  # a :class:`Status`
    data_passes: jax.Array  # how often all data were read; or would be, once forwards and once backwards
    cache: Any  # a linear model's predictions, where the gradient is
    best_value: jax.Array
    best_error: jax.Array
    num_stalled: jax.Array  # iterations without progress beyond these
    first_value: jax.Array
    num_refuted: jax.Array  # solutions that were none when predictions were computed anew

    _replace = dataclasses.replace

    @property
    def reason(self) -> str:
        """The reason why the solver stopped, in words; for a single problem, not for a batch."""
        return Status(int(self.status)).words

    def __repr__(self) -> str:
        shown = ("status", *Iteration._fields)
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)}' for name in shown)}, …)"


def initial(solver: Any, problem: Any, point: Point, error: Any, finite: Any = True) -> dict[str, Any]:
    """Return the fields that the states of all solvers begin with; as the next two, by NumPy where ``error`` is."""
    xp = trees.numpy_of(error)
    status = xp.where(solver.maxiter > 0, Status.RUNNING, Status.ITERATION_LIMIT)
    status = xp.where(error <= solver.tol, Status.CONVERGED, status)
    finite &= xp.isfinite(point.value) & xp.isfinite(error)
    zero, one = xp.zeros((), int), xp.ones((), int)
    return {
        **{name: getattr(point, name) for name in _POINT},
        "error": error,
        "failed_linesearch": xp.asarray(False),
        "status": xp.where(finite, status, Status.NOT_FINITE).astype(int),
        "data_passes": one if problem.is_table else 2 * one,
        "best_value": point.value,
        "best_error": error,
        "first_value": point.value,
        **dict.fromkeys(("num_fun_eval", "num_grad_eval"), one),
        **dict.fromkeys(("iter_num", "num_linesearch_iter", "num_stalled", "num_refuted"), zero),
    }


def recheck(solver: Any, state: Any, new: Any) -> Any:
    """Return a state at the same place as one that was computed anew there, with its status by the error there.

    If a solution is none after all, the run goes on; if that does not help, rounding allows none. Where no step helped
    any more, the status says so still, unless this is a solution.
    """
    before, is_over = state.status, state.iter_num >= solver.maxiter
    refuted = (before == Status.CONVERGED) & (new.status == Status.RUNNING) & ~is_over
    num_refuted = state.num_refuted + refuted.astype(int)
    still = jnp.where(is_over, Status.ITERATION_LIMIT, Status.RUNNING)
    still = jnp.where(refuted & (num_refuted > _CONFIRMATIONS), Status.PRECISION, still)
    still = jnp.where((before == Status.PRECISION) | (before == Status.LINE_SEARCH_FAILED), before, still)
    return state._replace(
        **{name: getattr(new, name) for name in (*_PLACE, *solver._place)},
        status=jnp.where(new.status == Status.RUNNING, still, new.status).astype(int),
        num_refuted=num_refuted,
        data_passes=state.data_passes + new.data_passes,
    )


def advance(
    solver: Any,
    state: Any,
    point: Point,
    error: Any,
    *,
    counts: tuple[Any, Any, Any, Any],
    promise: Any,
    may_stall: Any = True,
    no_direction_left: Any = False,
    finite: Any = True,
    **fields: Any,
) -> Any:
    """Return the state after an iteration to a point, with its error and status; ``fields`` are others that change.

    ``counts`` are evaluations, gradients, trials and passes over the data. Of iterations without progress that
    ``may_stall``, so many as the solver has patience for, or a quarter of all if that is more, stop it: there is no
    digit left, unless the step's ``promise``, by how much it was to lower the value, is more than rounding can hide.
    """
    xp, iter_num, value = trees.numpy_of(error), state.iter_num + 1, point.value
    lower = value < state.best_value - noise(state.best_value) / 8
    flatter = error < 0.9 * state.best_error
    num_stalled = xp.where(lower | flatter, 0, state.num_stalled + xp.asarray(may_stall, int))
    stuck = no_direction_left | (num_stalled >= xp.maximum(solver._patience, iter_num // 4))
    # Where terms cancel, rounding is that of the terms, which the first value tells better than one of 0.
    hidden = _HIDDEN * xp.maximum(noise(value), noise(state.first_value))
    status = xp.where(iter_num >= solver.maxiter, Status.ITERATION_LIMIT, Status.RUNNING)
    status = xp.where(stuck, xp.where(promise > hidden, Status.LINE_SEARCH_FAILED, Status.PRECISION), status)
    status = xp.where(error <= solver.tol, Status.CONVERGED, status)
    finite &= xp.isfinite(value) & xp.isfinite(error)
    names = "num_fun_eval", "num_grad_eval", "num_linesearch_iter", "data_passes"
    return state._replace(
        iter_num=iter_num,
        **{name: getattr(point, name) for name in _POINT},
        error=error,
        status=xp.where(finite, status, Status.NOT_FINITE).astype(int),
        best_value=xp.where(lower, value, state.best_value),  # of what counts as progress: small steps must add up
        best_error=xp.where(flatter, error, state.best_error),
        num_stalled=num_stalled,
        **{name: getattr(state, name) + count for name, count in zip(names, counts, strict=True)},
        **fields,
    )
