"""Members that stay on the devices between calls.

A program's values come and go; a state is kept. Members are kept in one of two forms, whichever the function at hand
runs best on: *stacked*, leaves ``(num_padded, ...)`` in blocks over the devices, with the padding rows kept as well, so
that nothing is ever moved to cut them off; or *separate*, a tree per member on its device. Blocks are the same in both,
so that to change the form moves nothing between devices.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._axes import apart, arrays, layout, placing
from paraxis._axes.arrays import ready
from paraxis._axes.placing import Placement
from paraxis._jax import jax_api

_T = TypeVar("_T")


class Resident(abc.ABC):
    """Rows of one axis."""

    placement: Placement

    @abc.abstractmethod
    def part(self, take: Callable[[Any], Any]) -> "Resident":
        """Return a part of each row's tree; ``take`` only picks."""

    @abc.abstractmethod
    def as_stacked(self) -> "Stacked":
        """Return the same rows in one array per leaf."""

    @abc.abstractmethod
    def as_separate(self) -> "Separate":
        """Return the same rows each for itself."""

    @abc.abstractmethod
    def per_device(self, summary: Callable[[Any, jax.Array], _T], weights: np.ndarray) -> _T:
        """``summary(rows, weights)`` of each device's rows ``(n, ...)``, as leaves ``(num_devices, ...)`` over them.

        Rows that are no elements have the weight zero.
        """

    @abc.abstractmethod
    def row(self, index: int) -> Any:
        """Return one row's tree, free of the mesh."""

    @abc.abstractmethod
    def struct(self) -> Any:
        """Return what one row's tree looks like."""

    def stacked(self) -> Any:
        """Leaves ``(size, ...)``."""
        rows = self.as_stacked()
        return jax.tree.map(lambda leaf: _unpadded(leaf, rows.placement), rows.tree)

    def readable(self) -> Any:
        """Return the same; of several processes, each can read all of it."""
        return arrays.whole(self.stacked())

    def gathered(self) -> Any:
        """Leaves ``(size, ...)`` that any operation takes."""
        return ready(jax.tree.map(lambda leaf: plain(leaf, self.placement), ready(self.stacked())))


@dataclasses.dataclass(frozen=True)
class Stacked(Resident):
    """Leaves ``(num_padded, ...)``."""

    placement: Placement
    tree: Any

    def part(self, take: Callable[[Any], Any]) -> "Stacked":
        return Stacked(self.placement, take(self.tree))

    def as_stacked(self) -> "Stacked":
        return self

    def as_separate(self) -> "Separate":
        return Separate(self.placement, apart.split_blocks(self.tree, self.placement))

    def per_device(self, summary: Callable[[Any, jax.Array], _T], weights: np.ndarray) -> _T:
        padded = layout.padded_weights(np.asarray(weights, np.float32), self.placement.num_padded)
        return _summaries(summary, self.placement, self.tree, padded)

    def row(self, index: int) -> Any:
        return arrays.unbound(jax.tree.map(lambda leaf: plain(leaf, self.placement)[index], ready(self.tree)))

    def struct(self) -> Any:
        return jax.tree.map(jax_api.element_struct, self.tree)


@dataclasses.dataclass(frozen=True)
class Separate(Resident):
    """A tree for each row, on its device."""

    placement: Placement
    rows: apart.Rows

    def part(self, take: Callable[[Any], Any]) -> "Separate":
        return Separate(self.placement, [take(row) for row in self.rows])

    def as_stacked(self) -> Stacked:
        with jax.ensure_compile_time_eval():  # also where a function that uses them is being traced
            return Stacked(self.placement, apart.stacked_blocks(self.rows, self.placement))

    def as_separate(self) -> "Separate":
        return self

    def stacked(self) -> Any:
        if not self.placement.is_padded or jax.default_backend() != "cpu" or arrays.is_traced(self.rows):
            return super().stacked()
        # By copies of the rows alone; see _unpadded.
        first = placing.devices(self.placement)[0]
        whole = apart.stack(jax.device_put(self.rows, first), len(self.rows))
        target = arrays.sharding(self.placement, rows=True)
        return whole if target is None else jax.device_put(whole, target)

    def per_device(self, summary: Callable[[Any, jax.Array], _T], weights: np.ndarray) -> _T:
        padded = layout.padded_weights(np.asarray(weights, np.float32), self.placement.num_padded)
        blocks = apart.blocks(self.rows, self.placement)
        each = zip(blocks, padded.reshape(len(blocks), -1), strict=True)
        return apart.joined([_summary(summary, rows, own) for rows, own in each], self.placement)

    def row(self, index: int) -> Any:
        return arrays.unbound(self.rows[index])

    def struct(self) -> Any:
        return jax.tree.map(jax_api.struct, self.rows[0])


def _unpadded(leaf: jax.Array, placement: Placement) -> jax.Array:
    """Cut padded rows to ``(size, ...)``, on CPU by copies, which need not be waited for; see :func:`ready`."""
    if not placement.is_padded or jax.default_backend() != "cpu" or arrays.is_traced(leaf):
        return layout.unpad(leaf, placement)
    if not placing.can_be_dispatched(placement):
        return layout.unpad(ready(leaf), placement)
    first = placing.devices(placement)[0]
    blocks = sorted(leaf.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    whole = _joined([jax.device_put(shard.data, first) for shard in blocks], placement.size)
    target = arrays.sharding(placement, rows=True)
    return whole if target is None else jax.device_put(whole, target)


@functools.partial(jax.jit, static_argnums=1)
def _joined(blocks: Sequence[jax.Array], size: int) -> jax.Array:
    return jnp.concatenate(blocks)[:size]


def plain(leaf: jax.Array, placement: Placement) -> jax.Array:
    """On an Explicit mesh, rows brought together: cut and joined there, they would have no type."""
    return layout.constrain(leaf, placement, rows=False) if placement.is_explicit else leaf


def described(rows: Resident, placement: Placement) -> Stacked:
    """Return what rows look like on other devices, to be compiled for and not run."""
    size = placement.size

    def one(x: Any) -> jax.ShapeDtypeStruct:
        return arrays.rows_struct(jax.ShapeDtypeStruct((size, *x.shape), x.dtype), placement)

    return Stacked(placement, jax.tree.map(one, rows.struct()))


def on_devices(tree: Any, placement: Placement) -> Stacked:
    """Leaves ``(size, ...)`` → members on the devices."""
    return Stacked(placement, arrays.laid_out(tree, placement))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _summaries(summary: Callable[..., Any], placement: Placement, tree: Any, weights: jax.Array) -> Any:
    def on_device(tree: Any, weights: jax.Array) -> Any:
        return jax.tree.map(lambda leaf: leaf[None], summary(tree, weights))

    return layout.run_per_device(on_device, placement, (tree, weights))


@functools.partial(jax.jit, static_argnums=0)
def _summary(summary: Callable[..., Any], rows: Sequence[Any], weights: jax.Array) -> Any:
    tree = jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)
    return jax.tree.map(lambda leaf: leaf[None], summary(tree, weights[: len(rows)]))
