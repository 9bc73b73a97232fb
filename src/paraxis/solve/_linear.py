"""Generalised linear models: objectives of ``X @ W`` that never read X to try a step.

Along a direction D, the predictions are ``Z + stepsize * (X @ D)``. With both parts at hand, a trial costs as much as
its rows have outputs, and X is read twice per step, for ``X @ D`` and for the gradient, however many steps are tried.
LIBLINEAR does this for two classes on one machine (Fan et al. 2008); no solver in JAX did.

All that reads rows is a function of one block of them (:class:`Block`), mapped over the blocks, and a sum: ``px_map``
in the program. There is a block for each device that the rows lie over, and what is kept by row stays there.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paraxis._axes import arrays, layout, placing
from paraxis._axes.placing import Placement
from paraxis._core.programs import Traced
from paraxis.solve import _blocks as in_blocks, _cut as cut, _on_disk as on_disk, _trees as trees
from paraxis.solve._losses import Loss
from paraxis.solve._on_disk import OnDisk
from paraxis.solve._problem import Line, Passes, Point, Problem, Trial

_PIECE = 1 << 21  # bytes of rows
_WIDE = 128  # columns


class Cache(NamedTuple):
    """The products with the rows that a point of a linear problem keeps."""

    z: jax.Array  # predictions, (n,) or (k, n)
    shares: Any  # each row's part of the mean, (n,); None: equal. Kept, since a sum of weights is an exchange


@dataclasses.dataclass(frozen=True)
class Block:
    """Some of the rows: what is computed of each block alone. ``share`` is a row's part of the mean without weights.

    The compiler may divide them over so many devices: ``over``.
    """

    loss: Loss
    intercept: bool
    share: float
    over: int
    design: Any  # ``None`` for a function that does not read it
    targets: jax.Array

    def predictions(self, params: Any) -> jax.Array:
        """Return the predictions, as those of :class:`Linear`."""
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

    def mean(self, costs: jax.Array, shares: Any) -> jax.Array:
        """Return the rows' part of the mean of costs ``(..., n)``."""
        return jnp.sum((jnp.asarray(self.share, costs.dtype) if shares is None else shares) * costs, -1)

    def cost(self, z: jax.Array, shares: Any) -> jax.Array:
        """Return the rows' part of the objective."""
        return self.mean(self.loss.rows(z, self.targets), shares)

    def grad(self, z: jax.Array, shares: Any, params: Any) -> Any:
        """Their part of its gradient; ``params`` tell shapes only. Reads the rows once."""
        if self.loss.slope is None:
            return self.pulled(jax.grad(self.cost)(z, shares), params)
        share = jnp.asarray(self.share, z.dtype) if shares is None else shares
        return self.pulled(share * self.loss.slope(z, self.targets), params)

    def pulled(self, r: jax.Array, params: Any) -> Any:
        """Return the transpose of :meth:`predictions`, of ``r``, ``(n,)`` or ``(k, n)``."""
        coef = params[0] if self.intercept else params
        pieces = _num_pieces(self.design, coef, self.over)
        if pieces == 1:
            return jax.linear_transpose(self.predictions, params)(r)[0]
        rows = self.design.reshape(pieces, -1, len(coef))
        if coef.ndim == 1:
            parts = jnp.einsum("pn,pnd->pd", r.reshape(pieces, -1), rows, precision=trees.EXACT)
        else:
            outputs_last = jax.lax.optimization_barrier(r.T.reshape(pieces, -1, len(r)))
            parts = jnp.einsum("pnk,pnd->pkd", outputs_last, rows, precision=trees.EXACT)
        pulled = layout.in_one_place(jnp.sum(parts, 0).T.astype(coef.dtype))  # columns may be over devices, too
        return (pulled, jnp.sum(r, -1)) if self.intercept else pulled


def _num_pieces(design: jax.Array, coef: jax.Array, over: int) -> int:
    """Return into how many pieces rows are divided for a product that adds over them; their number is a multiple.

    XLA's CPU products of a vector with rows go through all of these for some columns at a time: of rows that stay in a
    cache they take half the time. Those of several vectors, where results are few, run on one core; a batch, on two.

    Where the compiler divides rows ``over`` devices, each has whole pieces: else it would exchange the rows.
    """
    size = design.size * design.dtype.itemsize
    if jax.default_backend() != "cpu" or size < 2 * _PIECE or (coef.ndim > 1 and len(coef) < _WIDE):
        return 1
    wanted = -(-size // _PIECE) if coef.ndim == 1 else 2
    least = -(-wanted // over) * over
    return next((pieces for pieces in range(least, 4 * wanted + 1, over) if len(design) % pieces == 0), 1)


@dataclasses.dataclass(frozen=True)
class _OfBlock:
    """A function of a :class:`Block` as one of arrays."""

    fn: Callable[[Block, Any, Any], tuple[Any, Any]]
    loss: Loss
    intercept: bool
    share: float
    over: int

    def __call__(self, shared: Any, first: Any, last: Any) -> tuple[Any, Any]:
        return self.fn(Block(self.loss, self.intercept, self.share, self.over, *first), shared, last)


def _cost(block: Block, params: Any, shares: Any) -> Any:
    return (), block.cost(block.predictions(params), shares)


def _predicted(block: Block, params: Any, _: Any) -> Any:
    return block.predictions(params), ()


def _begun(block: Block, params: Any, shares: Any) -> Any:
    z = block.predictions(params)
    return z, (block.cost(z, shares), block.grad(z, shares, params))


def _tried(block: Block, stepsize: jax.Array, rows: Any) -> Any:
    z, dz, shares = rows
    one = jnp.ones_like(stepsize)

    def along(stepsize: jax.Array) -> jax.Array:
        return block.loss.rows(z + stepsize * dz, block.targets)

    (value, slope), (_, curvature) = jax.jvp(lambda a: jax.jvp(along, (a,), (one,)), (stepsize,), (one,))
    return (), block.mean(jnp.stack([value, slope, curvature]), shares)  # one sum: one exchange


def _moved(block: Block, given: Any, rows: Any) -> Any:
    stepsize, params = given
    z, dz, shares = rows
    z = z + stepsize * dz
    return z, block.grad(z, shares, params)


def _bent(block: Block, direction: Any, rows: Any) -> Any:
    z, shares = rows
    dz = block.predictions(direction)
    curved = jax.jvp(lambda z: jax.grad(block.cost)(z, shares), (z,), (dz,))[1]
    return dz, block.pulled(curved, direction)


def _zeros(block: Block, _: Any, z: jax.Array) -> Any:
    return jnp.zeros_like(z), ()


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["design", "targets", "weight", "l2"],
    meta_fields=["loss", "intercept", "blocks", "num_rows"],
)
@dataclasses.dataclass(frozen=True)
class Linear(Problem):
    """The mean cost of rows, plus ``l2 / 2`` times the squared norm of the coefficients; an intercept is not penalised.

    Args:
        loss: the loss of a row.
        design: the rows, ``(n, d)``, also on disk.
        targets: ``(n,)``, or ``(n, k)`` for several outputs that are no classes.
        weight: ``(n,)``, or ``None`` for equal weights; the mean is over the sum of the weights. A row of weight zero
            does not count, as long as it is finite.
        l2: scalar.
        intercept: whether parameters are a pair of coefficients and intercept.
        blocks: where the blocks of rows lie.
        num_rows: how many are no padding, which is behind them; ``None``: all.
    """

    loss: Loss
    design: Any
    targets: jax.Array
    weight: jax.Array | None
    l2: Any
    intercept: bool
    blocks: Placement = placing.AT_HAND
    num_rows: int | None = None
    tight = True
    adds_up = True

    @property
    def beside(self) -> jax.Array:
        """An array that lies where the rows do."""
        return self.targets if isinstance(self.design, OnDisk) else self.design

    @property
    def passes(self) -> Passes:
        """Rows on disk are read once where others are read forwards and backwards."""
        times = 1 if isinstance(self.design, OnDisk) else 2
        return Passes(start=times, line=1, trial=0, end=1, product=times, refresh=1)

    def value(self, params: Any) -> jax.Array:
        """Return the objective, as a plain function that JAX can differentiate in whatever way."""
        return self._of_blocks(_cost, params, self._shares(params))[1] + self._penalty(params)

    def predictions(self, params: Any) -> jax.Array:
        """``(d, k)`` coefficients → ``(k, n)``; ``(d,)`` → ``(n,)``. Linear in them. Reads the rows once."""
        return self._of_blocks(_predicted, params, ())[0]

    def start(self, params: Any) -> Point:
        shares = self._shares(params)
        z, (cost, grad) = self._of_blocks(_begun, params, shares)
        return Point(params, cost + self._penalty(params), self._with_penalty(grad, params), None, Cache(z, shares))

    def line(self, point: Point, direction: Any, cached: Any = None) -> Line:
        z, shares = point.cache
        dz = self.predictions(direction) if cached is None else cached
        l2 = jnp.asarray(0 if self.l2 is None else self.l2, z.dtype)
        own, step = self._coef(point.params), self._coef(direction)
        zero, half, whole = trees.dot(own, own), trees.dot(own, step), trees.dot(step, step)

        def at(stepsize: jax.Array) -> Trial:
            value, slope, curvature = self._of_blocks(_tried, stepsize, (z, dz, shares), reads=False)[1]
            return Trial(
                value + 0.5 * l2 * (zero + 2 * stepsize * half + stepsize**2 * whole),
                slope + l2 * (half + stepsize * whole),
                curvature + l2 * whole,
                (),
            )

        def end(stepsize: jax.Array, trial: Trial) -> Point:
            params = trees.along(point.params, stepsize, direction)
            there, grad = self._of_blocks(_moved, (stepsize, params), (z, dz, shares))
            return Point(params, trial.value, self._with_penalty(grad, params), None, Cache(there, shares))

        unknown = jnp.full((), jnp.nan, z.dtype)
        return Line(Trial(point.value, trees.dot(point.grad, direction), unknown, ()), at, end)

    def ahead(self, direction: Any) -> Any:
        return self.predictions(direction)

    def products(self, point: Point) -> tuple[Callable[[Any], tuple[Any, Any]], Any]:
        def product(direction: Any) -> tuple[Any, Any]:
            dz, found = self._of_blocks(_bent, direction, tuple(point.cache))
            return self._with_penalty(found, direction), dz

        # Zeros that lie as the predictions do: else programs that take either are compiled for both.
        return product, self._of_blocks(_zeros, (), point.cache.z, reads=False)[0]

    def refreshed(self, point: Point) -> Point:
        """Return the same point with its predictions computed anew: steps added up leave rounding behind. One pass."""
        return point._replace(cache=point.cache._replace(z=self.predictions(point.params)))

    def _shares(self, params: Any) -> jax.Array | None:
        """Return each row's part of the mean; ``None``: the same for all."""
        if self.weight is None:
            return None
        weight = self.weight.astype(jnp.result_type(self._coef(params), self.design))
        total = self._of_blocks(lambda block, _, weight: ((), jnp.sum(weight)), (), weight, reads=False)[1]
        return self._of_blocks(lambda block, total, weight: (weight / total, ()), total, weight, reads=False)[0]

    def _of_blocks(
        self, fn: Callable[[Block, Any, Any], Any], shared: Any, rows: Any, *, reads: bool = True
    ) -> tuple[Any, Any]:
        """``fn(block, shared, rows)`` → what is kept and what is summed, of each block: kept values ``(..., n)``, sums.

        ``rows`` are ``(..., n)``. A function that does not read X says so; one that does is the same each time.
        Communicates: one all-reduce the size of the sums.
        """
        run = _OfBlock(fn, self.loss, self.intercept, 1 / self.design.shape[0], self._over)
        design = self.design if reads else None
        if isinstance(design, OnDisk):
            return on_disk.passed(run, design, self.targets, shared, rows)
        if on_disk.tells_in_type(self.design):  # then the compiler divides the one block
            return run(shared, (design, self.targets), rows)
        return in_blocks.mapped(run, self.blocks, shared, (design, self.targets), rows)

    @property
    def _over(self) -> int:
        """The number of devices over which the compiler may divide a block of rows, or a multiple of all such."""
        if isinstance(self.design, OnDisk) or self.blocks.mesh is not None:  # a block for each device
            return 1
        if on_disk.tells_in_type(self.design):
            return jax.typeof(self.design).sharding.mesh.size
        return math.lcm(*(count for count in range(1, jax.device_count() + 1) if len(self.targets) % count == 0))

    def _coef(self, params: Any) -> jax.Array:
        return params[0] if self.intercept else params

    def _penalty(self, params: Any) -> Any:
        if self.l2 is None:
            return 0
        squares = jnp.sum(self._coef(params) ** 2)
        return jnp.asarray(0.5 * self.l2, squares.dtype) * squares

    def _with_penalty(self, grad: Any, params: Any) -> Any:
        if self.l2 is None:
            return grad
        coef = self._coef(grad) + jnp.asarray(self.l2, self._coef(grad).dtype) * self._coef(params)
        return (coef, grad[1]) if self.intercept else coef


_value = Traced(Linear.value, cut.compiled)


def value(problem: Linear, params: Any) -> jax.Array:
    """Return the objective, compiled: outside a program, to lay rows out in blocks would copy them."""
    return _value(*arrays.ready((problem, params)))
