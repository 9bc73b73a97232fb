"""One executable for one element, called for each, on the device that has its row.

Calls return before the work is done, so all devices are busy at once, none waits for another, and each call has its
device to itself. JAX compiles an executable for each device that it is called on.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from paraxis._axes import apart, placing, scope
from paraxis._axes.placing import Placement
from paraxis._core import collectives
from paraxis._jax import jax_api
from paraxis.errors import LoweringError


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


def compile_all(run: Any, own: Sequence[apart.Rows], shared: Sequence[Sequence[Any]], placement: Placement) -> None:
    """Compile an executable for each device that it will be called on."""
    for device, index in _turn(0, placement):
        run.lower(*(rows[index] for rows in own), *(copies[device] for copies in shared)).compile()


def call(
    run: Callable[..., Any], own: Sequence[apart.Rows], shared: Sequence[Sequence[Any]], placement: Placement
) -> apart.Rows:
    """Call an executable for each element: with its row of each of ``own``, and its device's copy of each ``shared``.

    ``at_once``: that many turns of all devices are under way at most.
    """
    results: apart.Rows = [None] * placement.size
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
