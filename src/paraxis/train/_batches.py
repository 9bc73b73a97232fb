"""The rows of one step over the devices: laid out in blocks, padded where they do not divide, cut inside a program.

A slice that takes the padding off, ``x[:num_rows]``, leaves the rows where they are, since the compiler splits them
unevenly and masks what it adds itself. So a program computes with the real rows alone, whatever their number.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from paraxis._axes import arrays, layout, placing, tree
from paraxis._axes.axis import Axis
from paraxis._axes.placing import Placement
from paraxis._calls import check
from paraxis._jax import dtypes
from paraxis.errors import AxisError, DataError, ShapeError


def axis_of(what: str, axis: Any) -> Axis:
    """Return the axis that the rows of batches lie on; its size is that of the batch at hand.

    Raises:
        AxisError: if it is none, or bounds its elements in memory.
    """
    found = Axis(axis, 1) if isinstance(axis, str) and axis else axis
    if not isinstance(found, Axis) or found.at_once is not None:
        raise AxisError(
            f"{what}: axis must be a name, or a px.Axis without at_once, got {check.described(axis)}; to bound memory, "
            "write px.train_step(loss, microbatches=4)"
        )
    return found


class Devices:
    """The devices that the rows of batches go to.

    Attributes:
        placement: where rows go; the size of its axis is not theirs.
        whole: the sharding of a value that is whole on each device; ``None``: there is one device.
        blocks: that of rows that divide by the devices, likewise.
        waits: whether inputs must be there before a program starts: on simulated devices, programs with collectives
            that wait for theirs can take the threads that others need.
    """

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.whole: Sharding | None = arrays.whole_sharding(placement)
        self.blocks: Sharding | None = arrays.block_sharding(placement)
        self.waits = self.blocks is not None and placement.num_devices > 1 and jax.default_backend() == "cpu"

    def lay_out(self, what: str, batch: Any, microbatches: int = 1) -> tuple[Any, int]:
        """Return a whole batch, which each process has, in blocks over the devices, and its number of rows.

        Communicates: sends each device its rows, unless they lie there.
        """
        number = num_rows(what, batch)
        if self.blocks is None or all(self._lies(x) for x in jax.tree.leaves(batch)):
            return batch, number
        placement = self.placement.holding(number, turns=min(microbatches, number))
        return jax.tree.map(lambda x: self._laid(x, placement), batch), number

    def _lies(self, x: Any) -> bool:
        return isinstance(x, jax.Array) and x.sharding == (self.blocks if x.ndim else self.whole)

    def _laid(self, x: Any, placement: Placement) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct):  # to be compiled for, not run
            if not x.ndim:
                return jax.ShapeDtypeStruct((), x.dtype, sharding=self.whole)
            return arrays.rows_struct(x, placement)
        if isinstance(x, jax.Array) and (jax.process_count() == 1 or not x.is_fully_addressable):
            if x.ndim and placement.is_padded:
                x = arrays.padded(arrays.ready(x), placement)
            return jax.device_put(x, self.blocks if x.ndim else self.whole)
        host = np.asarray(x)
        numbers = local_rows(placement)
        return assemble(host[numbers] if host.ndim and len(numbers) < len(host) else np.array(host), placement)


@functools.lru_cache(maxsize=64)
def _devices(placement: Placement) -> Devices:
    return Devices(placement)


def devices_of(axis: Axis) -> Devices:
    """Return the devices that an axis's rows go to, by the mesh in force: the same object for the same devices."""
    return _devices(placing.on_auto(placing.place(axis)).holding(1))


def num_rows(what: str, batch: Any) -> int:
    """Return the number of rows that all leaves of a batch have; 0-d ones have none.

    Raises:
        ShapeError: naming two leaves that differ, or a leaf that is no array of numbers.
        DataError: if there are no rows, or JAX would cut integers.
    """
    sizes = {x.shape[0] if isinstance(x, jax.Array) and x.ndim else 0 for x in jax.tree.leaves(batch)}
    if len(sizes) == 1 and (number := sizes.pop()):
        return number  # as nearly always
    found: tuple[str, int] | None = None
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        name = tree.name("batch", path)
        shape = leaf.shape if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) else _shape(what, name, leaf)
        if shape and found is None:
            found = name, shape[0]
        elif shape and found is not None and shape[0] != found[1]:
            raise ShapeError(
                f"{what}: {name} has {shape[0]} rows, {found[0]} has {found[1]}; every array of a batch starts with "
                "its rows, and what is the same for all is 0-d or belongs in the function"
            )
    if found is None or not found[1]:
        raise DataError(f"{what}: the batch has no rows; a batch is a tree of arrays (rows, ...)")
    return found[1]


def _shape(what: str, name: str, leaf: Any) -> tuple[int, ...]:
    array = np.asarray(leaf)
    if array.dtype.kind not in "biufcV":
        raise ShapeError(f"{what}: {name} is {array.dtype}, not numbers; a batch holds arrays of numbers")
    if (reason := check.why_cut(array)) is not None:
        raise DataError(f"{what}: {name} {reason}")
    return array.shape


def read(reader: Callable[[np.ndarray], Any], placement: Placement) -> Any:
    """Lay a batch out of which each process reads only the rows of its own devices.

    Rows that do not divide by the devices stay on the host, whole in each process: a step pads them.

    Args:
        reader: is called once, with numbers between 0 and ``placement.size``, and gives host arrays that stay as they
            are.
        placement: where to.

    Communicates: sends each device its rows, from its own host.
    """
    if placement.is_padded:
        return reader(np.arange(placement.size))
    return jax.tree.map(lambda x: assemble(np.asarray(x), placement), reader(local_rows(placement)))


@functools.lru_cache(maxsize=256)
def local_rows(placement: Placement) -> np.ndarray:
    """Return the numbers of the rows on this process's devices, ascending; padding is made of the last row."""
    size, num_padded, blocks = placement.size, placement.num_padded, arrays.block_sharding(placement)
    if blocks is None:
        return np.arange(size)
    needed = np.zeros(size, bool)
    for index in blocks.addressable_devices_indices_map((num_padded,)).values():
        assert index is not None
        start, stop, _ = index[0].indices(num_padded)
        needed[min(start, size - 1) : stop] = True
    return np.flatnonzero(needed)


def assemble(local: np.ndarray, placement: Placement) -> jax.Array:
    """Return an array over all processes' devices, of the rows that this one has."""
    local = dtypes.native(local)
    local = local.astype(jax.dtypes.canonicalize_dtype(local.dtype), copy=False)
    blocks, whole = arrays.block_sharding(placement), arrays.whole_sharding(placement)
    numbers, num_padded = local_rows(placement), placement.num_padded
    if blocks is None or whole is None:
        return jnp.asarray(local)
    if local.ndim == 0:
        return jax.make_array_from_callback((), whole, lambda _: local)

    def block(index: Any) -> np.ndarray:
        start, stop, _ = index[0].indices(num_padded)
        first, end = np.searchsorted(numbers, [min(start, numbers[-1]), stop])
        return layout.repeat_last(local[first:end], stop - start)

    return jax.make_array_from_callback((num_padded, *local.shape[1:]), blocks, block)


def rows(padded: Any, num_rows: int) -> Any:
    """Return the real rows, inside a compiled function, where this moves nothing."""
    return jax.tree.map(lambda x: x[:num_rows] if x.ndim and x.shape[0] > num_rows else x, padded)


def microbatch(padded: Any, index: Any, number: int, size: int) -> Any:
    """Inside a compiled function: of the rows ``index``, ``index + number``, … the first ``size``.

    Nothing is moved for it if the batch was laid out for so many micro-batches.
    """

    def one(x: jax.Array) -> jax.Array:
        if not x.ndim:
            return x
        x = layout.repeat_last(x, x.shape[0] + -x.shape[0] % number)
        mine = x.reshape(x.shape[0] // number, number, *x.shape[1:])
        return jax.lax.dynamic_index_in_dim(mine, index, 1, keepdims=False)[:size]

    return jax.tree.map(one, padded)
