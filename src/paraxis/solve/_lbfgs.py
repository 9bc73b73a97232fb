"""L-BFGS: descent along what the last few steps tell of the curvature."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from paraxis._core import check
from paraxis.solve import _gram as gram, _run as runs, _trees as trees
from paraxis.solve._problem import FunctionLine, LinearLine, Point
from paraxis.solve._run import OptStep
from paraxis.solve._search import Found, noise, search
from paraxis.solve._solver import Solver, conjugate_gradients
from paraxis.solve._streaming import compiled

_AT_ONCE = 2  # pairs; on an H100, a loop of steps one by one takes three times as long
_SLOPE_OF_LINEAR, _SLOPE = 0.2, 0.9  # of the first slope, what a step may leave; trials of linear models read no rows
_LONGEST_FIRST = 2.0  # a step to be tried first
_PATIENCE = 10  # iterations without progress
_PROMISE = 100  # times what rounding hides: a slope that promises so much, and does not keep it, is wrong


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class LBFGSState(runs.State):
    """The state of an L-BFGS run. A pytree; names as in JAXopt.

    Args:
        iter_num: iterations so far, int32.
        value: the objective at the parameters.
        grad: its gradient there.
        stepsize: the last step along its direction.
        error: Euclidean norm of the gradient.
        s_history, y_history, rho_history, gamma, num_pairs: the stored curvature.
        aux: what ``fun`` returned besides the value.
        failed_linesearch: whether the last search found nothing better.
        num_fun_eval, num_grad_eval, num_linesearch_iter: evaluations, those with a gradient, and trials.
        status: a :class:`Status`, as int32.
        data_passes: how often all data were read, or would have been by a function that reads them once forwards and
            once backwards.
        progress, cache, preconditioner: the best so far; a linear model's predictions, and its first Hessian's inverse.
    """

    s_history: Any
    y_history: Any
    rho_history: jax.Array
    gamma: jax.Array
    num_pairs: jax.Array
    preconditioner: gram.Inverse | None


@dataclasses.dataclass(frozen=True)
class LBFGS(Solver):
    """Minimise a smooth function by L-BFGS, with the interface of JAXopt's solver.

    For a function of :mod:`paraxis.solve.objective`, the solver exploits the structure of linear models: an iteration
    reads the data twice, however many steps the line search tries, line searches are thorough, and the Hessian starts
    as the Gram matrix of a sample of rows if that pays. Any other function is evaluated, with its gradient, at each
    trial step.

    Args:
        fun: function ``(params, *args, **kwargs)`` → value, a scalar; ``params`` are any pytree of floats.
        value_and_grad: whether ``fun`` returns a pair of the value and its gradient.
        has_aux: whether ``fun`` returns a pair of the value and something else, which is put into ``state.aux``.
        maxiter: stop after this many iterations.
        tol: stop when the Euclidean norm of the gradient is at most this.
        stepsize: the step size, or a function of ``iter_num`` that returns it; 0 (the default) means a line search.
        linesearch: ``"zoom"``, for strong Wolfe conditions; there is no other.
        history_size: number of steps to store.
        precondition: ``"auto"``, ``"gram"`` or ``None``: whether a linear model's Hessian starts as a Gram matrix.
            With a fixed ``stepsize``, ``"auto"`` makes none.
        verbose: whether to print a line per iteration; or a function to call with each :class:`px.solve.Iteration`.

    Raises:
        ValueError: if an option is not valid.
        DataError: if the arguments of ``run`` do not fit together.

    Communicates, if rows are spread over devices: for a linear model, one all-reduce of three scalars per trial step
    and one the size of ``params`` per iteration; for other functions, whatever value and gradient do, per trial step.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> rosenbrock = lambda p: (1 - p[0]) ** 2 + 100 * (p[1] - p[0] ** 2) ** 2
        >>> params, state = px.solve.LBFGS(rosenbrock, tol=1e-4).run(jnp.array([-1.2, 1.0]))
        >>> params.round(3), state.reason
        (Array([1., 1.], dtype=float32), 'the error is as small as tol asks')

    Source: Liu and Nocedal 1989; see also :mod:`paraxis.solve._problem` and :mod:`paraxis.solve._gram`.
    """

    fun: Callable[..., Any]
    value_and_grad: bool = False
    has_aux: bool = False
    _: dataclasses.KW_ONLY
    maxiter: int = 500
    tol: float = 1e-5
    stepsize: float | Callable[[Any], Any] = 0.0
    linesearch: Literal["zoom"] = "zoom"
    history_size: int = 10
    precondition: Literal["auto", "gram"] | None = "auto"
    verbose: bool | runs.Watch = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check.one_of("LBFGS", "linesearch", self.linesearch, ("zoom",))
        check.one_of("LBFGS", "precondition", self.precondition, ("auto", "gram", None))
        check.count("LBFGS", "history_size", self.history_size)

    def _residual(self, params: Any, arguments: Any) -> Any:
        return self._problem(params, arguments).start(params).grad

    def _inverse(self, params: Any, arguments: Any, right: Any) -> Any:
        return conjugate_gradients(jax.linearize(lambda p: self._residual(p, arguments), params)[1], right)

    def _preconditioner(self, params: Any, arguments: Any) -> gram.Inverse | None:
        """Return the inverse of the initial Hessian. A fixed step is one along L-BFGS' own direction."""
        if self.stepsize and self.precondition == "auto":
            return None
        return gram.prepared(self._problem(params, arguments), params, self.precondition)

    def _renewed(self, step: OptStep, arguments: Any) -> OptStep:
        """Return the step with the Gram matrix that is right there, and no memory of how it was elsewhere."""
        if step.state.preconditioner is None:
            return step
        found = gram.prepared(self._problem(step.params, arguments), step.params, "gram")
        state = step.state._replace(preconditioner=found)
        return OptStep(step.params, _forgotten(state, jnp.ones_like(state.gamma)))

    def _rechecked(self, step: OptStep, arguments: Any) -> OptStep:
        problem = self._problem(step.params, arguments)
        point = problem.start(step.params)
        return OptStep(step.params, runs.recheck(step.state, problem, point, trees.norm(point.grad), self))

    def _start(self, params: Any, arguments: Any, preconditioner: gram.Inverse | None) -> OptStep:
        problem, size = self._problem(params, arguments), self.history_size
        point = problem.start(params)
        error = trees.norm(point.grad)
        state = LBFGSState(
            **runs.begun(problem, point, error, self.tol),
            stepsize=jnp.zeros_like(point.value),
            s_history=trees.zeros(params, size),
            y_history=trees.zeros(params, size),
            rho_history=jnp.zeros((size,), point.value.dtype),
            gamma=_first_scale(self, preconditioner, error),
            num_pairs=jnp.zeros((), jnp.int32),
            preconditioner=preconditioner,
        )
        return OptStep(params, state)

    def _iteration(self, before: OptStep, arguments: Any) -> OptStep:
        params, state = before
        problem = self._problem(params, arguments)
        point = Point(params, state.value, state.grad, state.aux, state.cache)
        direction, gamma = _descent(None, state._replace(cache=(), aux=None))
        line = problem.line(point, direction, problem.matvec(direction))
        found = _searched(self, line, state.iter_num, state.stepsize)
        new = problem.end(line, found.stepsize, found.trial)
        state, slope = state._replace(gamma=gamma), line.origin.slope
        num_reads = 1 if problem.is_linear else found.num_trials  # of rows, forwards and backwards
        return OptStep(new.params, _advanced(self, state, found, new._replace(params=()), direction, slope, num_reads))


def _first_scale(solver: LBFGS, preconditioner: gram.Inverse | None, error: jax.Array) -> jax.Array:
    """Return the scale of a first direction: no longer than 1, unless its length is right, or steps are given."""
    return jnp.ones_like(error) if preconditioner is not None or solver.stepsize else 1 / jnp.maximum(error, 1)


@compiled
def _searched(solver: LBFGS, line: FunctionLine | LinearLine, iter_num: jax.Array, last: jax.Array) -> Found:
    if solver.stepsize:
        stepsize = jnp.asarray(solver._given_stepsize(iter_num), last.dtype)
        return Found(stepsize, line.at(stepsize), jnp.array(False), jnp.ones((), jnp.int32))
    if not isinstance(line, LinearLine):
        return search(line, jnp.ones_like(last), _SLOPE)
    # The initial Hessian is right up to a factor, which is the same for some iterations: searches of a slope that
    # small end at steps like the last one.
    return search(line, jnp.clip(last, 1, _LONGEST_FIRST), _SLOPE_OF_LINEAR)


@compiled
def _advanced(
    solver: LBFGS, state: LBFGSState, found: Found, new: Point, direction: Any, slope: jax.Array, num_reads: Any
) -> LBFGSState:
    """Return the state after a step; if no step was found, without what is remembered."""
    error = trees.norm(new.grad)
    # Where terms cancel, rounding is that of the terms, which the value at the start tells better than a value of 0.
    rounding = jnp.maximum(noise(new.value), noise(state.progress.first_value))
    progress, status = runs.advance(
        state,
        new.value,
        error,
        solver,
        patience=_PATIENCE,
        counts=1,
        promised=jnp.abs(slope) > _PROMISE * rounding,
        hopeless=found.failed & (state.num_pairs == 0),
        finite=jnp.isfinite(new.value) & jnp.isfinite(error),
    )
    remembering = _remembered(state, trees.scaled(found.stepsize, direction), trees.minus(new.grad, state.grad))
    forgetting = _forgotten(state, _first_scale(solver, state.preconditioner, state.error))
    return trees.choose(found.failed, forgetting, remembering)._replace(
        iter_num=state.iter_num + 1,
        value=new.value,
        grad=new.grad,
        stepsize=found.stepsize,
        error=error,
        aux=new.aux,
        failed_linesearch=found.failed,
        num_fun_eval=state.num_fun_eval + found.num_trials,
        num_grad_eval=state.num_grad_eval + num_reads,
        num_linesearch_iter=state.num_linesearch_iter + found.num_trials,
        status=status,
        data_passes=state.data_passes + 2 * num_reads,
        progress=progress,
        cache=new.cache,
    )


def _forgotten(state: LBFGSState, gamma: jax.Array) -> LBFGSState:
    """Return the state without its pairs. The arrays stay, with a weight of zero."""
    nothing = jnp.zeros_like(state.rho_history)
    return state._replace(rho_history=nothing, gamma=gamma, num_pairs=jnp.zeros_like(state.num_pairs))


def _remembered(state: LBFGSState, s: Any, y: Any) -> LBFGSState:
    """Return the state with one more pair, unless its curvature is not positive beyond rounding, or too small."""
    sy = trees.dot(s, y)
    rho = 1 / jnp.where(sy == 0, 1, sy)
    good = sy > jnp.finfo(sy.dtype).eps * trees.norm(s) * trees.norm(y)
    good &= jnp.isfinite(rho)  # of a short step in float16 it is not
    index, histories = state.num_pairs % len(state.rho_history), (state.s_history, state.y_history, state.rho_history)
    put = jax.tree.map(lambda old, new: old.at[index].set(jnp.where(good, new, old[index])), histories, (s, y, rho))
    names = "s_history", "y_history", "rho_history"
    return state._replace(num_pairs=state.num_pairs + good, **dict(zip(names, put, strict=True)))


@compiled
def _descent(_: None, state: LBFGSState) -> tuple[Any, jax.Array]:
    """Minus the inverse Hessian, as far as it is remembered, times the gradient; and the scale where it began.

    The two loops are algorithm 7.4 of Nocedal and Wright, "Numerical Optimization", 2006. Pairs lie in a ring; ``rho``
    is 0 where there is none.
    """
    rho = state.rho_history
    newest_last = (state.num_pairs + jnp.arange(len(rho))) % len(rho)

    def pair(index: jax.Array) -> tuple[Any, Any]:
        return jax.tree.map(lambda history: history[index], (state.s_history, state.y_history))

    def backwards(r: Any, index: jax.Array) -> tuple[Any, jax.Array]:
        s, y = pair(index)
        alpha = rho[index] * trees.dot(s, r)
        return trees.along(r, -alpha, y), alpha

    def forwards(r: Any, step: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        index, alpha = step
        s, y = pair(index)
        return trees.along(r, alpha - rho[index] * trees.dot(y, r), s), None

    r, alphas = jax.lax.scan(backwards, trees.scaled(-1, state.grad), newest_last, reverse=True, unroll=_AT_ONCE)
    newest = newest_last[-1]
    s, y = pair(newest)
    r, of_y = _preconditioned(state.preconditioner, r, y)
    scale = jnp.where(rho[newest] > 0, trees.dot(y, of_y), 0)
    gamma = jnp.where(scale > 0, trees.dot(s, y) / jnp.where(scale > 0, scale, 1), state.gamma)
    return jax.lax.scan(forwards, trees.scaled(gamma, r), (newest_last, alphas), unroll=_AT_ONCE)[0], gamma


def _preconditioned(preconditioner: gram.Inverse | None, a: Any, b: Any) -> tuple[Any, Any]:
    """Return the inverse times two vectors at once: what takes long is to read the matrix."""
    if preconditioner is None:
        return a, b
    together = jax.tree.map(lambda *vectors: jnp.stack(vectors), a, b)
    found = jax.vmap(lambda one: gram.apply(preconditioner, one))(together)
    return jax.tree.map(lambda x: x[0], found), jax.tree.map(lambda x: x[1], found)
