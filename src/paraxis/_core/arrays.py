"""Rows of an axis as arrays: padded, laid over the devices of this process and of others, and brought back.

Elements lie in blocks: device ``d`` holds rows ``d * num_local`` up to ``(d + 1) * num_local`` of the padded axis. If
they are dealt, a map takes them by :func:`deal`, which :func:`from_blocks` undoes; nothing else knows of it.
Padding rows repeat a real one, so that whatever a function does is safe on them; what they give is never used. It is
the last one, by :func:`repeat_last`; or, inside a program, where it would have to be sent, a device's own first one, by
:func:`pad` and :func:`fill`.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P, Sharding

from paraxis._core import jax_api, placing
from paraxis._core.placing import Placement
from paraxis.errors import DeviceError

# --- inside a program --------------------------------------------------------------------------------------------


def repeat_last(rows: Any, num_padded: int) -> Any:
    """Pad rows ``(n, ...)`` on the host or on devices: the last one is repeated until there are ``num_padded``."""
    extra = num_padded - rows.shape[0]
    if not extra:
        return rows
    module: Any = np if isinstance(rows, np.ndarray) else jnp
    return module.concatenate([rows, module.broadcast_to(rows[-1:], (extra, *rows.shape[1:]))])


def constrain(x: jax.Array, placement: Placement, *, rows: bool | None = None) -> jax.Array:
    """On an Explicit mesh: the same ``(size, ...)``, with rows laid over the axis or over nothing; or ``(...)``."""
    if not placement.is_explicit:
        return x
    spec = [without(entry, placement.mesh_axes) for entry in jax.typeof(x).sharding.spec]
    if rows is not None:
        spec[0] = placement.mesh_axes if rows else None
    return jax.reshard(x, NamedSharding(placement.mesh, P(*spec)))  # pyright: ignore[reportArgumentType]


def without(entry: Any, names: tuple[str, ...]) -> Any:
    """Return an entry of a PartitionSpec, ``None`` if it has one of these mesh axes."""
    return None if entry in names or (isinstance(entry, tuple) and not set(entry).isdisjoint(names)) else entry


def zeros(aval: Any) -> jax.Array:
    """Return zeros of a shape and a dtype, which may be one that JAX has only within ``jax.enable_x64``."""
    with jax.enable_x64(True):
        return jax.lax.full_like(aval, 0)


def pad(x: jax.Array, placement: Placement, *, safe: bool = True) -> jax.Array:
    """``(size, ...)`` → ``(num_padded, ...)``. If ``safe``, :func:`fill` makes new rows such as can be computed on.

    Written with an operation that the compiler splits over the devices without moving anything; a concatenation
    with a copy of a row is gathered. Only if a device has no row of its own is one sent. PRNG keys are padded as their
    data.
    """
    if not placement.is_padded:
        return x
    x = constrain(x, placement, rows=False)
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        data = pad(jax.random.key_data(x), placement, safe=safe)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    extra = placement.num_padded - placement.size
    zero = zeros(jax.ShapeDtypeStruct((), x.dtype))
    padded = jax.lax.pad(x, zero, [(0, extra, 0)] + [(0, 0, 0)] * (x.ndim - 1))
    if not placement.has_idle_device or not safe:
        return padded
    return fill(padded, jnp.arange(placement.num_padded, dtype=np.int32) < placement.size, x[:1])


def fill(rows: jax.Array, real: Any, row: Any = None) -> jax.Array:
    """``(n, ...)`` → the same: ``row (1, ...)``, the first by default, where rows are not ``real (n,)``: it is safe."""
    with jax.enable_x64(True):
        return jnp.where(real.reshape((-1,) + (1,) * (rows.ndim - 1)), rows, rows[:1] if row is None else row)


def real_rows(placement: Placement) -> jax.Array | None:
    """On a device: which of its rows are elements, ``(num_local,)``; ``None``: all."""
    if not placement.is_padded:
        return None
    device = jax.lax.axis_index(placement.crossed_axes) if placement.crossed_axes else 0
    row = jnp.arange(placement.num_local, dtype=np.int32)
    number = row * placement.num_devices + device if placement.is_dealt else device * placement.num_local + row
    return number < placement.size


def deal(x: jax.Array, placement: Placement, *, back: bool = False) -> jax.Array:
    """Rows ``(num_padded, ...)`` in the order of the elements → as devices have them; or ``back``."""
    if not placement.is_dealt:
        return x
    x = constrain(x, placement, rows=False)
    split = (placement.num_devices, placement.num_local)
    hands = x.reshape(*(split if back else split[::-1]), *x.shape[1:])
    return in_blocks(jnp.swapaxes(hands, 0, 1).reshape(x.shape), placement)


def in_blocks(x: jax.Array, placement: Placement) -> jax.Array:
    """Ask the compiler to lay rows ``(num_padded, ...)`` in blocks, if no type says where they lie."""
    if placement.mesh is None or placement.is_explicit:
        return x
    target: Any = NamedSharding(placement.mesh, P(placement.mesh_axes, *(P.UNCONSTRAINED,) * (x.ndim - 1)))
    return jax.lax.with_sharding_constraint(x, target)


def unpad(x: jax.Array, placement: Placement) -> jax.Array:
    """``(num_padded, ...)`` → ``(size, ...)``."""
    return jax.lax.slice_in_dim(constrain(x, placement, rows=False), 0, placement.size) if placement.is_padded else x


def first_row(x: jax.Array, placement: Placement) -> jax.Array:
    """``(size, ...)`` → ``(...)``: the row that all elements have alike, one element per device. Nothing is sent."""
    # Its derivative: each element gives its share, 1/size of the whole.
    return placing.shard_map(lambda row: row[0], placement.mesh, placement.mesh_axes, placement.spec, P())(x)


def unpadded(tree: Any, placement: Placement) -> Any:
    """Leaves ``(num_padded, ...)`` → ``(size, ...)``, by one program."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(_from_blocks(leaves, placement, (0,) * len(leaves)))


Outs = Sequence[int | jax_api.ShapedArray | None]
"""What results in blocks are to be: rows ``(num_padded, ...)``, with their dimension at a number, or ``None``, one row
for all; sums ``(num_devices, ...)``, of a dtype to add them in, an array of this kind."""


def from_blocks(blocks: Sequence[jax.Array], placement: Placement, outs: Outs) -> list[jax.Array]:
    """Return results of what devices have in blocks."""

    def result(x: jax.Array, out: Any) -> jax.Array:
        if isinstance(out, jax_api.ShapedArray):
            x = jnp.sum(x, 0, dtype=x.dtype).astype(out.dtype)
            return jax_api.weak(x) if out.weak_type else x
        return x[0] if out is None else jnp.moveaxis(unpad(deal(x, placement, back=True), placement), 0, out)

    return [result(x, out) for x, out in zip(blocks, outs, strict=True)]


_from_blocks = jax.jit(from_blocks, static_argnums=(1, 2))


def waited(blocks: Sequence[jax.Array], placement: Placement, outs: Outs) -> list[jax.Array]:
    """:func:`from_blocks` of concrete arrays, by a program of its own, if there is anything to do.

    On CPU devices they are waited for before, and an element that raises does so here: where a body and a collective
    share a program, XLA ends the process if a device waits for another that takes long, or that has raised.
    """
    if placement.is_on_cpu_devices:
        jax.block_until_ready(blocks)
    is_done = not (placement.is_padded or placement.is_dealt) and all([out == 0 for out in outs])  # noqa: C419  # fewer calls
    return list(blocks) if is_done else _from_blocks(blocks, placement, tuple(outs))


# --- concrete arrays ---------------------------------------------------------------------------------------------


def is_traced(tree: Any) -> bool:
    """Return whether there is a value in it that JAX is tracing."""
    return any([isinstance(leaf, jax_api.Tracer) for leaf in jax.tree.leaves(tree)])  # noqa: C419  # fewer calls


def sharding(placement: Placement, spec: Any = None) -> NamedSharding | None:
    """Return how rows lie in blocks, if they divide or are padded. ``None``: on one device.

    ``spec`` says it of other values: ``()``, a copy is on each device; or the mesh axes over which each dimension is
    split, or the number of the one that is split over the axis.
    """
    mesh = placement.devices if placement.mesh_axes else None
    if mesh is None:
        return None
    if isinstance(spec, int):
        spec = (*(None,) * spec, placement.mesh_axes)
    return NamedSharding(mesh, placement.spec if spec is None else P(*spec))


def laid_out(tree: Any, placement: Placement, *, copied: bool = True) -> Any:
    """Lay leaves ``(size, ...)``, on the host or on devices, as ``(num_padded, ...)`` in blocks over the devices.

    What is on the host is ``copied``, so that nobody can change it later; if not, devices may use it where it is.
    """

    def one(x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            return _padded(to_mesh(jnp.asarray(x), placement, rows=True), placement)
        padded = repeat_last(x, placement.num_padded)
        return padded.copy() if padded is x and copied else padded

    return device_put(jax.tree.map(one, tree), sharding(placement))


@functools.partial(jax.jit, static_argnums=1)
def _padded(x: jax.Array, placement: Placement) -> jax.Array:
    return repeat_last(constrain(x, placement, rows=False), placement.num_padded)


def to_mesh(x: Any, placement: Placement, *, rows: bool) -> Any:
    """Bring ``(...)`` onto the placement's mesh if it is bound to other devices: the one door for where data lie.

    It lies by rows if they divide, else whole on each device. Another mesh may have the same devices, and other axes.
    Under ``grad`` and ``vmap`` values are moved as well, whole, and a derivative comes back to the devices where the
    value was. What is traced to be compiled stays as it is: there JAX's rules hold.
    """
    is_tracer = isinstance(x, jax_api.Tracer)
    if is_tracer and (placement.is_explicit or jax_api.is_staging()):  # Explicit: where it lies is part of its type
        return x
    everywhere = sharding(placement, ()) if isinstance(x, jax.Array) else None
    if everywhere is None:
        return x
    value: Any = x.to_concrete_value() if is_tracer else x
    is_bound = isinstance(value, jax.Array) and value.committed
    mesh = getattr(value.sharding, "mesh", None) if is_bound else None
    # Bound to none, a traced value may stay; to put it onto devices of other processes, JAX would compare all copies.
    if mesh == everywhere.mesh or (is_tracer and not is_bound and placement.spans_processes):
        return x
    if not is_tracer:
        return device_put(x, sharding(placement) if rows and placement.divides else everywhere)
    return jax.device_put(x, everywhere, src=whole_on(value) if is_bound else everywhere)


def whole_on(x: jax.Array) -> Any:
    """Return the sharding of a copy on each device that an array lies on; of a traced one, as its type says."""
    sharding = jax.typeof(x).sharding if isinstance(x, jax_api.Tracer) else x.sharding
    mesh = getattr(sharding, "mesh", None)
    return sharding if mesh is None else NamedSharding(mesh, P())


def device_put(tree: Any, target: Sharding | None) -> Any:
    """``jax.device_put`` of concrete values ``(...)``, also onto devices of other processes, which have the same ones.

    There an array of one process is not sent to the others: each makes its part of its own copy. Without a ``target``,
    values are arrays where they lie; if none of its devices is this process's, that is a DeviceError.
    """
    if target is None:
        return jax.device_put(tree)
    if not target.addressable_devices:
        raise DeviceError(
            f"the {len(target.device_set)} devices chosen are other processes'; each process needs one of its own "
            f"among them: leave mesh= and devices= out for all there are"
        )
    if target.is_fully_addressable:
        return jax.device_put(tree, target)

    def one(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        if x.sharding == target or not (_is_local(x) or x.is_fully_replicated):
            return jax.device_put(x, target)
        mine = local_copy(x)
        if not jnp.issubdtype(x.dtype, jax.dtypes.extended):
            mine = np.asarray(mine)  # which is sliced on the host, whatever mesh is in force
        return jax.make_array_from_callback(x.shape, target, lambda index: mine[index])

    return jax.tree.map(one, tree)


def gather_processes(values: Any) -> Any:
    """Values on the devices of several processes, whole on each: every process must call this for what is split."""
    is_whole = lambda x: _is_local(x) or x.is_fully_replicated  # noqa: E731
    return jax.tree.map(lambda x: x if is_whole(x) else jax.device_put(x, whole_on(x)), values)


def of_processes(rows: np.ndarray, devices: tuple[Any, ...]) -> jax.Array:
    """Return an array with a row for each of these devices, of which each process passes those of its own."""
    target = NamedSharding(placing.mesh_of(devices), P(placing.DEVICES))
    return jax.make_array_from_process_local_data(target, rows, (len(devices), *rows.shape[1:]))


def local_copy(values: Any) -> Any:
    """Return what :func:`gather_processes` does, on one device of this process."""
    return jax.tree.map(lambda x: x if _is_local(x) else x.addressable_data(0), gather_processes(values))


def _is_local(x: Any) -> bool:
    return not isinstance(x, jax.Array) or isinstance(x, jax_api.Tracer) or x.is_fully_addressable


def on_host(x: jax.Array) -> np.ndarray:
    """Return a concrete array, also one of which other processes hold parts: then all must ask for it."""
    return jax.device_get(local_copy(x))
