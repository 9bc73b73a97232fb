"""Rows in blocks, one for each device: a function of one block, mapped over them, and summed."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from paraxis._axes.placing import Placement
from paraxis._core import maps

OfBlock = Callable[[Any, Any, Any], tuple[Any, Any]]
"""``(shared, first, last)`` of a block → what is kept by row, and what is summed.

Arrays by row have rows as the first dimension in ``first``, as the last in ``last`` and in what is kept.
"""


def mapped(fn: OfBlock, blocks: Placement, shared: Any, first: Any, last: Any) -> tuple[Any, Any]:
    """Return what is kept, ``(..., n)``, and the sums. Communicates: one all-reduce the size of the sums."""
    size = blocks.size

    def split(x: jax.Array, at: int) -> jax.Array:  # moves nothing between devices
        return jnp.moveaxis(x.reshape(*x.shape[:at], size, x.shape[at] // size, *x.shape[at + 1 :]), at, 0)

    def joined(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, -2).reshape(*x.shape[1:-1], size * x.shape[-1])

    def of_block(shared: Any, own: Any) -> Any:
        return fn(shared, *own)

    placed = jax.tree.map(lambda x: split(x, 0), first), jax.tree.map(lambda x: split(x, x.ndim - 1), last)
    kept, sums = maps.map_and_sum(of_block, shared, placed, blocks)
    return jax.tree.map(joined, kept), sums
