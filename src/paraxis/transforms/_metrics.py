"""Flax's metrics that several devices have updated, each from the whole old state: merged as if one had seen all rows.

Totals and counts are added up. Means and squared deviations are taken apart into the old ones and each device's, and
combined (Chan, Golub and LeVeque 1983). Where a metric was reset on the way, the old state is no part of it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from paraxis._jax import jax_api
from paraxis._modules import graphs


@dataclasses.dataclass(frozen=True)
class Metric:
    """The numbers of a metric's variables: of totals; or of count, mean and squared deviations."""

    numbers: tuple[int, ...]
    is_total: bool

    def merged(self, old: Sequence[jax.Array], new: Sequence[jax.Array], carried: bool) -> list[jax.Array]:
        """Merge the devices' values ``new``, ``(devices, ...)``. ``carried``: the old ones are a part of each."""
        start = [x if carried else jnp.zeros_like(x) for x in old]
        made = _added(start, new) if self.is_total else _moments(start, new)
        return [x.astype(before.dtype) for x, before in zip(made, old, strict=True)]


def found(modules: Any, graph: graphs.Graph) -> tuple[Metric, ...]:
    """Return the metrics among modules of which it is known how they are merged."""
    number = {id(v): i for i, v in enumerate(graph.variables)}
    metrics = []
    for _, node in graphs.nodes(modules):
        if isinstance(node, nnx.metrics.Average):
            metrics.append(Metric((number[id(node.total)], number[id(node.count)]), True))
        elif isinstance(node, nnx.metrics.Welford):
            metrics.append(Metric((number[id(node.count)], number[id(node.mean)], number[id(node.m2)]), False))
    return tuple(metrics)


def plain_writes(body: jax_api.ClosedJaxpr) -> jax_api.ClosedJaxpr:
    """Return a body in which a number that is written over whole is not taken for one that is changed.

    NNX writes ``x[...] = y`` as a scatter into the old number if the dtypes differ, as in Welford's own ``reset``.
    """

    def written(eqn: jax_api.JaxprEqn, operands: Sequence[Any]) -> Any:
        is_whole = eqn.primitive.name == "scatter" and jnp.shape(operands[0]) == () and not eqn.params["update_jaxpr"]
        return [operands[2]] if is_whole else None

    def run(*args: Any) -> list[Any]:
        return jax_api.evaluate(body, args, lambda eqn: eqn.primitive.name in ("jit", "pjit"), written)

    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in body.in_avals]
    return jax_api.trace(run, avals, {})[0]


def _added(old: Sequence[jax.Array], new: Sequence[jax.Array]) -> list[jax.Array]:
    return [x + jnp.sum(y - x, axis=0, dtype=x.dtype) for x, y in zip(old, new, strict=True)]


def _moments(old: Sequence[jax.Array], new: Sequence[jax.Array]) -> list[jax.Array]:
    (count, mean, squares), (counts, means, all_squares) = old, new
    own = counts - count  # of each device's rows
    weights, total = own.astype(mean.dtype), (count + jnp.sum(own, axis=0, dtype=count.dtype)).astype(mean.dtype)
    some = own > 0
    moved = jnp.where(some, (means - mean) * counts / jnp.where(some, own, 1), 0)  # from the old mean to its own
    new_mean = mean + jnp.sum(weights * moved, axis=0) / jnp.maximum(total, 1)
    shared = jnp.where(some, moved**2 * weights * count / jnp.where(counts > 0, counts, 1), 0)
    within = squares + jnp.sum(all_squares - squares - shared, axis=0)
    apart = weights * (mean + moved - new_mean) ** 2
    new_squares = within + count * (mean - new_mean) ** 2 + jnp.sum(apart, axis=0)
    return [count + jnp.sum(own, axis=0, dtype=count.dtype), new_mean, jnp.maximum(new_squares, 0)]
