"""The place of an axis' elements: which devices, how many on each, which rows are padding."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P

from paraxis._core.axis import Axis, Scope, current, entered
from paraxis.errors import AxisError

DEVICES = "paraxis_devices"
"""A mesh axis of this name, which only :func:`devices_mesh` makes, takes any axis that leaves its place open."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """An axis with its place decided, and with it how many rows it is padded to.

    Attributes:
        axis: whose elements lie there.
        mesh: where; ``None``: there is one device.
        mesh_axes: those that the elements lie over; ``()``: all are within the device at hand.
    """

    axis: Axis
    mesh: Mesh | AbstractMesh | None
    mesh_axes: tuple[str, ...]

    def holding(self, size: int) -> "Placement":
        """Return the same place for another number of elements."""
        return dataclasses.replace(self, axis=dataclasses.replace(self.axis, size=size))

    @functools.cached_property
    def size(self) -> int:
        return self.axis.size

    @functools.cached_property
    def num_devices(self) -> int:
        """Number of blocks; mesh axes that are not ours do not count."""
        return math.prod(self.mesh.shape[name] for name in self.mesh_axes) if self.mesh is not None else 1

    @functools.cached_property
    def crossed_axes(self) -> tuple[str, ...]:
        """The mesh axes with more than one device: JAX does not enter the others, so nothing can be sent along them."""
        return tuple(name for name in self.mesh_axes if self.mesh is not None and self.mesh.shape[name] > 1)

    @functools.cached_property
    def num_chunks(self) -> int:
        """Number of chunks that a device runs one after the other."""
        per_device = -(-self.size // self.num_devices)
        return -(-per_device // (self.axis.at_once or per_device))

    @functools.cached_property
    def chunk(self) -> int:
        """Number of elements in flight per device. Chunks are of equal size, which needs the least padding."""
        return -(-self.size // (self.num_devices * self.num_chunks))

    @functools.cached_property
    def num_local(self) -> int:
        return self.chunk * self.num_chunks

    @functools.cached_property
    def num_padded(self) -> int:
        return self.num_local * self.num_devices

    @functools.cached_property
    def is_padded(self) -> bool:
        return self.num_padded > self.size

    @functools.cached_property
    def has_idle_device(self) -> bool:
        """Return whether some device has nothing but padding."""
        return self.num_padded - self.size >= self.num_local

    @functools.cached_property
    def divides(self) -> bool:
        """Return whether each device has as many elements."""
        return self.size % self.num_devices == 0

    @property
    def is_said(self) -> bool:
        """Return whether the devices were chosen by somebody, not by default."""
        return self.axis.mesh is not None or isinstance(self.mesh, AbstractMesh)

    @functools.cached_property
    def is_explicit(self) -> bool:
        return self.mesh is not None and not set(self.mesh_axes).isdisjoint(self.mesh.explicit_axes)

    @property
    def has_mesh_alone(self) -> bool:
        """Return whether no other mesh axes are left, so that a block is on one device and not on a group."""
        return self.mesh is None or set(self.mesh.axis_names) == set(self.mesh_axes)

    @property
    def spec(self) -> P:
        return P(self.mesh_axes) if self.mesh_axes else P()

    @property
    def devices(self) -> Mesh | None:
        """The mesh with its devices; ``None`` where these are not known, or there is none."""
        return self.mesh if isinstance(self.mesh, Mesh) else mesh_in_force()


def place(axis: Axis) -> Placement:
    """Decide where an axis lies, here and now; an AxisError says what the mesh lacks."""
    scope, context = current(), jax.sharding.get_abstract_mesh()
    if scope.alone:
        return Placement(dataclasses.replace(axis, mesh=None, over=None), None, ())
    if scope.mapped:
        return _place_inside(axis, scope, context)
    if axis.mesh is not None or not context.empty:
        mesh = context if axis.mesh is None else axis.mesh
        return Placement(axis, mesh, _names_on(axis, mesh))
    if axis.over is not None:
        raise AxisError(
            f"axis {axis.name!r} is to lie over mesh axis {axis.over!r}, but there is no mesh. Set one, "
            f"`with jax.set_mesh(mesh): …`, or pass it: px.Axis({axis.name!r}, {axis.size}, mesh=mesh, over=…)"
        )
    mesh = mesh_of(axis.name, tuple(jax.devices()))
    return Placement(axis, mesh, (axis.name,)) if mesh.size > 1 else Placement(axis, None, ())


def _place_inside(axis: Axis, outer: Scope, context: AbstractMesh) -> Placement:
    """Inside another axis's body: the mesh axes still free, or none."""
    if context.empty and outer.mesh is not None:
        context = outer.mesh
    if context.empty:
        return Placement(axis, None, ())
    if axis.mesh is not None and dict(axis.mesh.shape) != dict(context.shape):
        raise AxisError(
            f"axis {axis.name!r} has a mesh of its own, {dict(axis.mesh.shape)}, but is mapped inside "
            f"{outer.mapped[-1].name!r}, which lies on {dict(context.shape)}. "
            f"Put both on one mesh: px.Axis({axis.name!r}, {axis.size}, mesh=mesh, over=…)"
        )
    names, taken = _names_on(axis, context, required=axis.over is not None), {*context.manual_axes, *outer.taken}
    if axis.over is not None and taken.intersection(names):
        raise AxisError(
            f"axis {axis.name!r} is to lie over mesh axis {axis.over!r}, which already carries an axis that it is "
            f"nested in; lay it over another one, or leave `over` out to keep it within each device"
        )
    free = tuple(n for n in names if n in context.axis_names and n not in taken)
    return Placement(axis, context, free) if free else Placement(axis, None, ())


def _names_on(axis: Axis, mesh: Mesh | AbstractMesh, *, required: bool = True) -> tuple[str, ...]:
    if axis.over is None and DEVICES in mesh.axis_names:
        return (DEVICES,)
    missing = [name for name in axis.mesh_names if name not in mesh.axis_names]
    if missing and required:
        has = ", ".join(f"{name!r} ({mesh.shape[name]})" for name in mesh.axis_names)
        which, own = ("its mesh", ", mesh=mesh") if axis.mesh is not None else ("the mesh set by jax.set_mesh", "")
        raise AxisError(
            f"axis {axis.name!r} cannot be placed: {which} has no axis {missing[0]!r}; it has {has}. "
            f"Write px.Axis({axis.name!r}, {axis.size}{own}, over={mesh.axis_names[0]!r})"
        )
    return axis.mesh_names


def as_here(placement: Placement) -> Placement:
    """Return the same placement where the mesh that it is on has been entered: some of its axes are taken."""
    context = jax.sharding.get_abstract_mesh()
    if context.empty or not isinstance(placement.mesh, AbstractMesh):
        return placement
    return dataclasses.replace(placement, mesh=context)


def devices_mesh(devices: Sequence[Any]) -> Mesh:
    """Return a mesh to set for a while, on which every axis that leaves its place open lies over just these devices."""
    return mesh_of(DEVICES, tuple(devices))


@functools.lru_cache(maxsize=64)
def mesh_of(name: str, devices: tuple[Any, ...]) -> Mesh:
    """Return a mesh of one axis over these devices, the same one each time."""
    return Mesh(np.array(devices), (name,))


def named_devices(placement: Placement) -> Any | None:
    """Return a jaxpr that only names the mesh, for ``jit`` to find its devices; ``None``: it knows them."""
    return _named_devices(placement.mesh, placement.mesh_axes) if isinstance(placement.mesh, Mesh) else None


@functools.lru_cache(maxsize=64)
def _named_devices(mesh: Mesh, names: tuple[str, ...]) -> Any:
    nothing = shard_map(lambda: jnp.zeros(1), mesh, names, ())
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.make_jaxpr(nothing)()


def shard_map(
    fn: Callable[..., Any], mesh: Mesh | AbstractMesh | None, names: tuple[str, ...], in_specs: Any, out: Any = None
) -> Callable[..., Any]:
    """Return a function run by each device that lies along these axes of a mesh; results are rows, or as ``out`` says.

    What a device computes is not checked to be alike on all: JAX would change derivatives for it.
    """
    found, out = mesh if isinstance(mesh, Mesh) else None, P(names) if out is None else out
    return jax.shard_map(fn, mesh=found, in_specs=in_specs, out_specs=out, axis_names=set(names), check_vma=False)


def mesh_in_force() -> Mesh | None:
    """Return the mesh that ``jax.set_mesh`` set, with its devices; ``None`` if there is none or they are unknown."""
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:  # under jit: devices are not known there, nor needed
        return None
    return None if mesh.empty else mesh


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Within, every axis lies on one device, whatever it asks for: a program is traced to be run elsewhere."""
    with entered(alone=True), without_context():
        yield


@contextlib.contextmanager
def without_context() -> Iterator[None]:
    """Within, no mesh is in force: for work on devices that were chosen before. Under ``jit`` it stays as it is."""
    if mesh_in_force() is None:
        yield
    else:
        with jax.set_mesh(Mesh(np.empty((), object), ())):
            yield


def settled(axis: Axis) -> Axis:
    """Return the same axis with the mesh that it lies on here and now, to lie there wherever it is used."""
    placement = place(axis)
    if isinstance(placement.mesh, Mesh) or placement.devices is None:
        return axis
    return dataclasses.replace(axis, mesh=placement.devices, over=placement.mesh_axes)


def processes(placement: Placement) -> set[int]:
    """Return the processes that its devices belong to."""
    mesh = placement.devices
    return {jax.process_index()} if mesh is None else {device.process_index for device in mesh.devices.flat}


def on_auto(placement: Placement) -> Placement:
    """Return the same place on a mesh with its devices and Auto axes only: the compiler splits what is computed."""
    mesh = placement.devices if placement.mesh_axes else None
    if mesh is None:
        return dataclasses.replace(placement, mesh=None, mesh_axes=())
    return dataclasses.replace(placement, mesh=Mesh(mesh.devices, mesh.axis_names) if mesh.explicit_axes else mesh)
