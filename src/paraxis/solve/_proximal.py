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
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paraxis._core import arrays, jax_api
from paraxis.solve import _run as runs, _trees as trees, prox as operators
from paraxis.solve._problem import Function, Linear, Point
from paraxis.solve._run import OptStep
from paraxis.solve._search import noise
from paraxis.solve._solver import Solver, conjugate_gradients
from paraxis.solve._streaming import while_loop
from paraxis.solve.objective import LinearObjective

_PATIENCE = 100  # iterations without progress: the error of an accelerated method goes in waves
_MAX_TRIALS = 30
_SHORTER = 0.5  # the least factor by which a step that is too long is shortened at once
_GROWTH = (4.0, 1.1)  # of a step: until the first that was too long, and from then on


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class ProximalGradientState(runs.State):
    """The state of a proximal gradient run. A pytree; names as in JAXopt.

    Args:
        value: what is minimised, at the parameters: ``fun``, and the penalty of an operator of
            :mod:`paraxis.solve.prox`; with one of your own, ``fun`` alone.
        stepsize: the step that the next iteration tries first.
        error: Euclidean norm of the last step from the velocity to the parameters, divided by the step size, or of a
            step of size 1 if that is larger; without a penalty, the norm of the gradient. Infinite at first.
        velocity: the extrapolated point from which the next iteration starts.
        t: the weight of the acceleration; 1 at the start and after a restart.
        grad: gradient of ``fun`` at the velocity.
        failed_linesearch: whether the last search found no step.
        velocity_value: ``fun`` at the velocity.
        cache: a linear model's predictions at the velocity.
        lag: the difference of these predictions from those at the parameters.
        iter_num, aux, num_fun_eval, num_grad_eval, num_linesearch_iter, status, data_passes, progress: as of
            :class:`LBFGSState`.
    """

    velocity: Any
    t: jax.Array
    velocity_value: jax.Array
    lag: Any


class _Step(NamedTuple):
    """A step from the velocity, and how the search for it goes."""

    stepsize: jax.Array
    following: jax.Array  # the step to try next, in this search or at the next iteration
    params: Any
    direction: Any  # from the velocity
    product: Any  # what the problem knows of the direction
    value: jax.Array  # of ``fun``
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
        tol: stop when ``state.error`` is at most this.
        acceleration: whether to extrapolate; the extrapolation restarts whenever it leads uphill.
        value_and_grad, has_aux, stepsize, maxiter, verbose: as of :class:`LBFGS`.

    Raises:
        ValueError, DataError: as of :class:`LBFGS`.
        DataError: if the hyperparameters of an operator of :mod:`paraxis.solve.prox` make no sense.

    Communicates: as :class:`LBFGS`.

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
    verbose: bool | runs.Watch = False

    def __post_init__(self) -> None:
        super().__post_init__()

    def _in_order(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Return the arguments with ``hyperparams_prox`` in the first place."""
        if "hyperparams_prox" in kwargs or not args:
            kwargs = dict(kwargs)
            args = kwargs.pop("hyperparams_prox", None), *args
        return args, kwargs

    def _given(self, call: str, init_params: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        (hyper, *args), kwargs = self._in_order(args, kwargs)
        params, _ = super()._given(call, init_params, args, kwargs)
        hyper = jax.tree.map(jnp.asarray, hyper)
        if isinstance(self.fun, LinearObjective):
            beside = self.fun.problem(params, *args, **kwargs).targets
            hyper = jax.tree.map(lambda x: x if arrays.is_traced(x) else arrays.typed_beside(x, beside), hyper)
        operators.require_sensible(f"ProximalGradient.{call}", self.prox, params, hyper)
        return params, ((hyper, *args), kwargs)

    def _without_closures(self, params: Any, arguments: Any) -> tuple[Solver, Any, Any]:
        """Move also traced values that ``prox`` closes over, to its hyperparameters."""
        solver, ((hyper, *args), kwargs) = self, arguments
        if jax_api.is_tracing():
            pure, closed = jax.closure_convert(self.prox, params, hyper, _one(params))
            if closed:
                hyper = hyper, closed
                solver = dataclasses.replace(self, prox=lambda x, hyper, scaling: pure(x, hyper[0], scaling, *hyper[1]))
        solver, params, (args, kwargs) = super(ProximalGradient, solver)._without_closures(params, (args, kwargs))
        return solver, params, ((hyper, *args), kwargs)

    def _problem(self, params: Any, arguments: Any) -> Linear | Function:
        (_, *args), kwargs = arguments
        return super()._problem(params, (args, kwargs))

    def _residual(self, params: Any, arguments: Any) -> Any:
        grad = self._problem(params, arguments).start(params).grad
        return trees.minus(params, self._moved(params, grad, arguments[0][0], _one(params)))

    def _inverse(self, params: Any, arguments: Any, right: Any) -> Any:
        """Return what the residual's derivative by the parameters, ``A``, takes to ``right``.

        With M the derivative of ``prox`` and H that of the gradient, ``A = I - M + M H``. That is not symmetric, but
        both M and H are, and M lies between 0 and I. Let ``rest = right - M right``. If w solves ``S w = M (right +
        rest - H rest)`` with ``S = M - M M + M H M``, then ``A (rest + M w) = right``; and S is symmetric, and no less
        definite than H where M is not zero. For a projection, this is the elimination of what it holds fast.
        """
        grad, hessian = jax.linearize(lambda p: self._problem(p, arguments).start(p).grad, params)
        zero, hyper, one = trees.zeros(params), arguments[0][0], _one(params)
        _, prox = jax.linearize(lambda p: self._moved(p, zero, hyper, one), trees.minus(params, grad))
        rest = trees.minus(right, prox(right))

        def operator(w: Any) -> Any:
            kept = prox(w)
            return trees.along(kept, -1, prox(trees.minus(kept, hessian(kept))))

        free = prox(trees.minus(trees.along(right, 1, rest), hessian(rest)))
        return trees.along(rest, 1, prox(conjugate_gradients(operator, free)))

    def _start(self, params: Any, arguments: Any, preconditioner: None) -> OptStep:
        problem = self._problem(params, arguments)
        point = problem.start(params)
        whole, one = self._with_penalty(point, params, arguments[0][0]), jnp.ones((), point.value.dtype)
        state = ProximalGradientState(
            **runs.begun(problem, whole, jnp.full_like(one, jnp.inf), self.tol),  # of an error that is not known
            stepsize=one * (self._given_stepsize(jnp.zeros((), jnp.int32)) if self.stepsize else 1),
            velocity=params,
            t=one,
            velocity_value=point.value,
            lag=jnp.zeros_like(point.cache.z) if problem.is_linear else (),
        )
        return OptStep(params, state)

    def _rechecked(self, step: OptStep, arguments: Any) -> OptStep:
        """If it is no solution, the run begins again from there."""
        params, state = step
        problem, hyper = self._problem(params, arguments), arguments[0][0]
        point = problem.start(params)
        direction = trees.minus(self._moved(params, point.grad, hyper, state.stepsize), params)
        error = self._error(point, direction, state.stepsize, hyper)
        state = runs.recheck(state, problem, self._with_penalty(point, params, hyper), error, self)
        lag, one = jnp.zeros_like(state.lag), jnp.ones_like(state.t)
        return OptStep(params, state._replace(velocity=params, t=one, velocity_value=point.value, lag=lag))

    def _iteration(self, before: OptStep, arguments: Any) -> OptStep:
        params, state = before
        hyper, problem = arguments[0][0], self._problem(params, arguments)
        point = Point(state.velocity, state.velocity_value, state.grad, state.aux, state.cache)
        step, lag = self._stepped(problem, point, state, hyper), trees.minus(state.velocity, params)
        # A step that fails leads back to the parameters: the next one starts there.
        stay, old = ~step.accepted, (state.value, state.error, state.aux, params)
        back = trees.scaled(-1, (lag, state.lag))
        direction, product = trees.choose(stay, back, (step.direction, step.product))
        change = trees.along(lag, 1, direction)
        t, weight = self._momentum(state, step, stay | (trees.dot(direction, change) < 0))
        new_lag = trees.scaled(weight, trees.along(state.lag, 1, product))
        line = problem.line(point, trees.along(direction, weight, change), trees.along(product, 1, new_lag))
        one = jnp.ones_like(t)
        new = problem.end(line, one, line.at(one))
        error = self._error(point, step.direction, step.stepsize, hyper)
        whole = self._with_penalty(point._replace(value=step.value), step.params, hyper).value
        value, error, aux, params = trees.choose(stay, old, (whole, error, step.aux, step.params))
        rounding = error**2 * step.stepsize <= noise(value)  # what the step promised
        stuck = stay & (state.t == 1)
        # A point that was extrapolated is given up; where a step itself leads out of the domain, there is no way on.
        finite = (jnp.isfinite(new.value) & trees.all_finite(new.grad)) | jnp.any(weight != 0)
        progress, status = runs.advance(
            state,
            value,
            error,
            self,
            patience=_PATIENCE,
            counts=rounding,
            promised=~rounding,
            hopeless=stuck,
            finite=finite & ~(stuck & bool(self.stepsize)),
        )
        read = step.num_trials + (1 if problem.is_linear else 2 + step.num_grads)
        state = state._replace(
            iter_num=state.iter_num + 1,
            value=value,
            stepsize=step.following,
            error=error,
            aux=aux,
            velocity=new.params,
            t=t,
            grad=new.grad,
            failed_linesearch=stay,
            num_fun_eval=state.num_fun_eval + step.num_trials + 1,
            num_grad_eval=state.num_grad_eval + (0 if problem.is_linear else step.num_grads) + 1,
            num_linesearch_iter=state.num_linesearch_iter + step.num_trials,
            status=status,
            data_passes=state.data_passes + read,
            progress=progress,
            velocity_value=new.value,
            cache=new.cache,
            lag=new_lag,
        )
        return OptStep(params, state)

    def _stepped(self, problem: Linear | Function, point: Point, state: ProximalGradientState, hyper: Any) -> _Step:
        """Return the step to take, which is not accepted if there is none."""
        never_too_long = state.num_linesearch_iter == state.iter_num
        growth = jnp.where(never_too_long, *_GROWTH).astype(state.value.dtype)
        known = jnp.isfinite(point.value) & trees.all_finite(point.grad)

        def tried(before: _Step) -> _Step:
            stepsize = before.following
            params = self._moved(point.params, point.grad, hyper, stepsize)
            direction = trees.minus(params, point.params)
            product = problem.matvec(direction)
            line = problem.line(point, direction, product)
            square = trees.dot(direction, direction)
            value, curvature, aux, by_slope = _curvature(problem, line, square / stepsize)
            if self.stepsize:
                accepted = jnp.isfinite(square)
                following = jnp.asarray(self._given_stepsize(state.iter_num + 1), stepsize.dtype)
            else:
                of_slope = 8 * jnp.finfo(curvature.dtype).eps * jnp.abs(line.origin.slope)
                rounding = jnp.where(by_slope, of_slope, noise(value) / 8)
                solved = jnp.sqrt(square) <= self.tol * stepsize  # then its curvature may be rounding
                short_enough = solved | (curvature <= square / stepsize + rounding)
                accepted = short_enough & jnp.isfinite(value) & jnp.isfinite(square)
                allowed = jnp.where(curvature > 0, square / jnp.where(curvature > 0, curvature, 1), jnp.inf)
                grown = jnp.clip(allowed, stepsize, jnp.where(before.num_trials == 0, growth, 1) * stepsize)
                shorter = jnp.clip(allowed, _SHORTER * stepsize, 0.95 * stepsize)
                shorter = jnp.where(jnp.isfinite(curvature), shorter, _SHORTER * stepsize)
                following = jnp.where(accepted, grown, shorter)
            num_trials, num_grads = before.num_trials + 1, before.num_grads + by_slope
            return _Step(stepsize, following, params, direction, product, value, aux, accepted, num_trials, num_grads)

        zero, none = jnp.zeros((), jnp.int32), trees.zeros(point.params)
        begin = _Step(state.stepsize, state.stepsize, point.params, none, state.lag, point.value, point.aux,
                      jnp.array(False), zero, zero)  # fmt: skip
        if self.stepsize:
            return tried(begin)

        def go_on(step: _Step) -> jax.Array:
            return known & ~step.accepted & (step.num_trials < _MAX_TRIALS)

        return while_loop(problem.is_table, go_on, tried, begin)

    def _moved(self, x: Any, grad: Any, hyperparams_prox: Any, stepsize: jax.Array) -> Any:
        """``prox`` after a step along minus the gradient, in the dtypes of ``x``."""
        moved = self.prox(trees.along(x, -stepsize, grad), hyperparams_prox, stepsize)
        return jax.tree.map(lambda old, new: new.astype(old.dtype), x, moved)

    def _with_penalty(self, point: Point, params: Any, hyper: Any) -> Point:
        value = point.value + operators.penalty(self.prox, params, hyper)
        return point._replace(value=value.astype(point.value.dtype))

    def _error(self, point: Point, direction: Any, stepsize: jax.Array, hyper: Any) -> jax.Array:
        """Return the step divided by its size, or the step of size 1 where that vanishes by rounding."""
        unit = trees.minus(self._moved(point.params, point.grad, hyper, jnp.ones_like(stepsize)), point.params)
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


def _curvature(problem: Linear | Function, line: Any, scale: jax.Array) -> tuple[jax.Array, jax.Array, Any, jax.Array]:
    """Return a line's last value, its mean second derivative, ``aux``, and whether the second derivative is by slopes.

    ``scale`` is what the derivative is compared with.
    """
    one, origin = jnp.ones_like(scale), line.origin
    rounding = 0.5 * scale <= noise(origin.value)

    def look(by_slope: bool) -> Any:
        trial = line.at(one)
        curvature = trial.slope - origin.slope if by_slope else 2 * (trial.value - origin.value - origin.slope)
        return trial.value, curvature, None if problem.is_linear else trial.kept[1]

    if problem.is_linear:  # what both need is one exchange between devices, and no reading of the data
        return *trees.choose(rounding, look(True), look(False)), rounding
    return *jax.lax.cond(rounding, lambda: look(True), lambda: look(False)), rounding


def _root(product: jax.Array) -> jax.Array:
    """Return the t of which ``t * (t - 1)`` is this."""
    return 0.5 * (1 + jnp.sqrt(1 + 4 * product))


def _one(params: Any) -> jax.Array:
    return jnp.ones((), jnp.result_type(*jax.tree.leaves(params)))
