"""A function as a solver asks about it: its value and gradient at a point, and its course along a line.

A trial on a line gives value, slope and, where it costs nothing, curvature. What a trial computes and the next point
needs, it keeps: for most functions the gradient (:class:`Function`), for a generalised linear model its predictions
(:class:`Linear`).

An objective of ``X @ W`` never reads X to try a step. Along a direction D, the predictions are ``Z + stepsize * (X @
D)``. With both parts at hand, a trial costs as much as its rows have outputs, and X is read twice per step, for ``X @
D`` and for the gradient, however many steps are tried (as LIBLINEAR does: Fan et al. 2008). Rows may lie over any
number of devices: the compiler divides the products, and adds the devices' parts of a gradient.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paraxis.solve import _trees as trees
from paraxis.solve._losses import Loss
from paraxis.solve._streaming import TableRows

_PIECE = 1 << 21  # bytes of rows


class Point(NamedTuple):
    """Parameters, and what the function is there. ``cache`` is the problem's own."""

    params: Any
    value: jax.Array
    grad: Any
    aux: Any
    cache: Any


class Trial(NamedTuple):
    """The function at one place of a line; scalars."""

    value: jax.Array
    slope: jax.Array
    curvature: jax.Array  # NaN: not known
    kept: Any  # of which the point there is made


class FunctionLine(NamedTuple):
    """Any function along a direction."""

    value_and_grad: Callable[[Any], tuple[tuple[jax.Array, Any], Any]]
    point: Point
    direction: Any

    @property
    def origin(self) -> Trial:
        return self._trial(self.point.value, self.point.grad, self.point.aux)

    def at(self, stepsize: jax.Array) -> Trial:
        (value, aux), grad = self.value_and_grad(trees.along(self.point.params, stepsize, self.direction))
        return self._trial(value, grad, aux)

    def _trial(self, value: jax.Array, grad: Any, aux: Any) -> Trial:
        slope = trees.dot(grad, self.direction)
        return Trial(value, slope, jnp.full_like(slope, jnp.nan), (grad, aux))


@dataclasses.dataclass(frozen=True)
class Function:
    """Any function: each trial computes value and gradient."""

    value_and_grad: Callable[[Any], tuple[tuple[jax.Array, Any], Any]]
    is_linear = False  # whether trials read no data, and what a point keeps is added up from step to step
    is_table = False  # whether loops around it are Python's

    def start(self, params: Any) -> Point:
        """Return the point at these parameters."""
        (value, aux), grad = self.value_and_grad(params)
        return Point(params, value, grad, aux, ())

    def matvec(self, direction: Any) -> Any:
        """Return what a line along this direction uses instead of the data; linear in the direction."""
        return ()

    def line(self, point: Point, direction: Any, product: Any) -> FunctionLine:
        """Return the line from a point; ``product`` is the direction's :meth:`matvec`."""
        return FunctionLine(self.value_and_grad, point, direction)

    def end(self, line: Any, stepsize: jax.Array, trial: Trial) -> Point:
        """Return the point at a step size, of which ``trial`` is the trial."""
        grad, aux = trial.kept
        return Point(trees.along(line.point.params, stepsize, line.direction), trial.value, grad, aux, ())


class Cache(NamedTuple):
    """The products with the rows that a point of a linear problem keeps."""

    z: jax.Array  # predictions, (n,) or (k, n)
    shares: Any  # each row's part of the mean, (n,); None: equal. Kept, since a sum of weights is an exchange


class LinearLine(NamedTuple):
    """A linear model along a direction, without its rows."""

    loss: Loss
    point: Point
    direction: Any
    dz: jax.Array
    targets: jax.Array
    l2: jax.Array
    penalty: tuple[jax.Array, jax.Array, jax.Array]  # products of coefficients and direction
    slope: jax.Array

    @property
    def origin(self) -> Trial:
        return Trial(self.point.value, self.slope, jnp.full_like(self.slope, jnp.nan), ())

    def at(self, stepsize: jax.Array) -> Trial:
        z, shares = self.point.cache
        one = jnp.ones_like(stepsize)

        def along(stepsize: jax.Array) -> jax.Array:
            return self.loss.rows(z + stepsize * self.dz, self.targets)

        (value, slope), (_, curvature) = jax.jvp(lambda a: jax.jvp(along, (a,), (one,)), (stepsize,), (one,))
        value, slope, curvature = _mean(jnp.stack([value, slope, curvature]), shares)  # one sum: one exchange
        zero, half, whole = self.penalty
        value = value + 0.5 * self.l2 * (zero + 2 * stepsize * half + stepsize**2 * whole)
        return Trial(value, slope + self.l2 * (half + stepsize * whole), curvature + self.l2 * whole, ())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Linear:
    """The mean cost of rows, plus ``l2 / 2`` times the squared norm of the coefficients; an intercept is not penalised.

    It answers as :class:`Function` does.
    """

    loss: Loss
    design: Any  # (n, d), also of a table
    targets: jax.Array  # (n,), or (n, k) for several outputs that are no classes
    weight: jax.Array | None  # (n,), over whose sum the mean is; a finite row of weight zero does not count
    l2: Any  # scalar, or None
    intercept: bool = dataclasses.field(metadata={"static": True})  # whether parameters are a pair with one
    is_linear = True

    @property
    def is_table(self) -> bool:
        return isinstance(self.design, TableRows)

    def value(self, params: Any) -> jax.Array:
        """Return the objective, as a plain function that JAX can differentiate in whatever way."""
        return self.read(_cost, params, self.shares(params))[1] + self._penalty(params)

    def start(self, params: Any) -> Point:
        shares = self.shares(params)
        z, (cost, grad) = self.read(_cost_and_grad, params, shares)
        return Point(params, cost + self._penalty(params), self._with_penalty(grad, params), None, Cache(z, shares))

    def matvec(self, direction: Any) -> jax.Array:
        return self.read(_predictions, direction, ())[0]

    def line(self, point: Point, direction: Any, product: Any) -> LinearLine:
        l2 = jnp.asarray(0 if self.l2 is None else self.l2, product.dtype)
        own, step = self.coef(point.params), self.coef(direction)
        penalty = trees.dot(own, own), trees.dot(own, step), trees.dot(step, step)
        slope = trees.dot(point.grad, direction)
        return LinearLine(self.loss, point, direction, product, self.targets, l2, penalty, slope)

    def end(self, line: Any, stepsize: jax.Array, trial: Trial) -> Point:
        params = trees.along(line.point.params, stepsize, line.direction)
        z, shares = line.point.cache
        z = z + stepsize * line.dz
        grad = self.read(_grad, params, (z, shares))[1]
        return Point(params, trial.value, self._with_penalty(grad, params), None, Cache(z, shares))

    def shares(self, params: Any) -> jax.Array | None:
        """Return each row's part of the mean; ``None``: the same for all."""
        if self.weight is None:
            return None
        weight = self.weight.astype(jnp.result_type(self.coef(params), self.design.dtype))
        return weight / jnp.sum(weight)

    def coef(self, params: Any) -> jax.Array:
        """Return the coefficients of parameters, without an intercept."""
        return params[0] if self.intercept else params

    def read(self, fn: Callable[["Linear", Any, Any], Any], shared: Any, rows: Any) -> tuple[Any, Any]:
        """``fn(rows in memory, shared, rows)`` → what is kept by row, ``(..., n)``, and what is summed over the rows.

        Values by row are ``(..., n)``. The function is the same object each time: of a table, it is compiled once.
        """
        if isinstance(self.design, TableRows):
            return self.design.mapped(_of_chunk, (fn, self.loss, self.intercept), self.targets, shared, rows)
        return fn(self, shared, rows)

    # --- of rows in memory, those of a chunk of a table among them --------------------------------------------------

    def predict(self, params: Any) -> jax.Array:
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

    def cost(self, z: jax.Array, shares: Any) -> jax.Array:
        """Return the rows' part of the mean of the losses."""
        return _mean(self.loss.rows(z, self.targets), shares)

    def grad(self, z: jax.Array, shares: Any, params: Any) -> Any:
        """Return their part of its gradient; ``params`` tell shapes only. Reads the rows once."""
        coef, slope = self.coef(params), self.loss.slope
        share = 1 / len(self.targets) if shares is None else shares
        r = jax.grad(self.cost)(z, shares) if slope is None else share * slope(z, self.targets)
        pieces = _num_pieces(self.design) if coef.ndim == 1 else 1
        if pieces == 1:
            return jax.linear_transpose(self.predict, params)(r)[0]
        rows = self.design.reshape(pieces, -1, len(coef))
        parts = jnp.einsum("pn,pnd->pd", r.reshape(pieces, -1), rows, precision=trees.EXACT)
        pulled = jnp.sum(parts, 0).astype(coef.dtype)
        return (pulled, jnp.sum(r, -1)) if self.intercept else pulled

    def _penalty(self, params: Any) -> Any:
        if self.l2 is None:
            return 0
        squares = jnp.sum(self.coef(params) ** 2)
        return jnp.asarray(0.5 * self.l2, squares.dtype) * squares

    def _with_penalty(self, grad: Any, params: Any) -> Any:
        if self.l2 is None:
            return grad
        coef = trees.along(self.coef(grad), self.l2, self.coef(params))
        return (coef, grad[1]) if self.intercept else coef


def _mean(costs: jax.Array, shares: Any) -> jax.Array:
    """Return the weighted mean of costs ``(..., n)``; ``None``: all shares are equal."""
    return jnp.sum(costs / costs.shape[-1] if shares is None else shares * costs, -1)


def _num_pieces(design: jax.Array) -> int:
    """Return into how many pieces rows are divided for a product of one vector that adds over them.

    XLA's CPU products of a vector with rows take half the time if these stay in a cache. The number of pieces divides
    that of the rows, and is a multiple of that of the devices over which these may lie: else they would be exchanged.
    """
    size = design.size * design.dtype.itemsize
    if jax.default_backend() != "cpu" or size < 2 * _PIECE:
        return 1
    over = math.lcm(*(count for count in range(1, jax.device_count() + 1) if len(design) % count == 0))
    wanted = -(-size // _PIECE)
    least = -(-wanted // over) * over
    return next((pieces for pieces in range(least, 4 * wanted + 1, over) if len(design) % pieces == 0), 1)


def _cost(rows: Linear, params: Any, shares: Any) -> Any:
    return (), rows.cost(rows.predict(params), shares)


def _predictions(rows: Linear, params: Any, _: Any) -> Any:
    return rows.predict(params), ()


def _cost_and_grad(rows: Linear, params: Any, shares: Any) -> Any:
    z = rows.predict(params)
    return z, (rows.cost(z, shares), rows.grad(z, shares, params))


def _grad(rows: Linear, params: Any, cache: tuple[Any, Any]) -> Any:
    return (), rows.grad(*cache, params)


def _of_chunk(fn: Any, loss: Loss, intercept: bool, design: Any, targets: Any, shared: Any, rows: Any) -> Any:
    return fn(Linear(loss, design, targets, None, None, intercept), shared, rows)
