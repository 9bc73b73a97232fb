"""Concrete arrays: laid over devices, this process's and others', and brought back."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from paraxis._core import jax_api, layout, placing
from paraxis._core.placing import Placement
from paraxis.errors import AxisError, DeviceError


def sharding(placement: Placement, *, rows: bool) -> NamedSharding | None:
    """Return how a value lies on the devices: by rows if they divide, else whole on each. ``None``: nothing to say."""
    mesh = placing.concrete_mesh(placement)
    if not placement.mesh_axes or mesh is None:
        return None
    return NamedSharding(mesh, placement.spec if rows and placement.size % placement.num_devices == 0 else P())


def block_sharding(placement: Placement) -> NamedSharding | None:
    """Return how padded rows ``(num_padded, ...)`` lie on the devices. ``None``: on one."""
    mesh = placing.concrete_mesh(placement)
    return None if not placement.mesh_axes or mesh is None else NamedSharding(mesh, placement.spec)


def in_blocks(x: Any, placement: Placement) -> jax.Array:
    """Lay padded rows ``(num_padded, ...)`` from the host over the devices, in blocks."""
    return put(x, block_sharding(placement))


@functools.partial(jax.jit, static_argnums=1)
def padded(tree: Any, placement: Placement) -> Any:
    """Pad rows ``(size, ...)`` on devices to ``(num_padded, ...)``. They may be gathered for it, so it is done once."""

    def one(x: jax.Array) -> jax.Array:
        x = layout.constrain(x, placement, rows=False) if placement.is_explicit else x
        return layout.repeat_last(x, placement.num_padded)

    return jax.tree.map(one, tree)


def laid_out(tree: Any, placement: Placement, *, copied: bool = True) -> Any:
    """Lay leaves ``(size, ...)`` as ``(num_padded, ...)`` in blocks over the devices.

    Args:
        tree: arrays on the host or on devices.
        placement: where to.
        copied: copy what is on the host, so that nobody can change it later. If not, devices may use it where it is:
            for rows that are let go before the caller gets the word again.

    Communicates: sends each device its rows.
    """
    leaves, structure = jax.tree.flatten(tree)
    hosted = {i: _padded_on_host(x, placement, copied) for i, x in enumerate(leaves) if isinstance(x, np.ndarray)}
    placed = [None if i in hosted else settle(jnp.asarray(x), placement, rows=True) for i, x in enumerate(leaves)]
    placed = placed if len(hosted) == len(placed) else padded(placed, placement)
    placed = [hosted.get(i, x) for i, x in enumerate(placed)]
    return jax.tree.unflatten(structure, put(placed, block_sharding(placement)))


def _padded_on_host(rows: np.ndarray, placement: Placement, copied: bool) -> np.ndarray:
    found = layout.repeat_last(rows, placement.num_padded)
    return found.copy() if found is rows and copied else found


def everywhere(tree: Any, placement: Placement) -> Any:
    """Values whole on each device; as they are if they lie so already.

    Communicates: sends each device a copy.
    """
    target = sharding(placement, rows=False)
    return tree if target is None else put(tree, target)


def is_traced(tree: Any) -> bool:
    """Return whether there is a value in it that JAX is tracing."""
    return any(isinstance(leaf, jax_api.Tracer) for leaf in jax.tree.leaves(tree))


def on_auto_mesh(call: Callable[..., Any], *operands: Any) -> Any:
    """Call with concrete arrays that lie on an Explicit mesh laid on its Auto twin, and the results laid back on it.

    Nothing moves between devices. Where that cannot be, since an operand is a tracer of such a type, ``jit`` is
    tracing, or a mesh is in force that a transformation does not let go of, the operands stay as they are.
    """
    leaves = [x for x in jax.tree.leaves(operands) if isinstance(x, jax.Array)]
    explicit = [x for x in leaves if layout.tells_in_type(x)]
    concrete = [x for x in explicit if not isinstance(x, jax_api.Tracer)]
    if not concrete or len(concrete) < len(explicit) or isinstance(jnp.zeros(()), jax_api.Tracer):
        return call(*operands)
    if placing.mesh_in_force() is None and not jax.sharding.get_abstract_mesh().empty:
        return call(*operands)
    mesh = layout.named_sharding(concrete[0]).mesh
    assert isinstance(mesh, Mesh)
    twin = Mesh(mesh.devices, mesh.axis_names)

    def there(x: Any) -> Any:
        if not isinstance(x, jax.Array) or isinstance(x, jax_api.Tracer) or not layout.tells_in_type(x):
            return x
        return jax.device_put(x, NamedSharding(twin, layout.named_sharding(x).spec))

    def back(x: jax.Array) -> jax.Array:
        spec = P() if isinstance(x, jax_api.Tracer) else getattr(x.sharding, "spec", P())
        return jax.device_put(x, NamedSharding(mesh, spec))

    with placing.without_context():
        found = call(*jax.tree.map(there, operands))
    return jax.tree.map(back, found)


def on_host(x: jax.Array) -> np.ndarray:
    """Return a concrete array, also one of which other processes hold parts: then all must ask for it.

    Raises:
        DeviceError: if no part of it is on this process's devices.
    """
    if x.is_fully_addressable:
        return np.asarray(x)
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
    if target is None or (x.committed and getattr(x.sharding, "mesh", None) == target.mesh):
        return x
    return put(x, target)


def some_rows(x: jax.Array, numbers: np.ndarray) -> jax.Array:
    """Return rows of a concrete array by ascending numbers, on one device. Each device gives those that it holds."""
    if not x.is_fully_addressable:
        everywhere = NamedSharding(layout.named_sharding(x).mesh, P())
        return jnp.asarray(on_host(jax.jit(_rows_at, out_shardings=everywhere)(ready(x), numbers)))
    if any(shard.data.shape[1:] != x.shape[1:] for shard in x.addressable_shards):  # split by columns, too
        return unbound(x[numbers])
    held = {shard.index[0].indices(x.shape[0])[:2]: shard.data for shard in x.addressable_shards}
    first = jax.local_devices()[0]
    found = []
    for (start, stop), block in sorted(held.items(), key=lambda item: item[0]):
        own = numbers[(numbers >= start) & (numbers < stop)] - start
        if len(own) and first.platform == "cpu":  # where it can be read, there is nothing to compile
            whole = own[-1] - own[0] + 1 == len(own)
            found.append(np.asarray(block)[own[0] : own[-1] + 1] if whole else np.asarray(block)[own])
        elif len(own):
            found.append(_on(_some(block, own), {first}))
    together = found[0] if len(found) == 1 else (np if first.platform == "cpu" else jnp).concatenate(found)
    return jax.device_put(together, may_alias=True)  # rows that lie together are not copied


def _rows_at(x: jax.Array, numbers: jax.Array) -> jax.Array:
    return x[numbers]


_some = jax.jit(_rows_at)


def unbound(tree: Any) -> Any:
    """Concrete numbers and arrays as arrays that are bound to no device, wherever they lay.

    What is compiled for one bound to a device is compiled anew for the same one unbound.
    """

    def one(x: Any) -> jax.Array:
        if not isinstance(x, jax.Array):
            return jnp.asarray(x)
        if not x.committed:
            return x
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(one(jax.random.key_data(x)), impl=jax.random.key_impl(x))
        return jnp.asarray(local(x).item() if x.weak_type and not x.ndim else on_host(x))

    return jax.tree.map(one, tree)


def _on(x: jax.Array, devices: set[Any]) -> jax.Array:
    """Return the same on one device. If it is there, it is not bound to it."""
    return x if x.devices() == devices else jax.device_put(x, *devices)


def whole_beside(x: jax.Array, other: Any) -> jax.Array:
    """Return a copy of a concrete array on each device that another lies on.

    Communicates: if these are several processes', the first one's copy is sent to the others.
    """
    mesh = getattr(other.sharding, "mesh", None)
    if not isinstance(mesh, Mesh):
        return _on(x, other.devices())
    target = NamedSharding(mesh, P())
    if x.sharding == target:
        return x
    # Computed in each process, it may differ in last bits, with which loops on the devices would part.
    if target.is_fully_addressable:
        return put(x, target)
    return put(np.asarray(jax_api.multihost_utils.broadcast_one_to_all(np.asarray(x))), target)


def ready(tree: Any) -> Any:
    """Return the same values, on CPU when they are there, inside ``grad`` too: call it before what communicates.

    There a device that is done would hold a thread until the others come, and these may need it for what they are to
    come with: with work in flight and more devices than cores, all wait for ever.
    """
    if jax.default_backend() == "cpu":
        jax.block_until_ready(
            [jax_api.behind(x) if isinstance(x, jax_api.Tracer) else x for x in jax.tree.leaves(tree)]
        )
    return tree


def whole_sharding(placement: Placement) -> NamedSharding | None:
    """Return a value whole on every device of the mesh; ``None``: on the one there is."""
    return sharding(placement, rows=False)


def split_sharding(placement: Placement, name: str, ndim: int, entry: Any) -> NamedSharding:
    """Return a value split over devices: along one dimension over the axis, or by a PartitionSpec of mesh axes.

    Raises:
        AxisError: if it names a dimension or a mesh axis that is not there.
    """
    mesh = placing.concrete_mesh(placement)
    assert mesh is not None
    if isinstance(entry, int):
        if not 0 <= entry < ndim:
            raise AxisError(f"shard: the rule splits {name}, which has {ndim} dimensions, along dimension {entry}")
        return NamedSharding(mesh, P(*(None,) * entry, placement.mesh_axes))
    try:
        return NamedSharding(mesh, P(*entry))
    except (TypeError, ValueError) as error:
        raise AxisError(
            f"shard: the rule gives {entry!r} for {name}; it must give None (whole on each device), a dimension "
            f"(split along it), or a PartitionSpec with axes of the mesh {dict(mesh.shape)}"
        ) from error


def whole(values: Any) -> Any:
    """Values that lie on the devices of several processes, whole on each of these; others as they are.

    Every process must call it, unless all values are whole already.

    Communicates: brings together what is split.
    """
    leaves, structure = jax.tree.flatten(values)
    split = [i for i, x in enumerate(leaves) if not (_is_local(x) or x.is_fully_replicated)]
    if split:
        targets = [NamedSharding(leaves[i].sharding.mesh, P()) for i in split]
        together = ready(jax.jit(_same, out_shardings=targets)(ready([leaves[i] for i in split])))
        for i, x in zip(split, together, strict=True):
            leaves[i] = x
    return jax.tree.unflatten(structure, leaves)


def local(values: Any) -> Any:
    """Return the same, on one device of this process.

    Communicates: as :func:`whole`.
    """
    return jax.tree.map(lambda x: x if _is_local(x) else x.addressable_data(0), whole(values))


def _is_local(x: Any) -> bool:
    return not isinstance(x, jax.Array) or isinstance(x, jax_api.Tracer) or x.is_fully_addressable


def _same(x: Any) -> Any:
    return x


def send(values: Any, shardings: Any) -> Any:
    """Values that every process has, laid over devices as a tree of shardings like theirs says; ``None``: left alone.

    Communicates: sends each device its part, from its own host if there are several.
    """
    leaves, structure = jax.tree.flatten(values)
    targets = structure.flatten_up_to(shardings)
    laid = [x if target is None else put(x, target) for x, target in zip(leaves, targets, strict=True)]
    return jax.tree.unflatten(structure, laid)


def put(tree: Any, target: NamedSharding | None) -> Any:
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
