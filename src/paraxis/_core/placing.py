"""The place of an axis' elements: which devices, how many on each, which rows are padding."""

import contextlib
import contextvars
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P

from paraxis._core import jax_api, scope
from paraxis._core.axis import Axis
from paraxis.errors import AxisError

DEVICES = "paraxis_devices"
"""A mesh axis of this name, which only :func:`devices_mesh` makes, takes any axis that leaves its place open."""


@dataclasses.dataclass(frozen=True, repr=False)
class Placement:
    """An axis with its place decided, and with it how many rows it is padded to.

    Attributes:
        axis: whose elements lie there.
        mesh: where; ``None``: there is one device.
        mesh_axes: those that the elements lie over; ``()``: all are within the device at hand.
        turns: the number of turns that a device takes over its elements; ``None``: as ``at_once`` asks.
    """

    axis: Axis
    mesh: Mesh | AbstractMesh | None
    mesh_axes: tuple[str, ...]
    turns: int | None = None

    def holding(self, size: int, *, turns: int | None = None) -> "Placement":
        """Return the same place for another number of elements."""
        return dataclasses.replace(self, axis=dataclasses.replace(self.axis, size=size), turns=turns)

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
        """Number of turns a device takes over its elements."""
        per_device = -(-self.size // self.num_devices)
        return self.turns or -(-per_device // (self.axis.at_once or per_device))

    @functools.cached_property
    def chunk(self) -> int:
        """Number of elements in flight per device. Turns are made equal, which needs the least padding."""
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

    @property
    def is_said(self) -> bool:
        """Return whether the devices were chosen by somebody, not by default."""
        return self.axis.mesh is not None or isinstance(self.mesh, AbstractMesh)

    @functools.cached_property
    def is_explicit(self) -> bool:
        return self.mesh is not None and jax_api.is_explicit(self.mesh, self.mesh_axes)

    @property
    def spec(self) -> P:
        return P(self.mesh_axes) if self.mesh_axes else P()

    def __repr__(self) -> str:
        return f"{self.axis.name}:{self.size}/{self.num_devices}"


_alone: contextvars.ContextVar[bool] = contextvars.ContextVar("paraxis_alone", default=False)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Within, every axis lies on one device, whatever it asks for: a program is traced to be run elsewhere."""
    token = _alone.set(True)
    try:
        with without_context():
            yield
    finally:
        _alone.reset(token)


def place(axis: Axis) -> Placement:
    """Decide where an axis lies, here and now.

    Raises:
        AxisError: if the mesh lacks what the axis asks for.
    """
    if _alone.get():
        return Placement(dataclasses.replace(axis, mesh=None, over=None), None, ())
    context = jax.sharding.get_abstract_mesh()
    if scope.current().mapped:
        return _place_inside(axis, context)
    if axis.mesh is not None:
        _require(axis, axis.mesh, "its mesh")
        return Placement(axis, axis.mesh, axis.mesh_names)
    if not context.empty:
        return Placement(axis, context, _names_on(axis, context))
    if axis.over is not None:
        raise AxisError(
            f"axis {axis.name!r} is to lie over mesh axis {axis.over!r}, but there is no mesh. Set one, "
            f"`with jax.set_mesh(mesh): …`, or pass it: "
            f"px.Axis({axis.name!r}, {axis.size}, mesh=mesh, over={axis.over!r})"
        )
    mesh = mesh_of(axis.name, tuple(jax.devices()))
    entered = jax_api.entered_devices()
    if entered not in (0, mesh.size):
        raise AxisError(
            f"axis {axis.name!r} cannot be placed: `with mesh:` asks for {entered} of {mesh.size} devices, but has no "
            f"effect on an axis. Write `with jax.set_mesh(mesh): …`, or px.Axis({axis.name!r}, {axis.size}, mesh=mesh)"
        )
    return Placement(axis, mesh, (axis.name,)) if mesh.size > 1 else Placement(axis, None, ())


def _place_inside(axis: Axis, context: AbstractMesh) -> Placement:
    """Inside another axis's body: the mesh axes still free, or none."""
    outer = scope.current()
    if context.empty and outer.mesh is not None:
        context = outer.mesh
    if axis.mesh is not None and not context.empty and dict(axis.mesh.shape) != dict(context.shape):
        raise AxisError(
            f"axis {axis.name!r} has a mesh of its own, {dict(axis.mesh.shape)}, but is mapped inside "
            f"{outer.mapped[-1].name!r}, which lies on {dict(context.shape)}. "
            f"Put both on one mesh: px.Axis({axis.name!r}, {axis.size}, mesh=mesh, over=…)"
        )
    if context.empty:
        return Placement(axis, None, ())
    taken = (*jax_api.manual_axes(context), *outer.taken)
    if axis.over is not None:
        _require(axis, context, "the mesh")
        clash = [name for name in axis.mesh_names if name in taken]
        if clash:
            raise AxisError(
                f"axis {axis.name!r} is to lie over mesh axis {clash[0]!r}, which already carries an axis that it is "
                f"nested in; lay it over another one, or leave `over` out to keep it within each device"
            )
    names = (DEVICES,) if axis.over is None and DEVICES in context.axis_names else axis.mesh_names
    free = tuple(n for n in names if n in context.axis_names and n not in taken)
    return Placement(axis, context, free) if free else Placement(axis, None, ())


def _names_on(axis: Axis, mesh: AbstractMesh) -> tuple[str, ...]:
    if axis.over is None and DEVICES in mesh.axis_names:
        return (DEVICES,)
    _require(axis, mesh, "the mesh set by jax.set_mesh")
    return axis.mesh_names


def _require(axis: Axis, mesh: Mesh | AbstractMesh, which: str) -> None:
    missing = [name for name in axis.mesh_names if name not in mesh.axis_names]
    if missing:
        has = ", ".join(f"{name!r} ({mesh.shape[name]})" for name in mesh.axis_names)
        own = ", mesh=mesh" if axis.mesh is not None else ""
        raise AxisError(
            f"axis {axis.name!r} cannot be placed: {which} has no axis {missing[0]!r}; it has {has}. "
            f"Write px.Axis({axis.name!r}, {axis.size}{own}, over={mesh.axis_names[0]!r})"
        )


AT_HAND = Placement(Axis("blocks", 1), None, ())
"""One block of rows, wherever they lie: the compiler divides it as it finds them."""


def blocks(placement: Placement) -> Placement:
    """Return a block of rows per device of a placement; one, as it is, where types say how rows lie."""
    mesh = concrete_mesh(placement)
    if mesh is None or placement.num_devices == 1 or placement.is_explicit:
        return AT_HAND
    axis = Axis("blocks", placement.num_devices, mesh=mesh, over=placement.mesh_axes)
    return Placement(axis, mesh, placement.mesh_axes)


def as_here(placement: Placement) -> Placement:
    """Return the same placement where the mesh that it is on has been entered: some of its axes are taken."""
    context = jax.sharding.get_abstract_mesh()
    if context.empty or not isinstance(placement.mesh, AbstractMesh):
        return placement
    return dataclasses.replace(placement, mesh=context)


def names_in_force(name: str) -> tuple[str, ...] | None:
    """Return the mesh axes that an axis lies over by default: the one of its name, else all of the mesh in force."""
    context = jax.sharding.get_abstract_mesh()
    return None if context.empty or {name, DEVICES} & set(context.axis_names) else tuple(context.axis_names)


def devices_mesh(devices: Sequence[Any]) -> Mesh:
    """Return a mesh to set for a while, on which every axis that leaves its place open lies over just these devices."""
    return mesh_of(DEVICES, tuple(devices))


@functools.lru_cache(maxsize=64)
def mesh_of(name: str, devices: tuple[Any, ...]) -> Mesh:
    """Return a mesh of one axis over these devices, the same one each time."""
    return Mesh(np.array(devices), (name,))


@functools.lru_cache(maxsize=64)
def shared_mesh(axes: tuple[tuple[str, int], ...], devices: tuple[Any, ...]) -> Mesh:
    """Share devices out among axes of these names and sizes.

    Of all ways to write their number as a product, one factor per axis, the one in which the busiest device runs the
    fewest elements; ties go to the outermost axis.
    """

    def busiest(split: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        elements = math.prod(-(-size // part) for (_, size), part in zip(axes, split, strict=True))
        return elements, tuple(-part for part in split)

    split = min(_splits(len(devices), len(axes)), key=busiest)
    return Mesh(np.array(devices).reshape(split), tuple(name for name, _ in axes))


def _splits(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Return all ways to write a number as a product of so many factors."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return (split for split in itertools.product(divisors, repeat=parts) if math.prod(split) == number)


def named_devices(placement: Placement) -> Any | None:
    """Return a jaxpr that only names the mesh, for ``jit`` to find its devices; ``None``: it knows them."""
    return _named_devices(placement.mesh, placement.mesh_axes) if isinstance(placement.mesh, Mesh) else None


@functools.lru_cache(maxsize=64)
def _named_devices(mesh: Mesh, names: tuple[str, ...]) -> Any:
    nothing = jax.shard_map(
        lambda: jnp.zeros(1), mesh=mesh, in_specs=(), out_specs=P(names), axis_names=set(names), check_vma=False
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.make_jaxpr(nothing)()


def abstract_mesh(placement: Placement) -> AbstractMesh | None:
    """Return the mesh without its devices; ``None`` if there is none."""
    return placement.mesh.abstract_mesh if isinstance(placement.mesh, Mesh) else placement.mesh


def concrete_mesh(placement: Placement) -> Mesh | None:
    """Return the mesh with its devices; ``None`` where these are not known, or there is none."""
    return placement.mesh if isinstance(placement.mesh, Mesh) else mesh_in_force()


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
    mesh = concrete_mesh(placement)
    if axis.mesh is not None or mesh is None or isinstance(placement.mesh, Mesh):
        return axis
    return dataclasses.replace(axis, mesh=mesh, over=placement.mesh_axes)


def is_spread_alone(placement: Placement) -> bool:
    """Return whether the axis has its mesh to itself, so that each block is on one device and not on a group."""
    return placement.mesh is None or set(placement.mesh.axis_names) == set(placement.mesh_axes)


def spans_processes(placement: Placement) -> bool:
    """Return whether some of its devices belong to other processes."""
    mesh = concrete_mesh(placement)
    mine = jax.process_index() if mesh is not None else 0
    return mesh is not None and any(device.process_index != mine for device in mesh.devices.flat)


def spans_all_processes(placement: Placement) -> bool:
    """Return whether each of several processes has some of its devices, and so takes part."""
    mesh = concrete_mesh(placement)
    return mesh is not None and len({device.process_index for device in mesh.devices.flat}) == jax.process_count() > 1


def mesh_in_force() -> Mesh | None:
    """Return the mesh that ``jax.set_mesh`` set, with its devices; ``None`` if there is none or they are unknown."""
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:  # under jit: devices are not known there, nor needed
        return None
    return None if mesh.empty else mesh


def on_auto(placement: Placement) -> Placement:
    """Return the same place on a mesh with its devices and Auto axes only: the compiler splits what is computed."""
    mesh = concrete_mesh(placement) if placement.mesh_axes else None
    if mesh is None:
        return dataclasses.replace(placement, mesh=None, mesh_axes=())
    is_auto = not jax_api.is_explicit(mesh, mesh.axis_names)
    return dataclasses.replace(placement, mesh=mesh if is_auto else Mesh(mesh.devices, mesh.axis_names))
