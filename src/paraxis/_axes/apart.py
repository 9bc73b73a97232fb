"""Rows of an axis that lie each for itself, on the device that has their block; joined to arrays, and back."""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from paraxis._axes import arrays, layout, placing
from paraxis._axes.placing import Placement

Rows = list[Any]
"""A tree for each row, on the device that the row's block is on; as many as there are elements, without padding."""


def split(tree: Any, placement: Placement) -> Rows:
    """Leaves ``(size, ...)`` → rows."""
    sharding = arrays.block_sharding(placement)
    if sharding is None:
        return _unstack(tree, placement.size)
    padded = arrays.padded(tree, placement) if placement.is_padded else tree
    return split_blocks(jax.device_put(padded, sharding), placement)


def split_blocks(tree: Any, placement: Placement) -> Rows:
    """Leaves ``(num_padded, ...)``, each device holding its block → rows; nothing is moved."""
    if len(placing.devices(placement)) == 1:
        return _unstack(tree, placement.size)
    rows: Rows = []
    for number, block in enumerate(on_devices(tree, placement)):
        count = min(placement.num_local, placement.size - number * placement.num_local)
        rows += _unstack(block, count) if count > 0 else []
    return rows


def on_devices(tree: Any, placement: Placement) -> list[Any]:
    """Return what each device holds of a tree of arrays that lie over them: their blocks, or its copies."""
    leaves, structure = jax.tree.flatten(tree)
    held = [{shard.device: shard.data for shard in leaf.addressable_shards} for leaf in leaves]
    return [jax.tree.unflatten(structure, [shards[d] for shards in held]) for d in placing.devices(placement)]


def stacked(rows: Rows, placement: Placement) -> Any:
    """Cut rows to leaves ``(size, ...)``."""
    return jax.tree.map(lambda leaf: layout.unpad(leaf, placement), stacked_blocks(rows, placement))


def stacked_blocks(rows: Rows, placement: Placement) -> Any:
    """Lay rows as leaves ``(num_padded, ...)``."""
    return joined([stack(block, placement.num_local) for block in blocks(rows, placement)], placement)


def blocks(rows: Rows, placement: Placement) -> list[Rows]:
    """Return each device's elements; a device without any is sent the last one, to stand in."""
    starts = range(0, placement.num_padded, placement.num_local)
    return [rows[start : start + placement.num_local] or rows[-1:] for start in starts]


def joined(blocks: Sequence[Any], placement: Placement) -> Any:
    """Join each device's leaves ``(n, ...)`` to one tree of leaves ``(num_devices * n, ...)`` over the devices."""
    sharding = arrays.block_sharding(placement)
    if sharding is None or len(blocks) == 1:
        return blocks[0]
    # A result that depends on no argument was made on the default device.
    held = [jax.device_put(block, d) for block, d in zip(blocks, placing.devices(placement), strict=True)]

    def one(*parts: jax.Array) -> jax.Array:
        shape = (len(parts) * parts[0].shape[0], *parts[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, sharding, list(parts))

    return jax.tree.map(one, *held)


@functools.partial(jax.jit, static_argnums=1)
def _unstack(block: Any, count: int) -> Rows:
    return [jax.tree.map(operator.itemgetter(index), block) for index in range(count)]


@functools.partial(jax.jit, static_argnums=1)
def stack(rows: Sequence[Any], size: int) -> Any:
    """Return rows on one device → leaves ``(size, ...)``, padded if there are fewer."""
    return jax.tree.map(lambda *leaves: layout.repeat_last(jnp.stack(leaves), size), *rows)
