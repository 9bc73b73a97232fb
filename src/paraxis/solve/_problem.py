"""A function as a solver asks about it: its value and gradient at a point, and its course along a line.

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


class Cache(NamedTuple):
    """The products with the rows that a point of a linear problem keeps; of other functions, nothing."""

    z: Any = ()  # predictions, (n,) or (k, n)
    shares: Any = None  # each row's part of the mean, (n,); None: equal. Kept, since a sum of weights is an exchange


class Point(NamedTuple):
    """Parameters, and what the function is there."""

    params: Any
    value: Any
    grad: Any
    aux: Any
    cache: Cache


class Trial(NamedTuple):
    """The function at one place of a line, in scalars, as a :class:`px.solve.LineSearch` sees it."""

    value: Any
    slope: Any
    curvature: Any  # NaN: not known
    kept: Any = ()  # gradient and ``aux``, of which the point there is made


@dataclasses.dataclass(frozen=True)
class Function:
    """Any function: each trial computes value and gradient."""

    value_and_grad: Callable[[Any], tuple[tuple[jax.Array, Any], Any]]
    is_linear = False  # whether trials read no data, and what a point keeps is added up from step to step
    is_table = False  # whether loops around it are Python's

    def at(self, params: Any, cache: Cache | None = None) -> Point:
        """Return the point at these parameters, for a linear problem of what it keeps there."""
        (value, aux), grad = self.value_and_grad(params)
        return Point(params, value, grad, aux, Cache())

    def matvec(self, direction: Any) -> Any:
        """Return what a line along this direction uses instead of the data; linear in the direction."""
        return ()

    def line(self, point: Point, direction: Any, product: Any) -> tuple[Trial, Callable[[jax.Array], Trial]]:
        """Return the line from a point; ``product`` is the direction's :meth:`matvec`."""

        def trial(at: Point) -> Trial:
            slope = trees.dot(at.grad, direction)
            return Trial(at.value, slope, jnp.full_like(slope, jnp.nan), (at.grad, at.aux))

        return trial(point), lambda step: trial(self.at(trees.along(point.params, step, direction)))

    def end(self, params: Any, cache: Cache, trial: Trial) -> Point:
        """Return the point to which a step leads, of which ``trial`` is the trial."""
        grad, aux = trial.kept
        return Point(params, trial.value, grad, aux, cache)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Linear:
    """The mean cost of rows plus ``l2 / 2 * |coef|²``, without an intercept; it answers as :class:`Function` does."""

    loss: Loss
    design: Any  # (n, d), also of a table
    targets: jax.Array  # (n,), or (n, k) for several outputs that are no classes
    weight: jax.Array | None  # (n,), over whose sum the mean is; a finite row of weight zero does not count
    l2: Any  # scalar
    intercept: bool = dataclasses.field(metadata={"static": True})  # whether parameters are a pair with one
    offset: Any = None  # added to the predictions: (n,), or (n, k)
    is_linear = True

    @property
    def is_table(self) -> bool:
        return isinstance(self.design, TableRows)

    def value(self, params: Any) -> jax.Array:
        return self.cost(self.shifted(self.matvec(params)), self.shares(params)) + self._penalty(params)

    def at(self, params: Any, cache: Cache | None = None) -> Point:
        cache = Cache(None, self.shares(params)) if cache is None else cache
        z, (cost, grad) = self.read(_cost_and_grad, params, cache)
        coef = trees.along(self.coef(grad), self.l2, self.coef(params))
        grad = (coef, grad[1]) if self.intercept else coef
        cache = cache._replace(z=z) if cache.z is None else cache
        return Point(params, cost + self._penalty(params), grad, None, cache)

    def matvec(self, direction: Any) -> jax.Array:
        return self.read(_predictions, direction, ())[0]

    def line(self, point: Point, direction: Any, product: Any) -> tuple[Trial, Callable[[jax.Array], Trial]]:
        coef, step = self.coef(point.params), self.coef(direction)
        zero, half, whole = trees.dot(coef, coef), trees.dot(coef, step), trees.dot(step, step)

        def at(stepsize: jax.Array) -> Trial:
            def along(stepsize: jax.Array) -> jax.Array:
                return self.loss.rows(point.cache.z + stepsize * product, self.targets)

            one = jnp.ones_like(stepsize)
            (value, slope), (_, curvature) = jax.jvp(lambda a: jax.jvp(along, (a,), (one,)), (stepsize,), (one,))
            sums = _mean(jnp.stack([value, slope, curvature]), point.cache.shares)  # one sum: one exchange
            penalty = 0.5 * zero + stepsize * half + 0.5 * stepsize**2 * whole, half + stepsize * whole, whole
            return Trial(*sums + jnp.asarray(self.l2, sums.dtype) * jnp.stack(penalty))

        slope = trees.dot(point.grad, direction)
        return Trial(point.value, slope, jnp.full_like(slope, jnp.nan)), at

    def end(self, params: Any, cache: Cache, trial: Trial) -> Point:
        return self.at(params, cache)._replace(value=trial.value)

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
            by_row = self.targets, self.offset
            return self.design.mapped(_of_chunk, (fn, self.loss, self.intercept), by_row, shared, rows)
        return fn(self, shared, rows)

    # --- of rows in memory, those of a chunk of a table among them --------------------------------------------------

    def predict(self, params: Any) -> jax.Array:
        """``(d, k)`` coefficients → ``(k, n)``; ``(d,)`` → ``(n,)``. Linear in them. Reads the rows once."""
        coef, bias = params if self.intercept else (params, None)
        # XLA's CPU products are fastest where rows of both operands lie in one piece, but it moves transpositions into
        # them unless it is kept from that: forwards and backwards take half the time.
        outputs_first = jax.lax.optimization_barrier(coef.reshape(len(coef), -1).T)
        z = jnp.einsum("kd,nd->nk", outputs_first, self.design, precision=trees.EXACT)
        z = jax.lax.optimization_barrier(z).T.reshape(*coef.shape[1:], -1)
        return z if bias is None else z + bias[..., None]

    def shifted(self, z: jax.Array) -> jax.Array:
        """Return predictions with their offsets."""
        return z if self.offset is None else z + self.offset.T.astype(z.dtype)

    def cost(self, z: jax.Array, shares: Any) -> jax.Array:
        """Return the rows' part of the mean of the losses."""
        return _mean(self.loss.rows(z, self.targets), shares)

    def grad(self, z: jax.Array, shares: Any, params: Any) -> Any:
        """Return their part of its gradient; ``params`` tell shapes only. Reads the rows once."""
        coef, slope = self.coef(params), self.loss.slope
        share = 1 / len(self.targets) if shares is None else jnp.broadcast_to(shares, z.shape)
        r = jax.grad(self.cost)(z, shares) if slope is None else share * slope(z, self.targets)
        pieces = _num_pieces(self.design) if coef.ndim == 1 else 1
        if pieces == 1:
            return jax.linear_transpose(self.predict, params)(r)[0]
        rows = self.design.reshape(pieces, -1, len(coef))
        parts = jnp.einsum("pn,pnd->pd", r.reshape(pieces, -1), rows, precision=trees.EXACT)
        pulled = jnp.sum(parts, 0).astype(coef.dtype)
        return (pulled, jnp.sum(r, -1)) if self.intercept else pulled

    def _penalty(self, params: Any) -> jax.Array:
        squares = jnp.sum(self.coef(params) ** 2)
        return jnp.asarray(0.5 * self.l2, squares.dtype) * squares


def _mean(costs: jax.Array, shares: Any) -> jax.Array:
    """Return the weighted mean of costs ``(..., n)``; ``None``: all shares are equal."""
    return jnp.sum(costs / costs.shape[-1] if shares is None else jnp.broadcast_to(shares, costs.shape) * costs, -1)


def _num_pieces(design: jax.Array) -> int:
    """Return into how many pieces to divide rows: XLA's CPU adds them to one vector in a third of the time in a cache.

    The number divides that of the rows, and is a multiple of that of the devices over which these may lie: else they
    would be exchanged.
    """
    size = design.size * design.dtype.itemsize
    if jax.default_backend() != "cpu" or size < 2 * _PIECE:
        return 1
    over = math.lcm(*(count for count in range(1, jax.device_count() + 1) if len(design) % count == 0))
    wanted = -(-size // _PIECE)
    least = -(-wanted // over) * over
    return next((pieces for pieces in range(least, 4 * wanted + 1, over) if len(design) % pieces == 0), 1)


def _predictions(rows: Linear, params: Any, _: Any) -> Any:
    return rows.predict(params), ()


def _cost_and_grad(rows: Linear, params: Any, cache: Cache) -> Any:
    z = rows.shifted(rows.predict(params)) if cache.z is None else cache.z
    return (z if cache.z is None else ()), (rows.cost(z, cache.shares), rows.grad(z, cache.shares, params))


def _of_chunk(fn: Any, loss: Loss, intercept: bool, design: Any, by_row: Any, shared: Any, rows: Any) -> Any:
    targets, offset = by_row
    return fn(Linear(loss, design, targets, None, 0, intercept, offset), shared, rows)
