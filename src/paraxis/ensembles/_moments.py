"""All members combined into one value on every device, by one exchange."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._axes.arrays import ready
from paraxis._axes.placing import Placement
from paraxis._core import primitives
from paraxis.ensembles._resident import Resident


def mean(rows: Resident, weights: np.ndarray) -> Any:
    """Weighted mean over the rows, ``(...)``; a row with weight zero does not count, whatever it holds.

    Communicates: one all-reduce the size of the result.
    """
    return combine_sums(ready(rows.per_device(weighted_sums, weights)), rows.placement, float(weights.sum()))


def moments(rows: Resident, weights: np.ndarray) -> tuple[Any, Any]:
    """Weighted mean and variance over the rows, ``(...)`` each.

    Sums of squares would do with less to send, but lose the variance to rounding where it is small beside the mean.
    So each device takes the moments of its own rows, and those are combined (Chan, Golub and LeVeque 1983).

    Communicates: one all-reduce of ``2 * num_devices`` times the size of the result.
    """
    return combine_moments(ready(rows.per_device(local_moments, weights)), rows.placement)


def weighted_sums(tree: Any, weights: jax.Array) -> Any:
    """Return a device's rows ``(n, ...)`` → their weighted sum."""
    return jax.tree.map(lambda leaf: jnp.sum(_weighted(leaf, weights), 0), tree)


def _weighted(leaf: jax.Array, weights: jax.Array) -> jax.Array:
    w = weights.reshape((-1,) + (1,) * (leaf.ndim - 1))
    wide = jnp.promote_types(leaf.dtype, jnp.float32)
    return jnp.where(w > 0, leaf, 0).astype(wide) * w


def local_moments(tree: Any, weights: jax.Array) -> Any:
    """Return the sum of a device's rows' weights, their mean, and the weighted sum of squared deviations from it."""
    total = jnp.sum(weights)

    def one(leaf: jax.Array) -> Any:
        center = jnp.sum(_weighted(leaf, weights), 0) / jnp.where(total > 0, total, 1)
        deviations = leaf.astype(center.dtype) - center
        return center, jnp.sum(_weighted(deviations**2, weights), 0)

    leaves, structure = jax.tree.flatten(tree)
    centers, squares = zip(*map(one, leaves), strict=True)
    return total, jax.tree.unflatten(structure, centers), jax.tree.unflatten(structure, squares)


@functools.partial(jax.jit, static_argnums=1)
def combine_sums(sums: Any, placement: Placement, total: jax.Array) -> Any:
    """Return each device's sum → the mean."""
    name, size = placement.axis.name, placement.num_devices

    def one(partial: jax.Array) -> jax.Array:
        return primitives.reduce("sum", partial, axis=name, size=size) / jnp.asarray(total, partial.dtype)

    return jax.tree.map(one, sums)


@functools.partial(jax.jit, static_argnums=1)
def combine_moments(parts: Any, placement: Placement) -> tuple[Any, Any]:
    """Return each device's moments → mean and variance."""
    num = placement.num_devices
    totals, centers, squares = jax.tree.map(lambda part: _slots(part, placement), parts)
    total = jnp.sum(totals)

    def center(means: jax.Array) -> jax.Array:
        return jnp.tensordot(totals, means, 1) / total

    def spread(means: jax.Array, squares: jax.Array) -> jax.Array:
        between = totals.reshape((num,) + (1,) * (means.ndim - 1)) * (means - center(means)) ** 2
        return (jnp.sum(squares, 0) + jnp.sum(between, 0)) / total

    return jax.tree.map(center, centers), jax.tree.map(spread, centers, squares)


def _slots(part: jax.Array, placement: Placement) -> jax.Array:
    """``(num_devices, ...)`` over the devices → the same on each of them, by one sum of mostly zeros."""
    num = placement.num_devices
    own = jnp.eye(num, dtype=bool).reshape((num, num) + (1,) * (part.ndim - 1))
    return primitives.reduce("sum", jnp.where(own, part[:, None], 0), axis=placement.axis.name, size=num)
