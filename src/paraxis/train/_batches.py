"""The rows of one step over the devices: laid out in blocks, padded where they do not divide, cut inside a program.

A slice that takes the padding off, ``x[:num_rows]``, leaves the rows where they are, since the compiler splits them
unevenly and masks what it adds itself. So a program computes with the real rows alone, whatever their number.
"""

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType

from paraxis._core import arrays, check, placing
from paraxis.errors import AxisError, DataError, axis_advice


def axis_of(what: str, axis: Any) -> placing.Axis:
    """Return the axis that the rows of batches lie on; its size is that of the batch at hand."""
    resolved = placing.Axis(axis, 1) if isinstance(axis, str) and axis else axis
    if not isinstance(resolved, placing.Axis) or resolved.at_once is not None:
        raise AxisError(
            f"{what}: axis must be a name, or a px.Axis without at_once, got {check.described(axis)}; to bound memory, "
            "write px.train_step(loss, microbatches=4)"
        )
    return resolved


def num_rows(what: str, argument: str, batch: Any) -> int:
    """Return the number of rows that all leaves of a batch start with; 0-d ones have none."""
    numbers = {leaf.shape[0] for leaf in jax.tree.leaves(batch) if len(getattr(leaf, "shape", ()))}
    if not numbers and isinstance(batch, jax.Array) and jax.numpy.issubdtype(batch.dtype, jax.dtypes.prng_key):
        return 1  # a random key in place of data
    if len(numbers) != 1 or 0 in numbers:
        raise DataError(
            f"{what}: {argument} must be a tree of arrays (rows, ...), with as many rows each, at least one; what is "
            f"the same for all is 0-d, or belongs in the function; got {jax.tree.map(np.shape, batch)}"
        )
    return numbers.pop()


def rows_of(batch: Any) -> int:
    """Return the number of rows of a batch for any step, of which nothing is checked; 0: it has no arrays."""
    return next((int(leaf.shape[0]) for leaf in jax.tree.leaves(batch) if getattr(leaf, "ndim", 0)), 0)


class Devices:
    """The devices that the rows of batches go to.

    Attributes:
        placement: where rows go; the size of its axis is not theirs.
        whole: the sharding of a value that is whole on each device; ``None``: there is one device.
        blocks: that of rows that divide by the devices, likewise.
        waits: whether inputs must be there before a program starts: on simulated devices, programs with collectives
            that wait for theirs can take the threads that others need.
    """

    def __init__(self, placement: placing.Placement) -> None:
        self.placement = placement
        self.whole, self.blocks = arrays.sharding(placement, ()), arrays.sharding(placement)
        self.waits = placement.is_on_cpu_devices

    def lay_out(self, what: str, batch: Any, microbatches: int = 1) -> tuple[Any, int]:
        """Return a whole batch, which each process has, in blocks over the devices, and its number of rows."""
        number = num_rows(what, "batch", batch)
        if not all([isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(batch)]):  # noqa: C419  # fewer calls
            check.leaves(what, "batch", batch)
        if self.blocks is None:
            return batch, number
        num_padded = number + -number % (self.placement.num_devices * min(microbatches, number))
        return jax.tree.map(lambda x: self._laid(x, num_padded), batch), number

    def _laid(self, x: Any, num_padded: int) -> Any:
        shape, target = ((num_padded, *np.shape(x)[1:]), self.blocks) if np.ndim(x) else ((), self.whole)
        assert target is not None
        if isinstance(x, jax.ShapeDtypeStruct):  # to be compiled for, not run
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=target)
        if isinstance(x, jax.Array) and (jax.process_count() == 1 or not x.is_fully_addressable):
            if x.shape != shape:
                is_explicit = jax.typeof(x).sharding.mesh.explicit_axes
                x = _padded(jax.device_put(x, self.whole) if is_explicit else x, num_padded)
            return x if x.sharding == target else jax.device_put(x, target)
        host = np.array(x)  # a copy: the caller may write into the batch while the devices read it
        host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype.newbyteorder("=")), copy=False)
        host = host if host.shape == shape else arrays.repeat_last(host, num_padded)
        return jax.make_array_from_callback(shape, target, host.__getitem__)

    def local_rows(self, number: int) -> slice | np.ndarray:
        """Return which rows of a batch this process reads, ascending: all, if they do not divide by the devices."""
        if self.blocks is None or not self.placement.spans_processes or number % self.placement.num_devices:
            return slice(None)
        mine = self.blocks.addressable_devices_indices_map((number,)).values()
        return np.unique(np.concatenate([np.arange(number)[index] for index in mine]))

    def assemble(self, local: Any, number: int) -> Any:
        """Return a batch over the devices of all processes, of the rows that this one has read.

        Rows that do not divide by the devices stay on the host, whole in each process: a step pads them.
        """
        if number % self.placement.num_devices:
            return local
        if (blocks := self.blocks) is None:
            return _to_device(local)
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(blocks, x, (number, *x.shape[1:])), local)


def devices_of(axis: placing.Axis) -> Devices:
    """Return the devices that an axis's rows go to, by the mesh in force: the same object for the same devices.

    All axes of their mesh are Auto: the compiler splits what is computed.
    """
    return _devices_of(axis, placing.current(), jax.sharding.get_abstract_mesh(), placing.mesh_in_force())


@functools.lru_cache(maxsize=64)
def _devices_of(axis: placing.Axis, *_: Any) -> Devices:
    with axis_advice("the axis of a batch is axis='data', a name of the mesh's, or such a px.Axis"):
        placement = placing.place(axis).holding(1)
    mesh = placement.devices if placement.mesh_axes else None
    if mesh is None:
        return ONE_DEVICE
    auto = mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    return _devices(placing.Placement(placement.axis, auto, placement.mesh_axes))


_devices = functools.lru_cache(maxsize=64)(Devices)
# What computes where it is called, such as within a map: rows stay whole.
ONE_DEVICE = Devices(placing.Placement(placing.Axis("batch", 1), None, ()))
_padded = jax.jit(arrays.repeat_last, static_argnums=1)
_to_device = jax.jit(lambda batch: batch)  # a fifth of the time of jnp.asarray of each array


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
        x = arrays.repeat_last(x, x.shape[0] + -x.shape[0] % number)
        mine = x.reshape(x.shape[0] // number, number, *x.shape[1:])
        return jax.lax.dynamic_index_in_dim(mine, index, 1, keepdims=False)[:size]

    return jax.tree.map(one, padded)
