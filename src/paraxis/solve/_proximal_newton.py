"""Newton's method for one output and an L1 penalty, of rows on disk: few passes, whatever the columns are like.

At a point, one pass gives the gradient and the Hessian, which is the Gram matrix weighted by the curvatures. With them
the objective is a parabola and the penalty: least squares, whose minimum is found without rows
(:mod:`paraxis.solve._working_set`). An intercept is not penalised; for each step of the coefficients there is a best
one of it, which is put in (the Schur complement). A second pass gives what the step does to the predictions, and then
a search goes as far along it as the penalised objective falls. (Lee, Sun and Saunders, "Proximal Newton-type methods",
2014; Yuan, Ho and Lin, "An improved GLMNET", 2012.)
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paraxis._axes import arrays
from paraxis._host import threads
from paraxis.solve import _progress as progress, _trees as trees
from paraxis.solve._linear import Block, Cache, Linear
from paraxis.solve._problem import Point
from paraxis.solve._progress import Progress
from paraxis.solve._search import noise
from paraxis.solve._solution import OptStep, watched
from paraxis.solve._solver import Solver
from paraxis.solve._working_set import minimum, soft

_TRIALS = 30  # steps, each half of the one before
_DECREASE = 1e-4  # of what the parabola's slope promises
_EXACT = 1e-4  # by how much the parabola may be above its minimum, in squares of the error


class _Curved(NamedTuple):
    """The Hessian at a point, of the loss alone, and the residuals that it weights."""

    gram: jax.Array  # (d, d)
    with_intercept: jax.Array  # (d,)
    of_intercept: jax.Array
    square: jax.Array  # half the weighted sum of squares of what a step of Newton's would take from each prediction


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "iter_num", "value", "grad", "stepsize", "error", "status", "data_passes", "progress", "cache", "curved",
    ],
    meta_fields=[],
)  # fmt: skip
@dataclasses.dataclass(frozen=True)
class ProximalNewtonState:
    """The state of a run, as :class:`ProximalGradientState`; the error is the norm of a proximal step of size 1."""

    iter_num: jax.Array
    value: jax.Array
    grad: Any
    stepsize: jax.Array
    error: jax.Array
    status: jax.Array
    data_passes: jax.Array
    progress: Progress
    cache: Cache
    curved: _Curved


@dataclasses.dataclass(frozen=True)
class ProximalNewton(Solver):
    """Minimise a linear model's objective plus ``l1 * |coef|₁``; two passes over the rows for each iteration.

    Args:
        fun: a :class:`LinearObjective` of one output, with an L2 penalty.
        maxiter: stop after so many iterations.
        tol: stop when the error is at most this, or when rounding allows no more.
        verbose: as for :class:`ProximalGradient`.
    """

    fun: Any
    maxiter: int
    tol: float
    verbose: bool | progress.Watch = False

    def run(self, init_params: Any, l1: Any, l2: Any, data: Any) -> OptStep:
        """Iterate until the error is small.

        Args:
            init_params: coefficients to begin with, ``(d,)``, or a pair of these and an intercept.
            l1, l2: not negative.
            data: rows.
        """
        solve = functools.partial(arrays.on_auto_mesh, self._solved)
        with threads.lapack_alone(data.X.shape[1]):
            found = watched(self.verbose, solve, init_params, ((l1, l2, data), {}), None)
            jax.block_until_ready(found.state.status)
        return found

    def _start(self, params: Any, arguments: Any, preconditioner: None) -> ProximalNewtonState:
        l1, l2, data = arguments[0]
        problem, count = self.fun.problem(params, l2, data), jnp.zeros((), jnp.int32)
        point, curved = _begun(problem, params)
        error = _error(problem, point, l1)
        begun, status = progress.begin(point, error, self.tol)
        return ProximalNewtonState(
            iter_num=count,
            value=point.value,
            grad=point.grad,
            stepsize=jnp.ones_like(point.value),
            error=error,
            status=status,
            data_passes=count + 1,
            progress=begun._replace(best_value=point.value + _penalty(problem, params, l1)),
            cache=point.cache,
            curved=curved,
        )

    def _iteration(self, params: Any, state: Any, *args: Any, **kwargs: Any) -> OptStep:
        l1, l2, data = args
        problem = self.fun.problem(params, l2, data)
        point = Point(params, state.value, state.grad, None, state.cache)
        direction = _direction(problem, state, params, l1)
        line = problem.line(point, direction)
        before = _penalty(problem, params, l1)
        full = _penalty(problem, trees.along(params, 1, direction), l1)
        slope = line.origin.slope + full - before
        whole = point.value + before

        def there(stepsize: jax.Array) -> jax.Array:
            return line.at(stepsize).value + _penalty(problem, trees.along(params, stepsize, direction), l1)

        def too_high(found: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            stepsize, value, count = found
            return ~(value <= whole + _DECREASE * stepsize * slope + noise(whole)) & (count < _TRIALS)

        def shorter(found: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            return found[0] / 2, there(found[0] / 2), found[2] + 1

        one = jnp.ones_like(whole)
        stepsize, _, count = jax.lax.while_loop(too_high, shorter, (one, there(one), jnp.zeros((), jnp.int32)))
        hopeless = count >= _TRIALS
        stepsize = jnp.where(hopeless, 0, stepsize)
        new, curved = _begun(problem, trees.along(params, stepsize, direction))
        error = _error(problem, new, l1)
        judged = new._replace(value=new.value + _penalty(problem, new.params, l1))
        iter_num = state.iter_num + 1
        advanced, status = progress.advance(
            state.progress, judged, error, tol=self.tol, iter_num=iter_num, maxiter=self.maxiter, hopeless=hopeless,
            slope=slope,
        )  # fmt: skip
        found = ProximalNewtonState(
            iter_num, new.value, new.grad, stepsize, error, status, state.data_passes + 2, advanced, new.cache, curved
        )
        if self.verbose:
            progress.say(found, self.verbose)
        return OptStep(new.params, found)

    def _confirmed(self, step: OptStep, arguments: Any) -> OptStep:
        return step  # nothing was added up from step to step


def _begun(problem: Linear, params: Any) -> tuple[Point, _Curved]:
    """Return the point at these parameters, and the Hessian there: one pass, which predicts anew."""
    shares = problem._shares(params)
    z, (cost, grad, curved) = problem._of_blocks(_begun_of_block, params, shares)
    value = cost + problem._penalty(params)
    return Point(params, value, problem._with_penalty(grad, params), None, Cache(z, shares)), curved


def _begun_of_block(block: Block, params: Any, shares: Any) -> Any:
    z = block.predictions(params)
    return z, (block.cost(z, shares), block.grad(z, shares, params), _curved(block, z, shares))


def _curved(block: Block, z: jax.Array, shares: Any) -> _Curved:
    residual = jax.grad(lambda z: jnp.sum(block.loss.rows(z, block.targets)))(z)
    # Where a row is predicted with certainty, its curvature vanishes, and would take no step at all.
    curvature = jnp.maximum(block.loss.curvature(z, block.targets), jnp.sqrt(jnp.finfo(z.dtype).eps))
    weight = curvature * (jnp.asarray(block.share, z.dtype) if shares is None else shares)
    x = block.design
    gram = jnp.matmul(trees.of_columns(x * weight[:, None]), x, precision=trees.EXACT)
    beside = jnp.einsum("n,nd->d", weight, x, precision=trees.EXACT)
    return _Curved(gram, beside, jnp.sum(weight), 0.5 * jnp.sum(weight * (residual / curvature) ** 2))


def _direction(problem: Linear, state: ProximalNewtonState, params: Any, l1: Any) -> Any:
    """Return the step to the minimum of the parabola and the penalty."""
    curved = state.curved
    coef, grad, gram = problem._coef(params), problem._coef(state.grad), curved.gram
    l2 = jnp.asarray(problem.l2, coef.dtype)
    square = curved.square + 0.5 * l2 * trees.dot(coef, coef)
    share = curved.with_intercept / curved.of_intercept
    if problem.intercept:
        slope = state.grad[1]
        gram = gram - jnp.outer(share, curved.with_intercept)
        grad, square = grad - share * slope, square - 0.5 * slope**2 / curved.of_intercept
    enough = jnp.maximum(jnp.finfo(coef.dtype).eps / 4, _EXACT * state.error**2)
    step = minimum(gram, coef, grad, jnp.maximum(square, 0), l1, l2, enough) - coef
    if not problem.intercept:
        return step
    return step, -(state.grad[1] / curved.of_intercept + trees.dot(share, step))


def _penalty(problem: Linear, params: Any, l1: Any) -> jax.Array:
    return l1 * jnp.sum(jnp.abs(problem._coef(params)))


def _error(problem: Linear, point: Point, l1: Any) -> jax.Array:
    coef, grad = problem._coef(point.params), problem._coef(point.grad)
    moved = soft(coef - grad, l1) - coef
    return trees.norm((moved, point.grad[1]) if problem.intercept else moved)
