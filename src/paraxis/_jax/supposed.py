"""Devices that are not here: a program is traced and compiled for them, and never run.

Within :func:`supposing`, axes lie on these devices, a mesh stands for one with the same axes over them, and an array
for its shape. JAX keeps what it traced by the device in force among other things, so each supposition has its own.
"""

import contextlib
import contextvars
import dataclasses
import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from paraxis._jax import jax_api
from paraxis.errors import DeviceError

MOST = 8192
"""The most devices: each costs the process a thread or three."""


@dataclasses.dataclass(frozen=True)
class Supposed:
    """Devices that are supposed to be there.

    Attributes:
        devices: in order.
        sizes: of mesh axes, by name; empty: a mesh's one axis takes all devices.
    """

    devices: tuple[Any, ...]
    sizes: tuple[tuple[str, int], ...] = ()

    def shape_of(self, mesh: Mesh | AbstractMesh) -> tuple[int, ...]:
        """Return how many devices each axis of a mesh has here.

        Raises:
            DeviceError: if that is not said.
        """
        shape, number = dict(mesh.shape), len(self.devices)
        if self.sizes:
            wanted = shape | {name: size for name, size in self.sizes if name in shape}
            left = [name for name in shape if name not in dict(self.sizes) and shape[name] > 1]
            if left or math.prod(wanted.values()) > number:
                said = {**dict(self.sizes), **{name: shape[name] for name in left}}
                raise DeviceError(
                    f"explain: devices={dict(self.sizes)!r} leaves out {', '.join(map(repr, left))} of the mesh "
                    f"{shape}; write devices={said!r}"
                )
            return tuple(wanted.values())
        growing = [name for name, size in shape.items() if size > 1] or list(shape)[:1]
        if mesh.size != number and len(growing) > 1:
            raise DeviceError(
                f"explain: the mesh has the axes {shape}, and devices={number} does not say how many devices each "
                f"is to have; write devices={shape!r} with the numbers that you mean"
            )
        if mesh.size != number:
            shape[growing[0]] = number
        return tuple(shape.values())

    def mesh(self, mesh: Mesh | AbstractMesh) -> Mesh:
        """Return a mesh with the same axes over these devices."""
        shape = self.shape_of(mesh)
        devices = np.array(self.devices[: math.prod(shape)]).reshape(shape)
        return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


_supposed: contextvars.ContextVar[Supposed | None] = contextvars.ContextVar("paraxis_supposed", default=None)


def current() -> Supposed | None:
    """Return what is supposed here; ``None``: that devices are as they are."""
    return _supposed.get()


def devices() -> tuple[Any, ...]:
    """Return all devices that there are, or are supposed to be."""
    supposed = _supposed.get()
    return tuple(jax.devices()) if supposed is None else supposed.devices


def mesh(given: Any) -> Any:
    """Return what a mesh, or ``None``, stands for here."""
    supposed = _supposed.get()
    if supposed is None or given is None or (isinstance(given, Mesh) and set(given.devices.flat) <= _all(supposed)):
        return given
    return supposed.mesh(given)


def structs(tree: Any) -> Any:
    """Return what arrays stand for here: their shapes, laid over the devices as they are over theirs."""
    return tree if _supposed.get() is None else jax.tree.map(_struct, tree)


def _struct(x: Any) -> Any:
    if not isinstance(x, (jax.Array, jax.ShapeDtypeStruct)) or isinstance(x, jax_api.Tracer):
        return x
    return jax_api.laid_struct(x, _sharding(x.sharding))


def _sharding(sharding: Any) -> Any:
    if not isinstance(sharding, NamedSharding):
        if sharding is None or len(sharding.device_set) == 1:
            return None
        raise DeviceError(
            f"explain: an argument lies by a {type(sharding).__name__}, which does not say how it would lie on other "
            f"devices; lay it by jax.NamedSharding, or pass jax.ShapeDtypeStruct(x.shape, x.dtype)"
        )
    return NamedSharding(mesh(sharding.mesh), sharding.spec)


def _all(supposed: Supposed) -> set[Any]:
    return set(supposed.devices)


# --- supposing -------------------------------------------------------------------------------------------------------

_numbers: dict[tuple[int, tuple[tuple[str, int], ...]], int] = {}
_simulated: list[Any] = []
_lock = threading.Lock()


@contextlib.contextmanager
def supposing(number: int, sizes: Mapping[str, int] | None = None) -> Iterator[Supposed]:
    """Within, there are so many devices, and the mesh in force is over them.

    Args:
        number: of devices.
        sizes: of mesh axes, by name, whose product is the number; ``None``: each mesh has one axis.

    Raises:
        DeviceError: if the mesh in force has other axes.
    """
    named = tuple((sizes or {}).items())
    with _lock:  # each supposition has a device of its own as the one in force
        mine = _numbers.setdefault((number, named), len(_numbers))
        at_least = max(number, mine + 1)
        if len(_simulated) < at_least:
            _simulated[:] = jax_api.simulated_cpus(at_least)
    supposed = Supposed(tuple(_simulated[:number]), named)
    token = _supposed.set(supposed)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(jax.default_device(_simulated[mine]))
            if not (entered := jax.sharding.get_mesh()).empty:
                stack.enter_context(jax.set_mesh(supposed.mesh(entered)))
            yield supposed
    finally:
        _supposed.reset(token)


def is_on(supposed: Supposed, places: Iterable[Any]) -> bool:
    """Return whether meshes and shardings are on the devices supposed; what names no mesh may be on any single one.

    A mesh of one device is the user's too: where there is one device, it stands for all there are.
    """
    return all(_is_on(supposed, place) for place in places)


def _is_on(supposed: Supposed, place: Any) -> bool:
    mesh = place.mesh if isinstance(place, NamedSharding) else place
    if isinstance(mesh, Mesh):
        return mesh.empty or set(mesh.devices.flat) <= _all(supposed)
    if isinstance(mesh, AbstractMesh):
        said = dict(supposed.sizes)
        is_said = all(said.get(name, size) == size for name, size in mesh.shape.items())
        return mesh.empty or (is_said if said else mesh.size == len(supposed.devices))
    devices = getattr(place, "device_set", set())
    return len(devices) < 2 or devices <= _all(supposed)
