"""Rows in a fixed number of groups, and sums over groups in a fixed tree: the same bits on any number of devices.

What changes last bits from one number of devices to another is a program compiled for that number, and sums in another
order. So all that computes runs here as a program of one device, called for each group, or on each device for itself;
programs over several devices only move values, and add pairs of them.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from paraxis._axes import arrays, layout, placing
from paraxis._axes.arrays import ready
from paraxis._axes.placing import Placement
from paraxis.errors import AxisError
from paraxis.train._batches import Batch

Packed = dict[str, jax.Array]
"""The leaves of a tree one after another, ``(1, total size)`` for each dtype."""


@dataclasses.dataclass(frozen=True)
class Groups:
    """Groups of the rows of a batch, as many on each device, in blocks.

    Args:
        what: the function of ours, for errors.
        number: how many: a power of two that the devices divide.
        placement: the devices; the size of its axis does not matter.

    Raises:
        AxisError: if the devices do not divide the groups, or are shared with other axes.
    """

    what: str
    number: int
    placement: Placement

    def __post_init__(self) -> None:
        devices = self.placement.num_devices
        if self.number % devices:
            power = 1 << (devices.bit_length() - 1)
            cure = f"write groups={devices}, and the same for other numbers of devices"
            if devices != power:
                cure = f"use {power} of them, axis=px.Axis('batch', 1, mesh=jax.make_mesh(({power},), ('batch',)))"
            raise AxisError(f"{self.what}: {self.number} groups cannot be shared evenly by {devices} devices; {cure}")
        if not placing.is_spread_alone(self.placement):
            assert self.placement.mesh is not None
            raise AxisError(
                f"{self.what}: rows lie over {self.placement.mesh_axes} of a mesh with axes "
                f"{self.placement.mesh.axis_names}, but a group has one device to itself; write "
                f"axis=px.Axis('batch', 1, over={self.placement.mesh.axis_names!r})"
            )

    @functools.cached_property
    def devices(self) -> list[tuple[int, Any]]:
        """The devices of this process, each with its number among all."""
        mine = jax.process_index()
        return [(n, d) for n, d in enumerate(placing.devices(self.placement)) if d.process_index == mine]

    @property
    def num_local(self) -> int:
        """Groups of one device."""
        return self.number // self.placement.num_devices

    def numbers(self, device: int) -> range:
        """Return the numbers of the groups of a device."""
        return range(device * self.num_local, (device + 1) * self.num_local)

    def bounds(self, num_rows: int) -> list[tuple[int, int]]:
        """First row and end of each group: blocks in order, the first ones with one row more."""
        size, longer = divmod(num_rows, self.number)
        starts = [size * g + min(g, longer) for g in range(self.number + 1)]
        return list(itertools.pairwise(starts))

    def split(self, batch: Batch) -> list[list[Any]]:
        """Return, for each device of this process, the rows of its groups, on it.

        Args:
            batch: of arrays on the host or on devices.

        Communicates: rows that lie in blocks over these devices stay where they are, if the groups divide their
        number; else all devices are sent all of them. Those on the host are sent to where they belong.
        """
        leaves, structure = jax.tree.flatten(batch.tree)
        found = [self._split(x, batch.num_rows) for x in leaves]
        return [
            [jax.tree.unflatten(structure, [leaf[d][g] for leaf in found]) for g in range(self.num_local)]
            for d in range(len(self.devices))
        ]

    def _split(self, x: Any, num_rows: int) -> list[list[Any]]:
        bounds = self.bounds(num_rows)
        mine = [[bounds[g] for g in self.numbers(n)] for n, _ in self.devices]
        if not isinstance(x, jax.Array) or (jax.process_count() > 1 and x.is_fully_addressable):
            return [_from_host(np.asarray(x), own, d) for own, (_, d) in zip(mine, self.devices, strict=True)]
        if x.ndim and x.shape[0] == num_rows and num_rows % self.number == 0 and self._is_in_blocks(x):
            mine = [[(a - own[0][0], b - own[0][0]) for a, b in own] for own in mine]
            blocks = self.copies(x)
        else:
            blocks = self.copies(self._everywhere(x))
        return [_cut(block, tuple(own)) for block, own in zip(blocks, mine, strict=True)]

    def _is_in_blocks(self, x: jax.Array) -> bool:
        return x.sharding == arrays.block_sharding(self.placement)

    def _everywhere(self, x: jax.Array) -> jax.Array:
        whole = arrays.whole_sharding(self.placement)
        if whole is None:
            return jax.device_put(x, self.devices[0][1])
        if x.is_fully_addressable:
            return jax.device_put(ready(x), whole)
        return jax.jit(_same, out_shardings=whole)(ready(x))

    def copies(self, tree: Any) -> list[Any]:
        """Return what each device of this process has of arrays that lie over them: its copy, or its block."""
        if arrays.whole_sharding(self.placement) is None:
            return [tree]
        leaves, structure = jax.tree.flatten(tree)
        held = [{shard.device: shard.data for shard in leaf.addressable_shards} for leaf in leaves]
        return [jax.tree.unflatten(structure, [shards[d] for shards in held]) for _, d in self.devices]

    def whole(self, copies: Sequence[Any]) -> Any:
        """Return what is the same on each device of this process, and of all others, as one tree."""
        sharding = arrays.whole_sharding(self.placement)
        return copies[0] if sharding is None else _assembled(copies, sharding, lambda x: x.shape)

    def summed(self, results: Sequence[Sequence[Any]], struct: Callable[[], Any]) -> list[Any]:
        """Return the sum over all groups, on each device of this process.

        Neighbours are added first, then neighbouring pairs, and so on; first on each device, then over the devices,
        where each gets the sum of a pair from both: addition does not depend on the order of two.

        Args:
            results: for each device of this process, for each of its groups, a tree of arrays; ``None``: no rows.
            struct: what such a tree looks like, asked if there are none.

        Communicates: one collective permute for each doubling of the devices, the size of a result for each dtype.
        """
        filled = [
            [_zeros(struct(), d) if x is None else x for x in found]
            for found, (_, d) in zip(results, self.devices, strict=True)
        ]
        if self.placement.num_devices == 1:
            return [_sum(found) for found in filled]
        shapes = _shapes(filled[0][0])
        blocks = arrays.block_sharding(self.placement)
        assert blocks is not None
        num_devices = self.placement.num_devices
        packed = _assembled([_packed(f) for f in filled], blocks, lambda x: (num_devices, *x.shape[1:]))
        total = _doubling(self.placement)(ready(packed))
        return [_unpacked(copy, shapes) for copy in self.copies(total)]


def _from_host(x: np.ndarray, bounds: Sequence[tuple[int, int]], device: Any) -> list[Any]:
    # Copies: the caller may change his array, and an array on a CPU device may be the host's memory.
    parts = [np.array(x[start:stop]) if x.ndim else np.array(x) for start, stop in bounds]
    return jax.device_put(parts, device)


@functools.partial(jax.jit, static_argnums=1)
def _cut(x: jax.Array, bounds: tuple[tuple[int, int], ...]) -> list[jax.Array]:
    return [x[start:stop] if x.ndim else x for start, stop in bounds]


def _same(x: Any) -> Any:
    return x


def _assembled(parts: Sequence[Any], sharding: Sharding, shape: Callable[[Any], tuple[int, ...]]) -> Any:
    def one(*held: jax.Array) -> jax.Array:
        return jax.make_array_from_single_device_arrays(shape(held[0]), sharding, list(held))

    return jax.tree.map(one, *parts)


def _zeros(struct: Any, device: Any) -> Any:
    return jax.device_put(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), struct), device)


@jax.jit
def _sum(trees: Sequence[Any]) -> Any:
    while len(trees) > 1:
        pairs = zip(trees[::2], trees[1::2], strict=True)
        trees = [jax.tree.map(jnp.add, left, right) for left, right in pairs]
    return trees[0]


@jax.jit
def _packed(trees: Sequence[Any]) -> Packed:
    leaves: dict[str, list[jax.Array]] = {}
    for x in jax.tree.leaves(_sum(trees)):
        leaves.setdefault(str(x.dtype), []).append(x.reshape(1, -1))
    return {dtype: jnp.concatenate(found, axis=1) for dtype, found in leaves.items()}


def _shapes(tree: Any) -> Hashable:
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((x.shape, str(x.dtype)) for x in leaves)


@functools.partial(jax.jit, static_argnums=1)
def _unpacked(packed: Packed, shapes: Any) -> Any:
    structure, leaves = shapes
    taken = dict.fromkeys(packed, 0)
    found = []
    for shape, dtype in leaves:
        start, size = taken[dtype], int(np.prod(shape))
        found.append(packed[dtype][0, start : start + size].reshape(shape))
        taken[dtype] += size
    return jax.tree.unflatten(structure, found)


@functools.lru_cache(maxsize=64)
def _doubling(placement: Placement) -> Any:
    """Add each device's row to its neighbour's, pairs to the next pair's, and so on: the sum is in every row."""

    def body(packed: Packed) -> Packed:
        distance = 1
        while distance < placement.num_devices:
            pairs = [(i, i ^ distance) for i in range(placement.num_devices)]
            others = jax.tree.map(lambda x, p=pairs: jax.lax.ppermute(x, placement.mesh_axes, p), packed)
            packed = jax.tree.map(jnp.add, packed, others)
            distance *= 2
        return packed

    return jax.jit(lambda packed: layout.run_per_device(body, placement, (packed,)))
