"""Compiling for TPUs that are not here: libtpu has their compiler, JAX the chips of a topology by its name.

JAX exports a trace for any devices of a platform, and the chips of a topology then take the place of those that it was
traced for. So the shardings, meshes and donations of a program stay as they are.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from paraxis._core import jax_api, placing
from paraxis._core.check import needed
from paraxis._host import threads
from paraxis.reports import _flops, _meshes

_WITHOUT_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",  # libtpu asks no metadata server
    "TPU_WORKER_HOSTNAMES": "localhost",  # and does not warn that none has answered
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # a compiler needs no lock on the chips
}


def chips(on: str) -> tuple[Any, ...]:
    """Return the devices of a TPU topology, which JAX compiles for and cannot run on."""
    with needed("explain(on=…)", "tpu"):
        import libtpu  # noqa: F401  # pyright: ignore[reportMissingImports]
    from jax._src import hardware_utils  # says whether there are TPUs, without starting them

    has_tpu = hardware_utils.num_available_tpu_chips_and_device_id()[0] > 0
    with threads.environment({} if has_tpu else _WITHOUT_TPU):
        jax.devices()  # JAX has to start on a TPU that is here before libtpu is used for others
        return tuple(jax_api.topologies.get_topology_desc(on, platform="tpu").devices)


def traced(fn: Any, trace: Callable[[], tuple[Any, Any]], chips: Sequence[Any]) -> tuple[Any, Any]:
    """Trace for a topology: axes that lie over all devices lie over its chips, if JAX has fewer devices."""
    if not jax.sharding.get_abstract_mesh().empty or jax.device_count() >= len(chips):
        return trace()
    with jax.set_mesh(placing.mesh_of(chips)):
        staged, is_placed = trace(), getattr(fn, "num_devices", 1) > 1  # as steps know, which lay their arguments out
    is_placed |= any(_meshes.named(staged[0].jaxpr.jaxpr))
    return staged if is_placed else trace()  # a function that lies nowhere runs on one device


def lowered(name: str, traced: Any, chips: Sequence[Any]) -> Any:
    """Return a trace lowered for the chips of a topology, as a function of its leaves."""
    if calls := [str(line) for line in _flops.calls_python(traced.jaxpr.jaxpr)]:
        raise ValueError(f"explain: {name} calls Python at {calls[0]}, and on= has no host for it; leave the call out")
    stage: Any = functools.partial(traced.lower)  # takes any attributes, and so the place of the jitted function
    stage.trace, stage.lower = lambda: traced, traced.lower
    exported = jax.export.export(stage, platforms=["tpu"])()
    count = exported.nr_devices
    if count not in (1, len(chips)):
        raise ValueError(f"explain: {name} lies over {count} devices, and the topology of on= has {len(chips)} chips")
    chips = chips[:count]

    def call(*flat: Any) -> Any:  # jax.jit drops the leaves that the program does not read
        full = [x if n in exported.module_kept_var_idx else jax.lax.empty(x.shape, x.dtype) for n, x in enumerate(flat)]
        args, kwargs = jax.tree.unflatten(exported.in_tree, full)
        return exported.call(*args, **kwargs)

    def struct(aval: Any, side: Any) -> jax.ShapeDtypeStruct:
        place = None  # where the compiler likes, as a number
        if side is not None and side.mesh.axis_names:
            mesh, devices = side.mesh, np.array(chips).reshape(side.mesh.axis_sizes)
            there = Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
            place = NamedSharding(there, side.spec, memory_kind=side.memory_kind)
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=place)

    donated = [place for place, info in enumerate(jax.tree.leaves(traced.args_info)) if info.donated]
    in_shardings: Any = exported.in_shardings_jax(None)  # pyright: ignore[reportArgumentType]  # on no devices
    shapes = _meshes.used(traced.jaxpr.jaxpr, in_shardings, count)  # JAX says where results lie on a mesh that is set
    names, sizes = zip(*shapes[0], strict=True) if shapes else (("device",), (count,))
    with jax.set_mesh(Mesh(np.array(chips).reshape(sizes), names)):
        return jax.jit(call, donate_argnums=donated).trace(*map(struct, exported.in_avals, in_shardings)).lower()
