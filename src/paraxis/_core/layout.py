"""Rows of an axis as its placement has them.

Elements lie in blocks: device ``d`` holds rows ``d * num_local`` up to ``(d + 1) * num_local`` of the padded axis.
Padding rows repeat a real one, so that whatever a function does is safe on them; what they give is never used. It is
the last one, by :func:`repeat_last`; or, inside a program, where it would have to be sent, a device's own first one, by
:func:`pad` and :func:`fill`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from paraxis._core import jax_api, placing
from paraxis._core.axis import Axis
from paraxis._core.placing import Placement


def repeat_last(rows: Any, num_padded: int) -> Any:
    """Pad rows ``(n, ...)`` on the host or on devices: the last one is repeated until there are ``num_padded``."""
    extra = num_padded - rows.shape[0]
    if not extra:
        return rows
    module: Any = np if isinstance(rows, np.ndarray) else jnp
    return module.concatenate([rows, module.broadcast_to(rows[-1:], (extra, *rows.shape[1:]))])


def tells_in_type(x: jax.Array) -> bool:
    """Return whether the type of an array says how it lies, on an Explicit mesh."""
    mesh = jax.typeof(x).sharding.mesh
    return bool(mesh.explicit_axes)


def typed_beside(x: jax.Array, other: jax.Array) -> jax.Array:
    """Return the same value; if ``other`` lies on an Explicit mesh, whole on each device, with a type that says so."""
    mesh = jax.typeof(other).sharding.mesh
    if not tells_in_type(other) or jax.typeof(x).sharding.mesh == mesh:
        return x
    target = mesh if isinstance(x, jax_api.Tracer) else getattr(other.sharding, "mesh", mesh)
    return jax.reshard(x, NamedSharding(target, P(*(None,) * x.ndim)))


def on_mesh(x: jax.Array, placement: Placement) -> jax.Array:
    """On an Explicit mesh: the same value with a type that says so (constants come without)."""
    if not placement.is_explicit or not jax.typeof(x).sharding.mesh.empty:
        return x
    return jax.reshard(x, _sharding(placement, [None] * x.ndim))


def constrain(x: jax.Array, placement: Placement, *, rows: bool = True) -> jax.Array:
    """On an Explicit mesh: the same value with its rows laid over the axis (or over nothing)."""
    rest = [without(entry, placement.mesh_axes) for entry in jax_api.sharding_spec(jax.typeof(x))[1:]]
    return jax.reshard(x, _sharding(placement, [placement.mesh_axes if rows else None, *rest]))


def on_all(x: jax.Array, placement: Placement) -> jax.Array:
    """On an Explicit mesh: the same value, one for all devices that the axis lies over."""
    x = on_mesh(x, placement)
    spec = [without(entry, placement.mesh_axes) for entry in jax_api.sharding_spec(jax.typeof(x))]
    return jax.reshard(x, _sharding(placement, spec))


def _sharding(placement: Placement, spec: Any) -> NamedSharding:
    assert placement.mesh is not None
    return NamedSharding(placement.mesh, P(*spec))


def without(entry: Any, names: tuple[str, ...]) -> Any:
    """Return an entry of a PartitionSpec, ``None`` if it has one of these mesh axes."""
    return None if entry in names or (isinstance(entry, tuple) and not set(entry).isdisjoint(names)) else entry


def device_index(placement: Placement) -> jax.Array | int:
    """On a device: the number of this device's block."""
    return jax.lax.axis_index(placement.crossed_axes) if placement.crossed_axes else 0


def pad(x: jax.Array, placement: Placement, *, safe: bool = True) -> jax.Array:
    """``(size, ...)`` → ``(num_padded, ...)``. If ``safe``, :func:`fill` makes new rows such as can be computed on.

    Written with an operation that the compiler splits over the devices without moving anything; a concatenation
    with a copy of a row is gathered. Only if a device has no row of its own is one sent.
    """
    if not placement.is_padded:
        return x
    if placement.is_explicit:
        x = constrain(x, placement, rows=False)
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):  # PRNG keys have no zero
        return repeat_last(x, placement.num_padded)
    zero: Any = np.zeros((), x.dtype)
    if x.weak_type:  # then a Python number is as weakly typed, and has the same dtype
        zero = zero.item()
    extra = placement.num_padded - placement.size
    padded = jax.lax.pad(x, zero, [(0, extra, 0)] + [(0, 0, 0)] * (x.ndim - 1))
    if not placement.has_idle_device or not safe:
        return padded
    return _fill_where_padded(jnp.arange(placement.num_padded) < placement.size, padded, x[:1])


def fill(block: jax.Array, placement: Placement, *, safe: bool = True) -> jax.Array:
    """On a device: padding rows repeat the device's first row, so that whatever is computed on them is safe.

    ``safe`` as in :func:`pad`: rows that a device without elements would compute on have been filled there.
    """
    real = real_rows(placement)
    if real is None or (placement.has_idle_device and safe):
        return block
    return _fill_where_padded(real, block, block[:1])


def real_rows(placement: Placement) -> jax.Array | None:
    """On a device: which of its rows are elements, ``(num_local,)``; ``None``: all."""
    if not placement.is_padded:
        return None
    first = device_index(placement) * placement.num_local
    return first + jnp.arange(placement.num_local, dtype=np.int32) < placement.size


def _fill_where_padded(real: jax.Array, rows: jax.Array, row: jax.Array) -> jax.Array:
    return jnp.where(real.reshape((-1,) + (1,) * (rows.ndim - 1)), rows, row)


def unpad(x: jax.Array, placement: Placement) -> jax.Array:
    """``(num_padded, ...)`` → ``(size, ...)``."""
    if not placement.is_padded:
        return x
    if placement.is_explicit:
        x = constrain(x, placement, rows=False)
    return jax.lax.slice_in_dim(x, 0, placement.size)


def agreed(x: jax.Array, axis: Axis) -> jax.Array:
    """``(size, ...)`` → ``(...)``: the row that all elements have alike, one element per device. Nothing is sent."""
    placement = placing.place(axis)
    if not placement.mesh_axes:
        return x[0]
    # Its derivative: each element gives its share, 1/size of the whole.
    return placing.shard_map(lambda row: row[0], placement.mesh, placement.mesh_axes, placement.spec, P())(x)


def gathered(x: jax.Array, axis: Axis) -> jax.Array:
    """``(size, ...)`` as a plain array that any operation takes: on an Explicit mesh its rows are brought together."""
    placement = placing.place(axis)
    return constrain(x, placement, rows=False) if placement.is_explicit else x
