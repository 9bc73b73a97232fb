"""Accelerated proximal gradients: a smooth function plus a penalty, or under a constraint.

An iteration steps from an extrapolated point, the *velocity*, along minus its gradient, and lets the penalty's proximal
operator move what it finds (Beck and Teboulle 2009). The next velocity lies beyond, on the line from the last
parameters to these, and so do a linear problem's predictions: the data are read once for each step that is tried, and
once for the gradient at the next velocity.

A step will do if the function stays below the parabola that the step is the minimum of. Where both sides of this test
are rounding, the change of the slope is compared in place of the value, which says the same of a parabola, and is known
to more digits (Becker, Candès and Grant, "Templates for convex cone problems", 2011).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paraxis.solve import _run as runs, _trees as trees, prox as operators
from paraxis.solve._problem import Function, Linear, Point
from paraxis.solve._run import OptStep
from paraxis.solve._search import noise
from paraxis.solve._solver import Solver
from paraxis.solve._streaming import while_loop

_MAX_TRIALS = 30
_SHORTEST, _LONGEST = 0.5, 0.95  # of a step that was too long: the next one lies between
_GROWTH = (4.0, 1.1)  # of a step: until the first that was too long, and from then on


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class ProximalGradientState(runs.State):
    """The state of a proximal gradient run. A pytree; names as in JAXopt.

    ``grad`` is the gradient of ``fun`` at the velocity, and ``stepsize`` what the next iteration tries first.
    """

    velocity: Any  # the extrapolated point from which the next iteration starts
    velocity_value: jax.Array  # of ``fun``, there
    t: jax.Array  # the weight of the acceleration; 1 at the start and after a restart
    z: Any  # a linear model's predictions at the parameters


class _Step(NamedTuple):
    """A step from the velocity, and how the search for it goes."""

    stepsize: jax.Array
    following: jax.Array  # the step to try next, in this search or at the next iteration
    params: Any
    product: Any  # what the problem knows of the direction
    value: jax.Array  # of ``fun``
    aux: Any
    accepted: jax.Array
    num_trials: jax.Array
    num_grads: jax.Array


@dataclasses.dataclass(frozen=True)
class ProximalGradient(Solver):
    """Minimise a smooth function plus a penalty, or under a constraint, with the interface of JAXopt's solver.

    Of a linear model of :mod:`paraxis.solve.objective`, an iteration reads the data twice, and once more for each step
    that is too long. ``state.error`` is the Euclidean norm of the last step from the velocity to the parameters,
    divided by the step size, or of a step of size 1 if that is larger; without a penalty, the norm of the gradient.

    Args:
        fun: function ``(params, *args, **kwargs)`` → value, a scalar; ``params`` are any pytree of floats.
        prox: the penalty's or the constraint's operator ``(params, hyperparams_prox, scaling)``; see
            :mod:`paraxis.solve.prox`.
        acceleration: whether to extrapolate; the extrapolation restarts whenever it leads uphill.
        value_and_grad, has_aux, stepsize, maxiter, tol, verbose: as of :class:`LBFGS`.

    Raises and communicates as :class:`LBFGS`; a DataError also if ``hyperparams_prox`` make no sense.

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

    prox: Callable[..., Any] = operators.none
    _: dataclasses.KW_ONLY
    acceleration: bool = True

    _patience = 100  # the error of an accelerated method goes in waves
    _place = ("velocity", "velocity_value", "t", "z")

    def _in_order(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
        if args and "hyperparams_prox" not in kwargs:
            return args[0], args[1:], kwargs
        kwargs = dict(kwargs)
        return kwargs.pop("hyperparams_prox", None), args, kwargs

    def _operands(self, call: str, init_params: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        params, arguments = super()._operands(call, init_params, args, kwargs)
        operators.require_sensible(f"ProximalGradient.{call}", self.prox, params, arguments[0])
        return params, arguments

    def _prox_step(self, x: Any, grad: Any, hyper: Any, stepsize: Any) -> Any:
        """``prox`` after a step along minus the gradient, in the dtypes of ``x``."""
        moved = self.prox(trees.along(x, -stepsize, grad), hyper, stepsize)
        return jax.tree.map(lambda old, new: new.astype(old.dtype), x, moved)

    def _residual(self, params: Any, grad: Any, arguments: Any) -> Any:
        one = jnp.ones((), jnp.result_type(*jax.tree.leaves(params)))
        return trees.minus(params, self._prox_step(params, grad, arguments[0], one))

    def _whole(self, value: jax.Array, params: Any, arguments: Any) -> jax.Array:
        return (value + operators.penalty(self.prox, params, arguments[0])).astype(value.dtype)

    def _start(self, params: Any, arguments: Any) -> OptStep:
        problem = self._problem(params, arguments)
        point = problem.at(params)
        whole, one = self._whole(point.value, params, arguments), jnp.ones_like(point.value)
        error = trees.norm(self._residual(params, point.grad, arguments))
        state = ProximalGradientState(
            **runs.initial(self, problem, point._replace(value=whole), error, jnp.isfinite(trees.norm(point.grad))),
            stepsize=one * (self._fixed_stepsize(jnp.zeros((), int)) if self._is_fixed else 1),
            velocity=params,
            velocity_value=point.value,
            t=one,
            z=point.cache.z,
        )
        return OptStep(params, state)

    def _iteration(self, before: OptStep, arguments: Any) -> OptStep:
        params, state = before
        hyper, problem = arguments[0], self._problem(params, arguments)
        point = Point(state.velocity, state.velocity_value, state.grad, state.aux, state.cache)
        step = self._stepped(problem, point, state, hyper)
        # A step that fails leads back to the parameters: the next one starts there.
        stay, old = ~step.accepted, (params, state.z)
        new = trees.choose(stay, old, (step.params, trees.along(point.cache.z, 1, step.product)))
        change = trees.minus(new, old)
        uphill = trees.dot(trees.minus(new[0], point.params), change[0]) < 0
        t, weight = self._momentum(state, step, stay | uphill)
        velocity, z = trees.along(new, weight, change)
        following = problem.at(velocity, point.cache._replace(z=z))
        # The step divided by its size, or the step of size 1 where that vanishes by rounding.
        residual = trees.norm(self._residual(point.params, point.grad, arguments))
        error = jnp.maximum(trees.norm(trees.minus(step.params, point.params)) / step.stepsize, residual)
        now = self._whole(step.value, new[0], arguments), error, step.aux
        value, error, aux = trees.choose(stay, (state.value, state.error, state.aux), now)
        promise = error**2 * step.stepsize
        stuck = stay & (state.t == 1)
        # A point that was extrapolated is given up; where a step itself leads out of the domain, there is no way on.
        finite = (jnp.isfinite(following.value) & jnp.isfinite(trees.norm(following.grad))) | (weight != 0)
        is_linear, trials = problem.is_linear, step.num_trials
        num_grads = 1 if is_linear else 1 + step.num_grads
        state = runs.advance(
            self,
            state,
            Point(new[0], value, following.grad, aux, following.cache),
            error,
            counts=(trials + 1, num_grads, trials, trials + (1 if is_linear else 1 + num_grads)),
            promise=promise,
            may_stall=promise <= noise(value),
            no_direction_left=stuck,
            finite=finite & ~(stuck & self._is_fixed),
            stepsize=step.following,
            failed_linesearch=stay,
            velocity=velocity,
            velocity_value=following.value,
            t=t,
            z=new[1],
        )
        return OptStep(new[0], state)

    def _stepped(self, problem: Linear | Function, point: Point, state: ProximalGradientState, hyper: Any) -> _Step:
        """Return the step to take, which is not accepted if there is none."""
        never_too_long = state.num_linesearch_iter == state.iter_num
        growth = jnp.where(never_too_long, *_GROWTH).astype(state.value.dtype)
        known = jnp.isfinite(point.value) & jnp.isfinite(trees.norm(point.grad))

        def tried(before: _Step) -> _Step:
            stepsize = before.following
            params = self._prox_step(point.params, point.grad, hyper, stepsize)
            direction = trees.minus(params, point.params)
            product = problem.matvec(direction)
            origin, at = problem.line(point, direction, product)
            square = trees.dot(direction, direction)
            by_slope = 0.5 * square / stepsize <= noise(point.value)

            def look() -> Any:
                trial = at(jnp.ones_like(stepsize))
                return trial.value, trial.slope, None if problem.is_linear else trial.kept[1]

            if problem.is_linear:  # what both need is one exchange between devices, and no reading of the data
                value, slope, aux = look()
            else:
                value, slope, aux = jax.lax.cond(by_slope, look, lambda: (look()[0], origin.slope, look()[2]))
            change = value - origin.value - origin.slope
            curvature = jnp.where(by_slope, slope - origin.slope, 2 * change)
            of_slope = 8 * jnp.finfo(value.dtype).eps * jnp.abs(origin.slope)
            rounding = jnp.where(by_slope, of_slope, noise(value) / 8)
            solved = jnp.sqrt(square) <= self.tol * stepsize  # then its curvature may be rounding
            short_enough = jnp.isfinite(value) & (solved | (curvature <= square / stepsize + rounding))
            accepted = jnp.isfinite(square) & (short_enough | self._is_fixed)
            allowed = jnp.where(curvature <= 0, jnp.inf, jnp.nan_to_num(square / curvature))
            longest = jnp.where(accepted, jnp.where(before.num_trials == 0, growth, 1), _LONGEST)
            following = jnp.clip(allowed, jnp.where(accepted, 1, _SHORTEST) * stepsize, longest * stepsize)
            if self._is_fixed:
                following = jnp.asarray(self._fixed_stepsize(state.iter_num + 1), stepsize.dtype)
            counts = before.num_trials + 1, before.num_grads + by_slope.astype(int)
            return _Step(stepsize, following, params, product, value, aux, accepted, *counts)

        zero, nothing = jnp.zeros((), int), jax.tree.map(jnp.zeros_like, point.cache.z)
        fields = nothing, point.value, point.aux, jnp.array(False), zero, zero
        begin = _Step(state.stepsize, state.stepsize, point.params, *fields)
        return while_loop(problem.is_table, lambda s: known & ~s.accepted & (s.num_trials < _MAX_TRIALS), tried, begin)

    def _momentum(self, state: ProximalGradientState, step: _Step, restart: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the next t, and by how much of the last change to extrapolate."""
        if not self.acceleration:
            return state.t, jnp.zeros_like(state.t)

        def root(product: jax.Array) -> jax.Array:  # the t of which t * (t - 1) is this
            return jnp.where(restart, 1, 0.5 * (1 + jnp.sqrt(1 + 4 * product)))

        # Of t, what counts is t * (t - 1) * stepsize: a step shorter or longer than foreseen changes t.
        t = root(state.t * (state.t - 1) * state.stepsize / step.stepsize)
        next_t = root(t**2 * step.stepsize / step.following)
        return next_t, (t - 1) / next_t
