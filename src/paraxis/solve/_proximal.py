"""Accelerated proximal gradients: a smooth function plus a penalty, or under a constraint.

An iteration steps from an extrapolated point, the *velocity*, along minus its gradient, and lets the penalty's proximal
operator move what it finds (Beck and Teboulle, "A fast iterative shrinkage-thresholding algorithm", 2009). Everything
between the parameters, the velocity and the next of both is a direction, and what a linear problem has to know of a
direction is linear in it. So the data are read once for each step that is tried, and once for the gradient at the next
velocity.

A step will do if the function stays below the parabola that the step is the minimum of. Near a solution, both sides of
this test are rounding. Then the change of the slope is compared in place of the value, which says the same of a
parabola, and is known to more digits (Becker, Candès and Grant, "Templates for convex cone problems", 2011).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paraxis._axes import arrays, layout
from paraxis._calls import arguments
from paraxis.errors import ShapeError
from paraxis.solve import (
    _checks as checks,
    _functions as functions,
    _progress as progress,
    _trees as trees,
    prox as operators,
)
from paraxis.solve._problem import Line, Point, Problem
from paraxis.solve._progress import Progress
from paraxis.solve._search import noise
from paraxis.solve._solution import OptStep, Solve, differentiable, through_prox
from paraxis.solve._solver import Solver
from paraxis.solve._status import Status
from paraxis.solve.objective import LinearObjective

_REFRESH = 50  # iterations after which predictions are computed anew
_PATIENCE = 100  # iterations without progress that rounding may hide: the error of an accelerated method goes in waves
_GROWTH = (4.0, 1.1)  # of a step: until the first that was too long, and from then on


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "iter_num", "value", "stepsize", "error", "aux", "velocity", "t", "grad", "failed_linesearch", "num_fun_eval",
        "num_grad_eval", "num_linesearch_iter", "status", "data_passes", "progress", "velocity_value", "cache", "lag",
    ],
    meta_fields=[],
)  # fmt: skip
@dataclasses.dataclass(frozen=True)
class ProximalGradientState:
    """The state of a proximal gradient run. A pytree; names as in JAXopt.

    Args:
        iter_num: iterations so far, int32.
        value: ``fun`` at the parameters, without the penalty.
        stepsize: the step that the next iteration tries first.
        error: Euclidean norm of the last step from the velocity to the parameters, divided by the step size, or of a
            step of size 1 if that is larger; without a penalty, the norm of the gradient. Infinite at first.
        aux: what ``fun`` returned at the parameters besides the value.
        velocity: the extrapolated point from which the next iteration starts.
        t: the weight of the acceleration; 1 at the start and after a restart.
        grad: gradient of ``fun`` at the velocity.
        failed_linesearch: whether the last search found no step.
        num_fun_eval, num_grad_eval: evaluations of the value; how many of these had a gradient.
        num_linesearch_iter: trials so far.
        status: a :class:`Status`, as int32.
        data_passes: how often all data were read, or would have been by a function that reads them once forwards and
            once backwards.
        progress: what the solver needs to detect that rounding allows no more progress.
        velocity_value: ``fun`` at the velocity.
        cache: a linear model's predictions at the velocity.
        lag: the difference of these predictions from those at the parameters.
    """

    iter_num: jax.Array
    value: jax.Array
    stepsize: jax.Array
    error: jax.Array
    aux: Any
    velocity: Any
    t: jax.Array
    grad: Any
    failed_linesearch: jax.Array
    num_fun_eval: jax.Array
    num_grad_eval: jax.Array
    num_linesearch_iter: jax.Array
    status: jax.Array
    data_passes: jax.Array
    progress: Progress
    velocity_value: jax.Array
    cache: Any
    lag: Any

    @property
    def reason(self) -> str:
        """The reason why the solver stopped, in words; for a single problem, not for a batch."""
        return progress.words(self)

    def __repr__(self) -> str:
        return progress.shown(self)

    def _repr_html_(self) -> str:
        """Return what one looks for in it, for notebooks."""
        return progress.shown_as_html(self)


class _Step(NamedTuple):
    """A step from the velocity, and how the search for it goes."""

    stepsize: jax.Array
    following: jax.Array  # the step to try next, in this search or at the next iteration
    params: Any
    direction: Any  # from the velocity
    ahead: Any  # what the problem knows of the direction
    value: jax.Array
    aux: Any
    accepted: jax.Array
    num_trials: jax.Array
    num_grads: jax.Array


@dataclasses.dataclass(frozen=True)
class ProximalGradient(Solver):
    """Minimise a smooth function plus a penalty, or under a constraint, with the interface of JAXopt's solver.

    For bounds, use ``ProximalGradient(fun, px.solve.prox.box)``, and run it with ``(lower, upper)`` for
    ``hyperparams_prox``. For a function of :mod:`paraxis.solve.objective`, the solver exploits the structure of linear
    models: an iteration reads the data twice, and once more for each step that is too long.

    Args:
        fun: function ``(params, *args, **kwargs)`` → value, a scalar; ``params`` are any pytree of floats.
        prox: the penalty's or the constraint's operator ``(params, hyperparams_prox, scaling)``; see
            :mod:`paraxis.solve.prox`.
        value_and_grad: whether ``fun`` returns a pair of the value and its gradient.
        has_aux: whether ``fun`` returns a pair of the value and something else, which is put into ``state.aux``.
        stepsize: the step size, or a function of ``iter_num`` that returns it; 0 (the default) means a line search.
        maxiter: stop after this many iterations.
        tol: stop when ``state.error`` is at most this.
        acceleration: whether to extrapolate; the extrapolation restarts whenever it leads uphill.
        maxls: give up a search after this many trials.
        decrease_factor: the smallest factor by which a step that is too long is shortened at once.
        verbose: whether to print a line per iteration; or a function to call with each :class:`px.solve.Iteration`.

    Raises:
        ValueError: if an option is not valid.
        ShapeError: if the arguments of ``run`` do not fit together.
        DataError: if the hyperparameters of an operator of :mod:`paraxis.solve.prox` make no sense, such as a lower
            bound above the upper one.

    Communicates, if rows are spread over devices: for a linear model, one all-reduce of three scalars per trial step
    and one the size of ``params`` per iteration; for other functions, whatever the value does per trial step, and the
    gradient per iteration.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> X, y = jnp.eye(3), jnp.array([3.0, -0.3, -6.0])
        >>> lasso = px.solve.ProximalGradient(px.solve.objective.least_squares, px.solve.prox.l1)
        >>> params, state = lasso.run(jnp.zeros(3), 0.5, (X, y))
        >>> params.round(1), state.reason
        (Array([ 1.5,  0. , -4.5], dtype=float32), 'the error is as small as tol asks')

    Source: Beck and Teboulle 2009; the restart is O'Donoghue and Candès 2015 (by gradients), and steps that grow again
    are Scheinberg, Goldfarb and Bai 2014.
    """

    fun: Callable[..., Any]
    prox: operators.Prox = operators.none
    value_and_grad: bool = False
    has_aux: bool = False
    _: dataclasses.KW_ONLY
    stepsize: float | Callable[[Any], Any] = 0.0
    maxiter: int = 500
    tol: float = 1e-5
    acceleration: bool = True
    maxls: int = 30
    decrease_factor: float = 0.5
    verbose: bool | progress.Watch = False

    def __post_init__(self) -> None:
        check_options("ProximalGradient", self)
        if not callable(self.prox):
            raise TypeError(
                "ProximalGradient: prox must be a function (params, hyperparams_prox, scaling), got "
                f"{arguments.described(self.prox)}; "
                "write ProximalGradient(fun, px.solve.prox.l1)"
            )

    def __getstate__(self) -> dict[str, Any]:
        return checks.options(self)

    def init_state(self, init_params: Any, hyperparams_prox: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return the state before the first iteration, with value and gradient at ``init_params``.

        Args:
            init_params: where to start; it need not be allowed by a constraint.
            hyperparams_prox: what ``prox`` is given.
            args, kwargs: further arguments of ``fun``.

        Returns:
            A :class:`ProximalGradientState`.
        """
        params, hyper = self._beginning("init_state", init_params, hyperparams_prox, args, kwargs)
        return self._started(params, ((hyper, *args), kwargs), None)

    def update(self, params: Any, state: Any, hyperparams_prox: Any = None, *args: Any, **kwargs: Any) -> OptStep:
        """Make one iteration.

        Args:
            params, state: from ``init_state`` or the last update; they belong together.
            hyperparams_prox, args, kwargs: as before.

        Returns:
            ``(params, state)``. If no step is found, ``params`` do not change.

        Raises:
            StateError: if ``state`` has other parts than that of ``init_state``, as one of an earlier version has.
        """
        checks.step(self, params, state, ProximalGradientState, "velocity")
        return self._advanced_by_one(params, state, (hyperparams_prox, *args), kwargs)

    def _iteration(self, params: Any, state: Any, hyperparams_prox: Any = None, *args: Any, **kwargs: Any) -> OptStep:
        problem = self._problem(params, args, kwargs)
        point = Point(state.velocity, state.velocity_value, state.grad, state.aux, state.cache)
        refreshed = (state.iter_num % _REFRESH == _REFRESH - 1) & problem.adds_up
        lag, ahead_of_lag = trees.minus(state.velocity, params), state.lag
        if problem.adds_up:
            point, ahead_of_lag = jax.lax.cond(
                refreshed,
                lambda: (problem.refreshed(point), problem.ahead(lag)),
                lambda: (point, state.lag),
            )
        step = self._stepped(problem, point, state, hyperparams_prox)
        # A step that fails leads back to the parameters: the next one starts there.
        stay = ~step.accepted
        direction = trees.choose(stay, trees.scaled(-1, lag), step.direction)
        ahead = trees.choose(stay, trees.scaled(-1, ahead_of_lag), step.ahead)
        change = trees.along(lag, 1, direction)
        uphill = stay | (trees.dot(direction, change) < 0)
        t, weight = self._momentum(state, step, uphill)
        new_lag = trees.scaled(weight, trees.along(ahead_of_lag, 1, ahead))
        line = problem.line(point, trees.along(direction, weight, change), jax.tree.map(jnp.add, ahead, new_lag))
        one = jnp.ones_like(t)
        new = line.end(one, line.at(one))
        params = trees.choose(stay, params, step.params)
        passes = problem.passes
        error = jnp.where(stay, state.error, self._error(point, step.direction, step.stepsize, hyperparams_prox))
        value = jnp.where(stay, state.value, step.value)
        advanced, status = self._advanced(state, step, value, error, new, jnp.all(weight == 0))
        by_value = passes.trial // 2
        read = (passes.line + by_value) * step.num_trials + (passes.trial - by_value) * step.num_grads
        new_state = ProximalGradientState(
            iter_num=state.iter_num + 1,
            value=value,
            stepsize=step.following,
            error=error,
            aux=trees.choose(stay, state.aux, step.aux),
            velocity=new.params,
            t=t,
            grad=new.grad,
            failed_linesearch=stay,
            num_fun_eval=state.num_fun_eval + step.num_trials + 1,
            num_grad_eval=state.num_grad_eval + (step.num_grads if passes.trial else 0) + 1,
            num_linesearch_iter=state.num_linesearch_iter + step.num_trials,
            status=status,
            data_passes=state.data_passes
            + read
            + passes.trial
            + passes.end
            + (passes.refresh + passes.line) * refreshed,
            progress=advanced,
            velocity_value=new.value,
            cache=new.cache,
            lag=new_lag,
        )
        if self.verbose:
            progress.say(new_state, self.verbose)
        return OptStep(params, new_state)

    def run(self, init_params: Any, hyperparams_prox: Any = None, *args: Any, **kwargs: Any) -> OptStep:
        """Iterate until the error is small, in one compiled program.

        The returned parameters can be differentiated with respect to ``hyperparams_prox``, ``args``, ``kwargs`` and
        values that ``fun`` and ``prox`` close over, and ``jax.vmap`` can map over the run.

        Args:
            init_params: where to start; it need not be allowed by a constraint.
            hyperparams_prox: what ``prox`` is given.
            args, kwargs: further arguments of ``fun``.

        Returns:
            ``(params, state)``; ``state.status`` says whether this is a solution.
        """
        params, hyper = self._beginning("run", init_params, hyperparams_prox, args, kwargs)
        if functions.closes_over_traced(self.prox):
            pure, (_, _, closed) = functions.hoisted(self.prox, params, (hyper, jnp.ones((), _dtype(params))), {})

            def prox(x: Any, hyper: Any, scaling: Any) -> Any:
                return pure(x, (hyper[0], scaling), {}, hyper[1])

            return dataclasses.replace(self, prox=prox).run(params, (hyper, closed), *args, **kwargs)
        if functions.closes_over_traced(self.fun):
            fun, args = functions.hoisted(self.fun, params, args, kwargs)
            return dataclasses.replace(self, fun=fun).run(params, hyper, *args)
        return arrays.on_auto_mesh(self._run, params, ((hyper, *args), kwargs), None)

    def optimality_fun(self, params: Any, hyperparams_prox: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return a residual that is zero at a solution: ``params - prox(params - gradient)``."""
        params = functions.floating("ProximalGradient.optimality_fun", "params", params)
        grad = self._problem(params, args, kwargs).start(params).grad
        one = jnp.ones((), _dtype(params))
        return trees.minus(params, self._moved(trees.minus(params, grad), hyperparams_prox, one))

    @property
    def _reads_arguments_only(self) -> bool:
        ours = getattr(operators, getattr(self.prox, "__name__", ""), None) is self.prox
        return ours and super()._reads_arguments_only

    @functools.cached_property
    def _run(self) -> Solve:
        return differentiable(self._solved, self.optimality_fun, self.verbose, inverse=self._inverse)

    def _confirmed(self, step: OptStep, arguments: Any) -> OptStep:
        """Judged by the gradient at the parameters computed anew; if it is no solution, begun again from there."""
        (hyper, *args), kwargs = arguments
        params, state = step
        problem = self._problem(params, args, kwargs)
        if not problem.adds_up:
            return step
        point = problem.start(params)
        stepsize = state.stepsize
        moved = self._moved(trees.along(params, -stepsize, point.grad), hyper, stepsize)
        error = self._error(point, trees.minus(moved, params), stepsize, hyper)
        found = progress.judged_anew(state, problem, point, error, tol=self.tol, maxiter=self.maxiter)
        found = dataclasses.replace(
            found,
            velocity=params,
            t=jnp.ones_like(state.t),
            velocity_value=point.value,
            lag=problem.products(point)[1],
        )
        return OptStep(params, found)

    def _inverse(self, params: Any, arguments: Any, right: Any) -> Any:
        (hyper, *args), kwargs = arguments
        one = jnp.ones((), _dtype(params))
        grad, hessian = jax.linearize(lambda p: self._problem(p, args, kwargs).start(p).grad, params)
        _, moved = jax.linearize(lambda p: self._moved(p, hyper, one), trees.minus(params, grad))
        return through_prox(moved, hessian, right)

    def _moved(self, x: Any, hyperparams_prox: Any, stepsize: jax.Array) -> Any:
        """``prox``, in the dtypes of ``x``."""
        return jax.tree.map(lambda old, new: new.astype(old.dtype), x, self.prox(x, hyperparams_prox, stepsize))

    def _beginning(self, what: str, init_params: Any, hyper: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        who = f"ProximalGradient.{what}"
        params = functions.beginning(who, self.fun, init_params, args, kwargs)
        arguments.arrays(who, "hyperparams_prox", hyper)
        if self.prox is operators.none and hyper is not None:
            write = "px.solve.ProximalGradient(fun, prox=px.solve.prox.l1)"
            arguments.of_no_use(who, "hyperparams_prox", hyper, "prox", write)
        hyper = jax.tree.map(jnp.asarray, hyper)
        if isinstance(self.fun, LinearObjective):
            beside = self.fun.problem(params, *args, **kwargs).beside
            hyper = jax.tree.map(lambda x: x if arrays.is_traced(x) else layout.typed_beside(x, beside), hyper)
        moved = jax.eval_shape(self.prox, params, hyper, jnp.ones((), _dtype(params)))
        shapes = [jax.tree.map(jnp.shape, tree) for tree in (params, moved)]
        if shapes[0] != shapes[1]:
            raise ShapeError(
                f"{who}: prox must return the like of params, shapes {shapes[0]}, got {shapes[1]} with "
                f"hyperparams_prox of shapes {jax.tree.map(jnp.shape, hyper)}"
            )
        operators.require_sensible(who, self.prox, params, hyper)
        return params, hyper

    def _start(self, params: Any, arguments: Any, preconditioner: None) -> ProximalGradientState:
        (_, *args), kwargs = arguments
        problem = self._problem(params, args, kwargs)
        point = problem.start(params)
        one, count = jnp.ones((), point.value.dtype), jnp.zeros((), jnp.int32)
        unknown = jnp.full((), jnp.inf, point.value.dtype)
        begun, status = progress.begin(point, unknown, self.tol)
        return ProximalGradientState(
            iter_num=count,
            value=point.value,
            stepsize=one * (self._given_stepsize(count) if self.stepsize else 1),
            error=unknown,
            aux=point.aux,
            velocity=params,
            t=one,
            grad=point.grad,
            failed_linesearch=jnp.array(False),
            num_fun_eval=count + 1,
            num_grad_eval=count + 1,
            num_linesearch_iter=count,
            status=status,
            data_passes=count + problem.passes.start,
            progress=begun,
            velocity_value=point.value,
            cache=point.cache,
            lag=problem.products(point)[1],
        )

    def _stepped(self, problem: Problem, point: Point, state: ProximalGradientState, hyper: Any) -> _Step:
        """Return the step to take, which is not accepted if there is none."""
        fresh = state.num_linesearch_iter == state.iter_num  # no step has ever been too long
        growth = jnp.where(fresh, *_GROWTH).astype(state.value.dtype)
        known = jnp.isfinite(point.value) & trees.all_finite(point.grad)

        def tried(before: _Step) -> _Step:
            stepsize = before.following
            params = self._moved(trees.along(point.params, -stepsize, point.grad), hyper, stepsize)
            direction = trees.minus(params, point.params)
            ahead = problem.ahead(direction)
            line = problem.line(point, direction, ahead)
            square = trees.dot(direction, direction)
            value, bend, aux, by_slope = _bend(line, square / stepsize, problem.tight)
            rounding = jnp.where(by_slope, 8 * jnp.finfo(bend.dtype).eps * jnp.abs(line.origin.slope), noise(value) / 8)
            solved = jnp.sqrt(square) <= self.tol * stepsize  # then its bend may be rounding, and need not be known
            short_enough = solved | (bend <= square / stepsize + rounding)
            accepted = short_enough & jnp.isfinite(value) & jnp.isfinite(square)
            first = before.num_trials == 0
            allowed = jnp.where(bend > 0, square / jnp.where(bend > 0, bend, 1), jnp.inf)
            grown = jnp.where(first, jnp.clip(allowed, stepsize, growth * stepsize), stepsize)
            shorter = jnp.clip(allowed, self.decrease_factor * stepsize, 0.95 * stepsize)
            shorter = jnp.where(jnp.isfinite(bend), shorter, self.decrease_factor * stepsize)
            if self.stepsize:
                accepted = jnp.isfinite(square)
                grown = jnp.asarray(self._given_stepsize(state.iter_num + 1), stepsize.dtype)
            num_trials = before.num_trials + 1
            num_grads = before.num_grads + by_slope
            following = jnp.where(accepted, grown, shorter)
            return _Step(stepsize, following, params, direction, ahead, value, aux, accepted, num_trials, num_grads)

        zero = jnp.zeros((), jnp.int32)
        none = trees.zeros(point.params)
        begin = _Step(state.stepsize, state.stepsize, point.params, none, state.lag, point.value, point.aux,
                      jnp.array(False), zero, zero)  # fmt: skip
        if self.stepsize:
            return tried(begin)
        return jax.lax.while_loop(lambda step: known & ~step.accepted & (step.num_trials < self.maxls), tried, begin)

    def _given_stepsize(self, iter_num: jax.Array) -> Any:
        return self.stepsize(iter_num) if callable(self.stepsize) else self.stepsize

    def _error(self, point: Point, direction: Any, stepsize: jax.Array, hyper: Any) -> jax.Array:
        """Return the step divided by its size, or the step of size 1 where that vanishes by rounding."""
        one = jnp.ones_like(stepsize)
        unit = trees.minus(self._moved(trees.minus(point.params, point.grad), hyper, one), point.params)
        return jnp.maximum(trees.norm(direction) / stepsize, trees.norm(unit))

    def _momentum(self, state: ProximalGradientState, step: _Step, uphill: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the next t, and by how much of the last change to extrapolate."""
        if not self.acceleration:
            return state.t, jnp.zeros_like(state.t)
        # Of t, what counts is t * (t - 1) * stepsize: a step shorter or longer than foreseen changes t.
        t = _root(state.t * (state.t - 1) * state.stepsize / step.stepsize)
        t = jnp.where(uphill, 1, t)
        next_t = _root(t**2 * step.stepsize / step.following)
        return jnp.where(uphill, 1, next_t), (t - 1) / next_t

    def _advanced(
        self, state: ProximalGradientState, step: _Step, value: Any, error: Any, new: Point, at_rest: jax.Array
    ) -> tuple[Progress, jax.Array]:
        """Return what is known of the progress after an iteration, and the status.

        The value may rise while a penalty falls, so a value that does not fall says nothing by itself.
        """
        before = state.progress
        lower = value < before.best_value - noise(before.best_value) / 8
        rounding = error**2 * step.stepsize <= noise(value)
        stalled = rounding & ~lower & ~(error < 0.9 * before.best_error)
        better = lower | (error < 0.9 * before.best_error)
        num_stalled = jnp.where(better, 0, before.num_stalled + stalled)
        hopeless = ~step.accepted & (state.t == 1)
        status = jnp.where(state.iter_num + 1 >= self.maxiter, Status.ITERATION_LIMIT, Status.RUNNING)
        status = jnp.where(num_stalled >= _PATIENCE, Status.PRECISION, status)
        failed = jnp.where(rounding, Status.PRECISION, Status.LINE_SEARCH_FAILED)
        status = jnp.where(hopeless, Status.NOT_FINITE if self.stepsize else failed, status)
        # A point that was extrapolated is given up; where a step itself leads out of the domain, there is no way on.
        finite = jnp.isfinite(new.value) & trees.all_finite(new.grad)
        status = jnp.where(step.accepted & (error <= self.tol), Status.CONVERGED, status)
        status = jnp.where(finite | ~at_rest, status, Status.NOT_FINITE).astype(jnp.int32)
        best = jnp.fmin(before.best_value, value), jnp.fmin(before.best_error, error)
        return Progress(*best, num_stalled.astype(jnp.int32), before.first_value), status


def check_options(who: str, solver: Any) -> None:
    """Check the options that this solver and gradient descent share.

    Raises:
        ValueError: naming the one that is wrong.
    """
    checks.function(solver, "acceleration")
    checks.count(solver, "maxiter", "maxls")
    checks.positive(solver, "decrease_factor")
    checks.not_negative(solver, "tol")
    if not solver.decrease_factor < 1:
        raise ValueError(f"{who}: decrease_factor must be below 1, got {solver.decrease_factor!r}; write 0.5")
    if callable(solver.stepsize):
        return
    checks.number(solver, "stepsize")
    if not solver.stepsize >= 0:
        raise ValueError(f"{who}: stepsize must not be negative, got {solver.stepsize!r}; write 0.0 to search for it")


def _bend(line: Line, scale: jax.Array, tight: bool) -> tuple[jax.Array, jax.Array, Any, jax.Array]:
    """Return a line's last value, the second derivative that its bend stands for, ``aux``, and whether by slopes.

    ``scale`` is what the bend is compared with.
    """
    one, origin = jnp.ones_like(scale), line.origin

    def by_value() -> Any:
        trial = line.at(one)
        return trial.value, 2 * (trial.value - origin.value - origin.slope), line.end(one, trial).aux

    def by_slope() -> Any:
        trial = line.at(one)
        return trial.value, trial.slope - origin.slope, line.end(one, trial).aux

    rounding = 0.5 * scale <= noise(origin.value)
    if tight:  # what both need is one exchange between devices, and no reading of the data
        value, bend, aux = trees.choose(rounding, by_slope(), by_value())
    else:
        value, bend, aux = jax.lax.cond(rounding, by_slope, by_value)
    return value, bend, aux, rounding


def _root(product: jax.Array) -> jax.Array:
    """Return the t of which ``t * (t - 1)`` is this."""
    return 0.5 * (1 + jnp.sqrt(1 + 4 * product))


def _dtype(params: Any) -> Any:
    return jnp.result_type(*jax.tree.leaves(params))
