"""Concrete arrays: laid over devices, this process's and others', and brought back."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, Sharding

from paraxis._core import jax_api, layout, placing
from paraxis._core.placing import Placement
from paraxis.errors import DeviceError


def sharding(placement: Placement, *, rows: bool) -> NamedSharding | None:
    """Return how a value lies on the devices: by rows if they divide, else whole on each. ``None``: nothing to say."""
    return split_sharding(placement, placement.spec if rows and placement.divides else ())


def block_sharding(placement: Placement) -> NamedSharding | None:
    """Return how padded rows ``(num_padded, ...)`` lie on the devices. ``None``: on one."""
    return split_sharding(placement, placement.spec)


def split_sharding(placement: Placement, spec: Any) -> NamedSharding | None:
    """Return how a value lies whose dimensions are split over these mesh axes. ``None``: on one device.

    An integer in place of the mesh axes says which dimension is split over the axis.
    """
    mesh = placing.concrete_mesh(placement)
    if not placement.mesh_axes or mesh is None:
        return None
    return NamedSharding(mesh, P(*(None,) * spec, placement.mesh_axes) if isinstance(spec, int) else P(*spec))


def laid_out(tree: Any, placement: Placement, *, copied: bool = True) -> Any:
    """Lay leaves ``(size, ...)`` as ``(num_padded, ...)`` in blocks over the devices.

    Args:
        tree: arrays on the host or on devices.
        placement: where to.
        copied: copy what is on the host, so that nobody can change it later. If not, devices may use it where it is:
            for rows that are let go before the caller gets the word again.

    Communicates: sends each device its rows.
    """

    def one(x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            return _padded(settle(jnp.asarray(x), placement, rows=True), placement)
        found = layout.repeat_last(x, placement.num_padded)
        return found.copy() if found is x and copied else found

    return put(jax.tree.map(one, tree), block_sharding(placement))


@functools.partial(jax.jit, static_argnums=1)
def _padded(x: jax.Array, placement: Placement) -> jax.Array:
    x = layout.constrain(x, placement, rows=False) if placement.is_explicit else x
    return layout.repeat_last(x, placement.num_padded)


def is_traced(tree: Any) -> bool:
    """Return whether there is a value in it that JAX is tracing."""
    return any(isinstance(leaf, jax_api.Tracer) for leaf in jax.tree.leaves(tree))


def on_auto_mesh(call: Callable[..., Any], *operands: Any) -> Any:
    """Call with concrete arrays that lie on an Explicit mesh laid on its Auto twin, and the results laid back on it.

    Nothing moves between devices. Where that cannot be, since something is being traced, the operands stay as they are.
    """
    explicit = [x for x in jax.tree.leaves(operands) if isinstance(x, jax.Array) and layout.tells_in_type(x)]
    if not explicit or is_traced(explicit) or jax_api.is_tracing():
        return call(*operands)
    mesh = _mesh(explicit[0])
    assert mesh is not None
    twin = Mesh(mesh.devices, mesh.axis_names)

    def laid(x: Any, onto: Mesh) -> Any:
        return jax.device_put(x, NamedSharding(onto, getattr(x.sharding, "spec", P())))

    def there(x: Any) -> Any:
        return laid(x, twin) if isinstance(x, jax.Array) and layout.tells_in_type(x) else x

    with placing.without_context():
        found = call(*jax.tree.map(there, operands))
    return jax.tree.map(lambda x: laid(x, mesh), found)


def on_host(x: jax.Array) -> np.ndarray:
    """Return a concrete array, also one of which other processes hold parts: then all must ask for it.

    Raises:
        DeviceError: if no part of it is on this process's devices.
    """
    if not x.addressable_shards:
        raise DeviceError(
            "gather: the value lies on devices of other processes only; put the axis on a mesh with devices of each: "
            "px.Axis(name, size, mesh=jax.sharding.Mesh(jax.devices(), (name,)))"
        )
    return np.asarray(local(x))


def settle(x: Any, placement: Placement, *, rows: bool) -> Any:
    """Bring a concrete array onto the placement's mesh if it is bound to another; leave tracers alone.

    Another mesh may have the same devices, and yet its axes mean nothing here.
    """
    if isinstance(x, jax_api.Tracer) or not isinstance(x, jax.Array):
        return x
    target = sharding(placement, rows=rows)
    return x if target is None or (x.committed and _mesh(x) == target.mesh) else put(x, target)


def _mesh(x: jax.Array) -> Mesh | None:
    return getattr(x.sharding, "mesh", None)


def unbound(tree: Any) -> Any:
    """Concrete numbers and arrays as arrays that are bound to no device, wherever they lay.

    What is compiled for one bound to a device is compiled anew for the same one unbound.
    """

    def one(x: Any) -> jax.Array:
        if not isinstance(x, jax.Array) or not x.committed:
            return jnp.asarray(x)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(one(jax.random.key_data(x)), impl=jax.random.key_impl(x))
        return jnp.asarray(on_host(x).item() if x.weak_type and not x.ndim else on_host(x))

    return jax.tree.map(one, tree)


def whole_beside(x: jax.Array, other: jax.Array) -> jax.Array:
    """Return a copy of a concrete array on each device that another lies on.

    Communicates: if these are several processes', the first one's copy is sent to the others.
    """
    mesh = _mesh(other)
    if mesh is None:
        return x if x.devices() == other.devices() else jax.device_put(x, *other.devices())
    target = NamedSharding(mesh, P())
    if x.sharding == target:
        return x
    # Computed in each process, it may differ in last bits, with which loops on the devices would part.
    if target.is_fully_addressable:
        return put(x, target)
    return put(np.asarray(jax_api.multihost_utils.broadcast_one_to_all(np.asarray(x))), target)


def whole(values: Any) -> Any:
    """Values that lie on the devices of several processes, whole on each of these; others as they are.

    Every process must call it, unless all values are whole already.

    Communicates: brings together what is split.
    """

    def one(x: Any) -> Any:
        if _is_local(x) or x.is_fully_replicated:
            return x
        return jax.jit(_same, out_shardings=NamedSharding(x.sharding.mesh, P()))(x)

    return jax.tree.map(one, values)


def local(values: Any) -> Any:
    """Return the same, on one device of this process.

    Communicates: as :func:`whole`.
    """
    return jax.tree.map(lambda x: x if _is_local(x) else x.addressable_data(0), whole(values))


def _is_local(x: Any) -> bool:
    return not isinstance(x, jax.Array) or isinstance(x, jax_api.Tracer) or x.is_fully_addressable


def _same(x: Any) -> Any:
    return x


def put(tree: Any, target: Sharding | None) -> Any:
    """``jax.device_put`` of concrete values, also onto devices of other processes, all of which have the same ones.

    There an array of one process is not sent to the others: each makes its part of its own copy. Without a ``target``,
    values are arrays where they lie.

    Raises:
        DeviceError: if none of the devices is this process's.
    """
    if target is None:
        return jax.tree.map(jnp.asarray, tree)
    if not target.addressable_devices:
        raise DeviceError(
            f"the {len(target.device_set)} devices chosen are other processes'; each process needs one of its own "
            f"among them: leave mesh= and devices= out for all there are"
        )
    if target.is_fully_addressable:
        return jax.device_put(tree, target)

    def one(x: Any) -> jax.Array:
        if isinstance(x, jax.Array) and x.sharding == target:
            return x
        x = jnp.asarray(x)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(one(jax.random.key_data(x)), impl=jax.random.key_impl(x))
        if not _is_local(x) and not x.is_fully_replicated:
            return jax.device_put(x, target)
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, target, lambda index: host[index])

    return jax.tree.map(one, tree)
