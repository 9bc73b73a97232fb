"""Generalised linear models: objectives of ``X @ W`` that never read X to try a step.

Along a direction D, the predictions are ``Z + stepsize * (X @ D)``. With both parts at hand, a trial costs as much as
its rows have outputs, and X is read twice per step, for ``X @ D`` and for the gradient, however many steps are tried.
LIBLINEAR does this for two classes on one machine (Fan et al. 2008); no solver in JAX did.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paraxis.solve import _trees as trees
from paraxis.solve._losses import Loss
from paraxis.solve._problem import Line, Passes, Point, Problem, Trial


class Cache(NamedTuple):
    """What a point of a linear problem remembers."""

    z: jax.Array  # predictions, (n,) or (k, n)
    shares: Any  # each row's part of the mean, (n,) or a number; kept, since a sum of weights is an exchange


@dataclasses.dataclass(frozen=True)
class Linear(Problem):
    """The mean cost of rows, plus ``l2 / 2`` times the squared norm of the coefficients; an intercept goes free.

    Args:
        loss: what a row costs.
        design: the rows, ``(n, d)``.
        targets: ``(n,)``, or ``(n, k)`` for several outputs that are no classes.
        weight: ``(n,)``, or ``None`` for equal weights; the mean is over the sum of the weights. A row of weight zero
            does not count, as long as it is finite.
        l2: scalar.
        intercept: whether parameters are a pair of coefficients and intercept.
    """

    loss: Loss
    design: jax.Array
    targets: jax.Array
    weight: jax.Array | None
    l2: Any
    intercept: bool
    passes = Passes(start=2, line=1, trial=0, end=1, product=2, refresh=1)
    tight = True
    adds_up = True

    def shares(self, dtype: Any) -> jax.Array:
        """Each row's part of the mean: ``(n,)``, or one number for all."""
        if self.weight is None:
            return jnp.asarray(1 / self.design.shape[0], dtype)
        weight = self.weight.astype(dtype)
        return weight / jnp.sum(weight)

    def predictions(self, params: Any) -> jax.Array:
        """``(d, k)`` coefficients → ``(k, n)``; ``(d,)`` → ``(n,)``. Linear in them. Reads the rows once."""
        coef, bias = params if self.intercept else (params, None)
        if coef.ndim == 1:
            z = jnp.einsum("d,nd->n", coef, self.design, precision=trees.EXACT)
            return z if bias is None else z + bias
        # XLA's CPU products are fastest where rows of both operands lie in one piece, but it moves transpositions into
        # them unless it is kept from that: forwards and backwards take half the time.
        outputs_first = jax.lax.optimization_barrier(coef.T)
        z = jnp.einsum("kd,nd->nk", outputs_first, self.design, precision=trees.EXACT)
        z = jax.lax.optimization_barrier(z).T
        return z if bias is None else z + bias[:, None]

    def costs(self, z: jax.Array, shares: jax.Array) -> jax.Array:
        """The mean cost of the rows."""
        return jnp.sum(shares * self.loss.rows(z, self.targets))

    def value(self, params: Any) -> jax.Array:
        """The objective, as a plain function that JAX can differentiate in whatever way."""
        z = self.predictions(params)
        return self.costs(z, self.shares(z.dtype)) + self._penalty(params)

    def start(self, params: Any) -> Point:
        z = self.predictions(params)
        cache = Cache(z, self.shares(z.dtype))
        return self._point(params, cache, self.costs(*cache) + self._penalty(params))

    def line(self, point: Point, direction: Any, cached: Any = None) -> Line:
        z, shares = point.cache
        dz = self.predictions(direction) if cached is None else cached
        l2 = jnp.asarray(0 if self.l2 is None else self.l2, z.dtype)
        own, step = self._coef(point.params), self._coef(direction)
        zero, half, whole = trees.dot(own, own), trees.dot(own, step), trees.dot(step, step)

        def rows(stepsize: jax.Array) -> jax.Array:
            return self.loss.rows(z + stepsize * dz, self.targets)

        def at(stepsize: jax.Array) -> Trial:
            one = jnp.ones_like(stepsize)
            (value, slope), (_, curvature) = jax.jvp(lambda a: jax.jvp(rows, (a,), (one,)), (stepsize,), (one,))
            value, slope, curvature = jnp.sum(shares * jnp.stack([value, slope, curvature]), 1)  # one sum: one exchange
            return Trial(
                value + 0.5 * l2 * (zero + 2 * stepsize * half + stepsize**2 * whole),
                slope + l2 * (half + stepsize * whole),
                curvature + l2 * whole,
                (),
            )

        def end(stepsize: jax.Array, trial: Trial) -> Point:
            cache = Cache(z + stepsize * dz, shares)
            return self._point(trees.along(point.params, stepsize, direction), cache, trial.value)

        unknown = jnp.full((), jnp.nan, z.dtype)
        return Line(Trial(point.value, trees.dot(point.grad, direction), unknown, ()), at, end)

    def ahead(self, direction: Any) -> Any:
        return self.predictions(direction)

    def products(self, point: Point) -> tuple[Callable[[Any], tuple[Any, Any]], Any]:
        z, shares = point.cache

        def product(direction: Any) -> tuple[Any, Any]:
            dz = self.predictions(direction)
            bent = jax.jvp(lambda z: jax.grad(self.costs)(z, shares), (z,), (dz,))[1]
            return self._with_penalty(self._pulled(bent, direction), direction), dz

        return product, jnp.zeros_like(z)

    def refreshed(self, point: Point) -> Point:
        """The same point with its predictions computed anew: steps added up leave rounding behind. One pass."""
        return point._replace(cache=point.cache._replace(z=self.predictions(point.params)))

    def _point(self, params: Any, cache: Cache, value: jax.Array) -> Point:
        grad = self._with_penalty(self._pulled(jax.grad(self.costs)(*cache), params), params)
        return Point(params, value, grad, None, cache)

    def _pulled(self, r: jax.Array, params: Any) -> Any:
        """The transpose of :meth:`predictions`; reads the rows once, and adds up over the devices once."""
        return jax.linear_transpose(self.predictions, params)(r)[0]

    def _coef(self, params: Any) -> jax.Array:
        return params[0] if self.intercept else params

    def _penalty(self, params: Any) -> Any:
        return 0 if self.l2 is None else 0.5 * self.l2 * jnp.sum(self._coef(params) ** 2)

    def _with_penalty(self, grad: Any, params: Any) -> Any:
        if self.l2 is None:
            return grad
        coef = self._coef(grad) + jnp.asarray(self.l2, self._coef(grad).dtype) * self._coef(params)
        return (coef, grad[1]) if self.intercept else coef
