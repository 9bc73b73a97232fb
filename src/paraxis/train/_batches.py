"""The rows of one step: padded where they lie on the devices, and cut to the real ones inside a program.

A slice that takes the padding off, ``x[:num_rows]``, leaves the rows where they are, since the compiler splits them
unevenly and masks what it adds itself. So a program computes with the real rows alone, whatever their number.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from paraxis._axes import arrays, layout, tree
from paraxis._axes.arrays import ready
from paraxis._axes.axis import Axis
from paraxis._axes.placing import Placement
from paraxis._calls import arguments
from paraxis._jax import dtypes
from paraxis.errors import AxisError, DataError, ShapeError

Reader = Callable[[np.ndarray], Any]
"""Gives a tree of the rows with these numbers, ``(len(numbers), ...)`` each, in this order."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch of rows, distributed over devices. A loader yields it, and a step takes it.

    Attributes:
        tree: arrays ``(num_padded, ...)`` in blocks over the devices, the real rows first; 0-d arrays are whole on
            each device.
        num_rows: number of real rows.

    Example:
        >>> import jax, numpy as np, paraxis as px
        >>> batch = next(px.loader({"x": np.arange(10.0)}, 4, shuffle=False).batches())
        >>> batch.num_rows, jax.jit(lambda batch: batch.rows()["x"].sum())(batch)
        (4, Array(6., dtype=float32))
    """

    tree: Any
    num_rows: int = dataclasses.field(metadata={"static": True})

    def rows(self) -> Any:
        """Return the real rows ``(num_rows, ...)``, for use inside a compiled function, where this moves nothing."""
        return jax.tree.map(lambda x: _first(x, self.num_rows), self.tree)

    if not typing.TYPE_CHECKING:  # which report an index or an unpacking by themselves

        def __getitem__(self, index: Any) -> Any:
            """Raise what to write instead: in ``x, y = batch`` as well, padding would count as rows."""
            raise TypeError(
                f"a batch of px.loader has no item {index!r}; write batch.rows(), which has what the loader was given, "
                f"such as batch.rows()['x'], or `x, y = batch.rows()`"
            )

    def turn(self, index: Any, turns: int, size: int) -> Any:
        """Inside a compiled function: of the rows with the numbers ``index``, ``index + turns``, … the first ``size``.

        Nothing is moved for it if the batch was laid out for so many turns; see :attr:`Placement.turns`.
        """
        return jax.tree.map(lambda x: _every(x, index, turns, size), self.tree)


def axis_of(what: str, axis: Any) -> Axis:
    """Return the axis that the rows of batches lie on; its size is that of the batch at hand.

    Raises:
        AxisError: if it is none, or its elements are to run in turns.
    """
    found = Axis(axis, 1) if isinstance(axis, str) and axis else axis
    if not isinstance(found, Axis) or found.at_once is not None:
        got = arguments.described(axis)
        raise AxisError(
            f"{what}: axis must be a name, or a px.Axis without at_once, got {got}; write axis='batch', or "
            f"axis=px.Axis('batch', 1, mesh=mesh, over='data'); to bound memory, px.train_step(loss, microbatches=4)"
        )
    return found


def num_rows(what: str, batch: Any) -> int:
    """Return the number of rows that all leaves of a batch have; 0-d ones have none.

    Raises:
        ShapeError: naming two leaves that differ, or a leaf that is no array.
        DataError: if there are no rows, or JAX would cut integers.
    """
    arrays = jax.tree.leaves(batch)
    sizes = {x.shape[0] if isinstance(x, jax.Array) and x.ndim else 0 for x in arrays}
    if len(sizes) == 1 and (number := sizes.pop()):
        return number  # as nearly always
    found: tuple[Any, int] | None = None
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        shape = _shape(what, path, leaf)
        if not shape:
            continue
        if found is None:
            found = path, shape[0]
        elif shape[0] != found[1]:
            raise ShapeError(
                f"{what}: {tree.name('batch', path)} has {shape[0]} rows, {tree.name('batch', found[0])} has "
                f"{found[1]}; every array of a batch starts with its rows, and what is the same for all is 0-d or "
                f"belongs in the function"
            )
    if found is None or not found[1]:
        raise DataError(f"{what}: the batch has no rows; leave empty batches out")
    return found[1]


def _shape(what: str, path: Any, leaf: Any) -> tuple[int, ...]:
    if not isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        leaf = np.asarray(leaf)
        if leaf.dtype.kind not in "biufcV":
            raise ShapeError(
                f"{what}: {tree.name('batch', path)} is {leaf.dtype}, not numbers; a batch holds arrays of numbers, "
                f"such as {{'x': np.zeros((32, 8)), 'y': np.zeros(32, int)}}"
            )
        if (reason := arguments.why_cut(leaf)) is not None:
            raise DataError(f"{what}: {tree.name('batch', path)} {reason}")
    return leaf.shape


def lay_out(batch: Any, placement: Placement) -> Batch:
    """Lay a whole batch, which each process has, out over devices. What the caller does to it later changes nothing.

    Args:
        batch: a tree of arrays ``(placement.size, ...)``, on the host or on devices; 0-d ones are given whole.
        placement: where to.

    Communicates: sends each device its rows.
    """
    place = _place(placement)

    def one(x: Any) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct):  # to be compiled for, not run
            if not x.ndim:
                return jax.ShapeDtypeStruct((), x.dtype, sharding=place.whole)
            return arrays.rows_struct(x, place.placement)
        if isinstance(x, jax.Array) and (jax.process_count() == 1 or not x.is_fully_addressable):
            return _from_devices(x, place)
        host, numbers = np.asarray(x), place.local_rows
        return _assembled(host[numbers] if host.ndim and len(numbers) < len(host) else np.array(host), place)

    return Batch(jax.tree.map(one, batch), placement.size)


def read(reader: Reader, placement: Placement) -> Batch:
    """Lay a batch out of which each process reads only the rows of its own devices.

    Args:
        reader: is called once, with numbers between 0 and ``placement.size``, and gives host arrays that stay as they
            are.
        placement: where to.

    Communicates: sends each device its rows, from its own host.
    """
    place = _place(placement)
    return Batch(jax.tree.map(lambda x: _assembled(np.asarray(x), place), reader(place.local_rows)), placement.size)


@dataclasses.dataclass(frozen=True)
class _Place:
    """The place of padded rows."""

    placement: Placement

    @functools.cached_property
    def blocks(self) -> Sharding | None:
        return arrays.block_sharding(self.placement)

    @functools.cached_property
    def whole(self) -> Sharding | None:
        return arrays.whole_sharding(self.placement)

    @functools.cached_property
    def local_rows(self) -> np.ndarray:
        """The numbers of the rows that lie on this process's devices, ascending; padding is made of the last row."""
        size, num_padded = self.placement.size, self.placement.num_padded
        if self.blocks is None:
            return np.arange(size)
        needed = np.zeros(size, bool)
        for index in self.blocks.addressable_devices_indices_map((num_padded,)).values():
            assert index is not None
            start, stop, _ = index[0].indices(num_padded)
            needed[min(start, size - 1) : stop] = True
        return np.flatnonzero(needed)


@functools.lru_cache(maxsize=256)
def _place(placement: Placement) -> _Place:
    """Return the same one for the same rows: it is asked for at each step."""
    return _Place(placement)


def _assembled(local: np.ndarray, place: _Place) -> jax.Array:
    """Return an array over all processes' devices, of the rows that this one has."""
    local = dtypes.native(local)
    local = local.astype(jax.dtypes.canonicalize_dtype(local.dtype), copy=False)
    whole, numbers, num_padded = place.whole, place.local_rows, place.placement.num_padded
    if local.ndim == 0:
        return jnp.asarray(local) if whole is None else jax.make_array_from_callback((), whole, lambda _: local)
    if place.blocks is None:
        return jnp.asarray(layout.repeat_last(local, num_padded))

    def block(index: Any) -> np.ndarray:
        start, stop, _ = index[0].indices(num_padded)
        first, end = np.searchsorted(numbers, [min(start, numbers[-1]), stop])
        return layout.repeat_last(local[first:end], stop - start)

    return jax.make_array_from_callback((num_padded, *local.shape[1:]), place.blocks, block)


def _from_devices(x: jax.Array, place: _Place) -> jax.Array:
    if x.ndim and place.placement.is_padded:
        x = arrays.padded(ready(x), place.placement)
    target = place.blocks if x.ndim else place.whole
    return x if target is None or x.sharding == target else jax.device_put(x, target)


def _first(x: jax.Array, number: int) -> jax.Array:
    return x[:number] if x.ndim and x.shape[0] > number else x


def _every(x: jax.Array, index: Any, turns: int, size: int) -> jax.Array:
    if not x.ndim:
        return x
    x = layout.repeat_last(x, x.shape[0] + -x.shape[0] % turns)  # as it is, if laid out for so many
    mine = x.reshape(x.shape[0] // turns, turns, *x.shape[1:])
    return jax.lax.dynamic_index_in_dim(mine, index, 1, keepdims=False)[:size]
