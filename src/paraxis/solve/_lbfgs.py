"""L-BFGS: descent along what the last few steps tell of the curvature."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from paraxis._core import check
from paraxis.solve import _gram as gram, _run as runs, _trees as trees
from paraxis.solve._problem import Cache, Function, Linear, Point
from paraxis.solve._run import OptStep
from paraxis.solve._search import LineSearch, SearchResult, backtracking, zoom
from paraxis.solve._solver import Solver

_AT_ONCE = 2  # pairs; on an H100, a loop of steps one by one takes three times as long
_SLOPE_OF_LINEAR = 0.2  # of the first slope, what a step may leave; trials of linear models read no rows
_LONGEST_FIRST = 2.0  # a step to be tried first


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class LBFGSState(runs.State):
    """The state of an L-BFGS run. A pytree; names as in JAXopt."""

    s_history: Any  # the last steps, in a ring
    y_history: Any  # changes of the gradient along them
    rho_history: jax.Array  # 1 over the products of both; 0: no pair
    gamma: jax.Array  # the scale of the first Hessian's inverse
    num_pairs: jax.Array
    preconditioner: gram.Inverse | None


@dataclasses.dataclass(frozen=True)
class LBFGS(Solver):
    """Minimise a smooth function by L-BFGS, with the interface of JAXopt's solver.

    Of a linear model of :mod:`paraxis.solve.objective`, an iteration reads the data twice, however many steps the line
    search tries, and the Hessian starts as the Gram matrix of a sample of rows if that pays. Any other function is
    evaluated, with its gradient, at each trial step. ``state.error`` is the Euclidean norm of the gradient.

    Args:
        fun: function ``(params, *args, **kwargs)`` → value, a scalar; ``params`` are any pytree of floats.
        value_and_grad: whether ``fun`` returns a pair of the value and its gradient; or a function that does.
        has_aux: whether ``fun`` returns a pair of the value and something else, which is put into ``state.aux``.
        maxiter, tol: stop after this many iterations, or when ``state.error`` is at most ``tol``.
        stepsize: the step size, or a function of ``iter_num`` that returns it; 0 (the default) or less: a line search.
        linesearch: ``"zoom"``, for strong Wolfe conditions; ``"backtracking"``, for a decrease; or a
            :class:`px.solve.LineSearch` of your own.
        history_size: number of steps to store; with 0, steps go along the (preconditioned) gradient.
        precondition: ``"auto"``, ``"gram"`` or ``None``: whether a linear model's Hessian starts as a Gram matrix.
            With a fixed ``stepsize``, ``"auto"`` makes none.
        verbose: whether to print a line per iteration; or a function to call with each :class:`px.solve.Iteration`.

    Raises:
        ValueError: if ``linesearch`` or ``precondition`` is none of these.
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

    _: dataclasses.KW_ONLY
    linesearch: Literal["zoom", "backtracking"] | LineSearch = "zoom"
    history_size: int = 10
    precondition: Literal["auto", "gram"] | None = "auto"

    _patience = 10
    _parts = ("_descent", "_searched", "_advanced")

    def __post_init__(self) -> None:
        if not callable(self.linesearch):
            check.one_of("LBFGS", "linesearch", self.linesearch, ("zoom", "backtracking"))
        check.one_of("LBFGS", "precondition", self.precondition, ("auto", "gram", None))

    def _prepared(self, step: OptStep, arguments: Any) -> OptStep:
        # A fixed step is one along L-BFGS' own direction.
        precondition = None if self._is_fixed and self.precondition == "auto" else self.precondition
        preconditioner = gram.prepared(self._problem(step.params, arguments), step.params, precondition)
        return step._replace(state=step.state._replace(preconditioner=preconditioner))

    def _start(self, params: Any, arguments: Any) -> OptStep:
        problem, size = self._problem(params, arguments), max(1, self.history_size)
        point = problem.at(params)
        error = trees.norm(point.grad)
        history = jax.tree.map(lambda x: jnp.zeros((size, *x.shape), x.dtype), params)
        state = LBFGSState(
            **runs.initial(self, problem, point, error),
            stepsize=jnp.zeros_like(point.value),
            s_history=history,
            y_history=history,
            rho_history=jnp.zeros((size,), point.value.dtype),
            gamma=jnp.ones_like(error),
            num_pairs=jnp.zeros((), int),
            preconditioner=None,
        )
        return OptStep(params, state)

    def _iteration(self, before: OptStep, arguments: Any) -> OptStep:
        params, state = before
        problem = self._problem(params, arguments)
        point = Point(params, state.value, state.grad, state.aux, state.cache)
        direction, gamma = self._called("_descent", state._replace(cache=Cache(), aux=None))
        product = problem.matvec(direction)
        rowless = dataclasses.replace(problem, design=None) if problem.is_linear else problem
        result, slope, params, cache = self._called(
            "_searched", rowless, point, direction, product, state.iter_num, state.stepsize
        )
        new = problem.end(params, cache, result.trial)
        num_reads = 1 if problem.is_linear else result.num_trials  # of rows, forwards and backwards
        state = state._replace(gamma=gamma)
        return OptStep(params, self._called("_advanced", state, result, new, direction, slope, num_reads))

    def _descent(self, state: LBFGSState) -> tuple[Any, jax.Array]:
        """Return minus the inverse Hessian times the gradient, and its first scale (Nocedal and Wright 2006, 7.4)."""
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
        r, of_y = (gram.apply(state.preconditioner, x) for x in (r, y))
        # Without a pair, a direction is no longer than 1, unless its length is right, or steps are given.
        is_right = state.preconditioner is not None or self._is_fixed
        first = jnp.ones_like(state.error) if is_right else 1 / jnp.maximum(state.error, 1)
        scale = jnp.where(rho[newest] > 0, trees.dot(y, of_y), 0)
        gamma = jnp.where(scale > 0, trees.dot(s, y) / jnp.where(scale > 0, scale, 1), first)
        return jax.lax.scan(forwards, trees.scaled(gamma, r), (newest_last, alphas), unroll=_AT_ONCE)[0], gamma

    def _searched(
        self, problem: Linear | Function, point: Point, direction: Any, product: Any, iter_num: Any, last: Any
    ) -> tuple[SearchResult, jax.Array, Any, Cache]:
        """Return the step along a direction, the slope where it begins, and the parameters and the cache at its end."""
        origin, at = problem.line(point, direction, product)
        if self._is_fixed:
            stepsize = jnp.asarray(self._fixed_stepsize(iter_num), last.dtype)
            result = SearchResult(stepsize, at(stepsize), jnp.array(False), jnp.ones((), int))
        else:
            # The initial Hessian is right up to a factor, which is the same for some iterations: searches of a slope
            # that small end at steps like the last one.
            first = jnp.clip(last, 1, _LONGEST_FIRST) if problem.is_linear else jnp.ones_like(last)
            wolfe = functools.partial(zoom, slope_left=_SLOPE_OF_LINEAR) if problem.is_linear else zoom
            searches: dict[Any, Any] = {"zoom": wolfe, "backtracking": backtracking}
            result = searches.get(self.linesearch, self.linesearch)(origin, at, first)
        params, z = trees.along((point.params, point.cache.z), result.stepsize, (direction, product))
        return result, origin.slope, params, point.cache._replace(z=z)

    def _advanced(
        self, state: LBFGSState, result: SearchResult, new: Point, direction: Any, slope: jax.Array, num_reads: Any
    ) -> LBFGSState:
        """Return the state after a step; if no step was found, without what is remembered."""
        (stepsize, _, failed, num_trials), error = result, trees.norm(new.grad)
        remembering = _remembered(state, trees.scaled(stepsize, direction), trees.minus(new.grad, state.grad))
        zeros = {name: jnp.zeros_like(getattr(state, name)) for name in ("rho_history", "num_pairs")}
        forgetting = state._replace(**zeros)  # of pairs of weight zero, the arrays stay
        return runs.advance(
            self,
            trees.choose(failed, forgetting, remembering) if self.history_size else state,
            new,
            error,
            counts=(num_trials, num_reads, num_trials, 2 * num_reads),
            promise=jnp.abs(slope),
            no_direction_left=failed & (state.num_pairs == 0),
            stepsize=stepsize,
            failed_linesearch=failed,
        )


def _remembered(state: LBFGSState, s: Any, y: Any) -> LBFGSState:
    """Return the state with one more pair, unless its curvature is not positive beyond rounding, or too small."""
    sy = trees.dot(s, y)
    rho = 1 / jnp.where(sy == 0, 1, sy)
    good = sy > jnp.finfo(sy.dtype).eps * trees.norm(s) * trees.norm(y)
    good &= jnp.isfinite(rho)  # of a short step in float16 it is not
    index, new = state.num_pairs % len(state.rho_history), {"s_history": s, "y_history": y, "rho_history": rho}
    old = {name: getattr(state, name) for name in new}
    put = jax.tree.map(lambda old, new: old.at[index].set(jnp.where(good, new, old[index])), old, new)
    return state._replace(num_pairs=state.num_pairs + good.astype(int), **put)
