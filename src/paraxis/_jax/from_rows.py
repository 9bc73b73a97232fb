"""Exchanges between elements, from the rows of all, ``(size, ...)``; ``index`` is the number of this one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def _all_gather(rows: jax.Array, index: Any, *, size: int, all_gather_dimension: int, tiled: bool, **_: Any) -> Any:
    moved = jnp.moveaxis(rows, 0, all_gather_dimension)
    if not tiled:
        return moved
    shape = list(rows.shape[1:])
    shape[all_gather_dimension] *= size
    return moved.reshape(shape)


def _permute(rows: jax.Array, index: Any, *, size: int, perm: Any, **_: Any) -> jax.Array:
    source = np.full(size, size)
    for giver, taker in perm:
        source[taker] = giver
    padded = jnp.concatenate([rows, jnp.zeros_like(rows[:1])])
    return padded[jnp.asarray(source)[jnp.minimum(index, size - 1)]]


def _scatter_sum(rows: jax.Array, index: Any, *, size: int, scatter_dimension: int, tiled: bool, **_: Any) -> Any:
    return _part(rows.sum(0), index, size=size, dimension=scatter_dimension, tiled=tiled)


def all_to_all(rows: Any, index: Any, *, size: int, split_axis: int, concat_axis: int, **_: Any) -> Any:
    # JAX adds and drops the dimensions of an untiled exchange outside the primitive, which itself is always tiled.
    parts = _part(rows, index, size=size, dimension=split_axis + 1, tiled=True)
    return _all_gather(parts, index, size=size, all_gather_dimension=concat_axis, tiled=True)


def _part(x: jax.Array, index: Any, *, size: int, dimension: int, tiled: bool) -> jax.Array:
    at = jnp.minimum(index, size - 1)
    if not tiled:
        return jax.lax.dynamic_index_in_dim(x, at, dimension, keepdims=False)
    width = x.shape[dimension] // size
    return jax.lax.dynamic_slice_in_dim(x, at * width, width, dimension)


BY_NAME: dict[str, Callable[..., Any]] = {
    "all_gather": _all_gather,
    "ppermute": _permute,
    "reduce_scatter": _scatter_sum,
    "all_to_all": all_to_all,
}
