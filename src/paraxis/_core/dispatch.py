"""Rows of an axis that lie each for itself on their devices, and one executable for one of them, called for each.

Calls return before the work is done, so all devices are busy at once, none waits for another, and each call has its
device to itself. JAX compiles an executable for each device that it is called on.
"""

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from paraxis._core import arrays, collectives, jax_api, layout, placing, scope, structure
from paraxis._core.placing import Placement
from paraxis.errors import LoweringError

Rows = list[Any]
"""A tree for each row, on the device that the row's block is on; as many as there are elements, without padding."""


def map_elements(fn: Callable[..., Any], arguments: Any, leaves: Sequence[jax.Array], placement: Placement) -> Any:
    """``fn`` over concrete arrays ``(size, ...)``; the result's leaves are ``(size, ...)``.

    Raises:
        LoweringError: on traced values, and if the axis shares its mesh with others.
    """
    if any(isinstance(leaf, jax_api.Tracer) for leaf in leaves) or scope.current().mapped:
        raise LoweringError(
            "map_fn: lowering='dispatch' calls one executable per element, so it needs concrete values and cannot be "
            "used under jit, grad or vmap, or in a mapped function; there, write lowering='unroll'"
        )
    require_alone("map_fn", placement)
    inner = scope.within(placement.axis)

    def one(*leaves: Any) -> Any:
        with scope.entered(inner):
            return fn(*jax.tree.unflatten(arguments, leaves))

    avals = [jax_api.element_struct(leaf) for leaf in leaves]
    body, out_tree = jax_api.trace(one, avals, collectives.sizes(inner.mapped))
    body, consts = jax_api.without_constants(body)

    def make() -> Callable[..., Any]:
        fn = jax_api.jaxpr_as_fun(jax_api.with_copies(body))
        return executable(lambda own, shared: fn(*shared, *own), placement, donate=False)

    run = _compiled.get(structure.key((body, placement)), make)
    copies = [[jax.device_put(x, device) for x in consts] for device in placing.devices(placement)]
    rows = call(run, [split(list(leaves), placement)], [copies], placement)
    return jax.tree.unflatten(out_tree, stacked(rows, placement))


_compiled: structure.Recent[Callable[..., Any]] = structure.Recent(256)


def require_alone(verb: str, placement: Placement) -> None:
    """Raise unless each row has a device.

    Raises:
        LoweringError: if the axis shares its mesh with others, or lies over several processes.
    """
    if placing.spans_processes(placement):
        raise LoweringError(
            f"{verb}: lowering='dispatch' calls an executable for each element, but axis {placement.axis.name!r} lies "
            f"over the devices of several processes, and none can call what runs on another's; write lowering='unroll'"
        )
    if not placing.is_spread_alone(placement):
        assert placement.mesh is not None
        raise LoweringError(
            f"{verb}: lowering='dispatch' gives each element one device, but axis {placement.axis.name!r} lies over "
            f"{placement.mesh_axes} of a mesh with axes {placement.mesh.axis_names}; write lowering='unroll'"
        )


def executable(fn: Callable[..., Any], placement: Placement, *, donate: bool) -> Any:
    """Return one element's function compiled; its first argument is given away if ``donate``."""
    inner = scope.within(placement.axis)

    def run(*args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)

        def one(*leaves: Any) -> Any:
            with scope.entered(inner):
                return fn(*jax.tree.unflatten(structure, leaves))

        jaxpr, out_tree = jax_api.trace(one, leaves, collectives.sizes([placement.axis]))
        jaxpr = collectives.lifted(jaxpr, [placement.axis])
        if collectives.used(jaxpr.jaxpr, placement):
            raise LoweringError(
                f"lowering='dispatch' runs the elements of axis {placement.axis.name!r} apart, so they cannot "
                f"exchange values; write lowering='vmap', or leave it out"
            )
        return jax.tree.unflatten(out_tree, jax_api.jaxpr_as_fun(jaxpr)(*leaves))

    return jax.jit(run, donate_argnums=0 if donate else ())


def compile_all(run: Any, own: Sequence[Rows], shared: Sequence[Sequence[Any]], placement: Placement) -> None:
    """Compile an executable for each device that it will be called on."""
    for device, index in _turn(0, placement):
        run.lower(*(rows[index] for rows in own), *(copies[device] for copies in shared)).compile()


def call(run: Callable[..., Any], own: Sequence[Rows], shared: Sequence[Sequence[Any]], placement: Placement) -> Rows:
    """Call an executable for each element: with its row of each of ``own``, and its device's copy of each ``shared``.

    ``at_once``: that many turns of all devices are under way at most.
    """
    results: Rows = [None] * placement.size
    for turn in range(placement.num_local):
        latest = None
        for device, index in _turn(turn, placement):
            latest = results[index] = run(*(rows[index] for rows in own), *(copies[device] for copies in shared))
        if placement.axis.at_once and (turn + 1) % placement.axis.at_once == 0:
            jax.block_until_ready(latest)
    return results


def _turn(turn: int, placement: Placement) -> Iterator[tuple[int, int]]:
    """Yield the device's and the element's number, for each device that has an element in this turn."""
    for device in range(placement.num_devices):
        index = device * placement.num_local + turn
        if index < placement.size:
            yield device, index


def split(tree: Any, placement: Placement) -> Rows:
    """Leaves ``(size, ...)`` → rows."""
    sharding = arrays.block_sharding(placement)
    if sharding is None:
        return _unstack(tree, placement.size)
    padded = arrays.padded(tree, placement) if placement.is_padded else tree
    return split_blocks(jax.device_put(padded, sharding), placement)


def split_blocks(tree: Any, placement: Placement) -> Rows:
    """Leaves ``(num_padded, ...)``, each device holding its block → rows; nothing is moved."""
    if len(placing.devices(placement)) == 1:
        return _unstack(tree, placement.size)
    rows: Rows = []
    for number, block in enumerate(on_devices(tree, placement)):
        count = min(placement.num_local, placement.size - number * placement.num_local)
        rows += _unstack(block, count) if count > 0 else []
    return rows


def on_devices(tree: Any, placement: Placement) -> list[Any]:
    """Return what each device holds of a tree of arrays that lie over them: their blocks, or its copies."""
    leaves, structure = jax.tree.flatten(tree)
    held = [{shard.device: shard.data for shard in leaf.addressable_shards} for leaf in leaves]
    return [jax.tree.unflatten(structure, [shards[d] for shards in held]) for d in placing.devices(placement)]


def stacked(rows: Rows, placement: Placement) -> Any:
    """Cut rows to leaves ``(size, ...)``."""
    return jax.tree.map(lambda leaf: layout.unpad(leaf, placement), stacked_blocks(rows, placement))


def stacked_blocks(rows: Rows, placement: Placement) -> Any:
    """Lay rows as leaves ``(num_padded, ...)``."""
    return joined([stack(block, placement.num_local) for block in blocks(rows, placement)], placement)


def blocks(rows: Rows, placement: Placement) -> list[Rows]:
    """Return each device's elements; a device without any is sent the last one, to stand in."""
    starts = range(0, placement.num_padded, placement.num_local)
    return [rows[start : start + placement.num_local] or rows[-1:] for start in starts]


def joined(blocks: Sequence[Any], placement: Placement) -> Any:
    """Join each device's leaves ``(n, ...)`` to one tree of leaves ``(num_devices * n, ...)`` over the devices."""
    sharding = arrays.block_sharding(placement)
    if sharding is None or len(blocks) == 1:
        return blocks[0]
    # A result that depends on no argument was made on the default device.
    held = [jax.device_put(block, d) for block, d in zip(blocks, placing.devices(placement), strict=True)]

    def one(*parts: jax.Array) -> jax.Array:
        shape = (len(parts) * parts[0].shape[0], *parts[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, sharding, list(parts))

    return jax.tree.map(one, *held)


@functools.partial(jax.jit, static_argnums=1)
def _unstack(block: Any, count: int) -> Rows:
    return [jax.tree.map(operator.itemgetter(index), block) for index in range(count)]


@functools.partial(jax.jit, static_argnums=1)
def stack(rows: Sequence[Any], size: int) -> Any:
    """Return rows on one device → leaves ``(size, ...)``, padded if there are fewer."""
    return jax.tree.map(lambda *leaves: layout.repeat_last(jnp.stack(leaves), size), *rows)
