"""One executable for one element, called for each element on its own device.

Calls return before the work is done, so all devices are busy at once, and each call has its device to itself.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from paraxis._core import collectives, jax_api, layout, scope
from paraxis._core.errors import LoweringError
from paraxis._core.layout import Placement


def map_elements(fn: Callable[..., Any], structure: Any, leaves: Sequence[jax.Array], placement: Placement) -> Any:
    """``fn`` over concrete rows ``(size, ...)``; the result's leaves are ``(size, ...)``.

    Raises:
        LoweringError: on traced values, and if the axis shares its mesh with others.
    """
    if any(isinstance(leaf, jax_api.Tracer) for leaf in leaves) or scope.current().mapped:
        raise LoweringError(
            "map_fn: lowering='dispatch' calls one executable per element, so it needs concrete values and cannot be "
            "used under jit, grad or vmap, or in a mapped function; there, write lowering='unroll'"
        )
    devices = _devices(placement)
    outer = scope.current()
    inner = scope.Scope(outer.declared, (*outer.mapped, placement.axis))
    blocks = [_blocks(leaf, devices, placement) for leaf in leaves]
    run = _element(fn, structure, placement, inner)
    results: list[list[Any]] = []
    for turn in range(placement.num_local):
        results.append([run(turn, *(block[d] for block in blocks)) for d in range(len(devices))])
        if placement.axis.at_once and (turn + 1) % placement.axis.at_once == 0:
            jax.block_until_ready(results[-1])
    per_device = [jax.tree.map(lambda *ys: _stack(ys), *(turn[d] for turn in results)) for d in range(len(devices))]
    return jax.tree.map(lambda *parts: _joined(parts, devices, placement), *per_device)


def _devices(placement: Placement) -> list[Any]:
    if placement.mesh is None:
        return [jax.local_devices()[0]]
    mesh = placement.mesh if isinstance(placement.mesh, Mesh) else jax.sharding.get_mesh()
    if set(mesh.axis_names) != set(placement.mesh_axes):
        raise LoweringError(
            f"map_fn: lowering='dispatch' gives each element one device, but axis {placement.axis.name!r} lies over "
            f"{placement.mesh_axes} of a mesh with axes {mesh.axis_names}; write lowering='unroll'"
        )
    order = [mesh.axis_names.index(name) for name in placement.mesh_axes]
    return list(mesh.devices.transpose(order).flat)


def _blocks(leaf: jax.Array, devices: Sequence[Any], placement: Placement) -> list[jax.Array]:
    """Each device's rows, on that device."""
    if len(devices) == 1:
        return [leaf]
    target = layout.sharding(placement, rows=True)
    assert target is not None
    rows = _padded(leaf, placement) if placement.is_padded else leaf
    laid = jax.device_put(rows, NamedSharding(target.mesh, placement.spec))
    held = {shard.device: shard.data for shard in laid.addressable_shards}
    return [held[device] for device in devices]


@functools.partial(jax.jit, static_argnums=1)
def _padded(leaf: jax.Array, placement: Placement) -> jax.Array:
    return jnp.concatenate([leaf, jnp.repeat(leaf[-1:], placement.num_padded - placement.size, axis=0)])


@functools.lru_cache(maxsize=256)
def _element(fn: Callable[..., Any], structure: Any, placement: Placement, inner: scope.Scope) -> Callable[..., Any]:
    """One executable for all turns: which row to take is an argument."""

    def run(turn: jax.Array, *blocks: jax.Array) -> Any:
        rows = [jax.lax.dynamic_index_in_dim(block, turn, keepdims=False) for block in blocks]

        def one(*leaves: Any) -> Any:
            with scope.entered(inner):
                return fn(*jax.tree.unflatten(structure, leaves))

        jaxpr, out_tree = jax_api.trace(one, rows, collectives.sizes([placement.axis]))
        jaxpr = collectives.lifted(jaxpr, [placement.axis])
        if collectives.used(jaxpr.jaxpr, placement):
            raise LoweringError(
                f"lowering='dispatch' runs the elements of axis {placement.axis.name!r} apart, so they cannot "
                f"exchange values; write lowering='vmap', or leave it out"
            )
        return jax.tree.unflatten(out_tree, jax_api.jaxpr_as_fun(jaxpr)(*rows))

    return jax.jit(run)


@jax.jit
def _stack(rows: Sequence[jax.Array]) -> jax.Array:
    return jnp.stack(rows)


def _joined(parts: Sequence[jax.Array], devices: Sequence[Any], placement: Placement) -> jax.Array:
    if len(parts) == 1:
        return parts[0][: placement.size]
    target = layout.sharding(placement, rows=True)
    assert target is not None
    shape = (placement.num_padded, *parts[0].shape[1:])
    # A result that depends on no argument was made on the default device.
    held = [jax.device_put(part, device) for part, device in zip(parts, devices, strict=True)]
    whole = jax.make_array_from_single_device_arrays(shape, NamedSharding(target.mesh, placement.spec), held)
    return layout.unpad(whole, placement)
