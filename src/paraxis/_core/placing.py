"""Axes, the scope in which they are known, and their place: which devices, how many elements on each, which padding.

An axis is a value: it holds no arrays and no devices' state. The scope is a context variable, so threads and async
tasks never see each other's.
"""

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P

from paraxis._core import check, jax_api
from paraxis.errors import AxisError

DEVICES = "paraxis_devices"
"""A mesh axis of this name, which only :func:`mesh_of` makes, takes any axis that leaves its place open."""


@dataclasses.dataclass(frozen=True)
class Axis:
    """A named dimension of a program, with a size and, if you like, the devices to lie on.

    The number of elements need not match the number of devices, and the answer never depends on the devices.

    The first of these that applies decides where the elements go:

    * ``mesh`` is given: along the axes ``over`` of that mesh (default: the mesh axis of the same name);
    * ``jax.set_mesh`` is in force: likewise on that mesh; a mesh that lacks the axis is an error;
    * otherwise: over all devices.

    Inside the function that another axis maps, an axis takes the mesh axes that are still free, and runs within one
    device if there are none.

    Args:
        name: what the elements are, in the plural: ``"clients"``.
        size: number of elements, at least 1.
        mesh: a ``jax.sharding.Mesh`` with Auto or Explicit axes. Its other axes are left to the compiler.
        over: the mesh axis, or a tuple of mesh axes (the first varies slowest), along which this axis lies.
        at_once: the largest number of elements per device in flight, forward and backward. It bounds memory and does
            not change the answer. Inside ``jit`` or a program, results of a map that are only summed or averaged are
            not stored; results that are both summed and used themselves are computed twice.

    Raises:
        AxisError: if an argument is malformed, or if a verb uses an axis that cannot be placed.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> members = px.Axis("members", 7)
        >>> px.reduce_sum(jnp.arange(7.0), members)
        Array(21., dtype=float32)
    """

    name: str
    size: int
    _: dataclasses.KW_ONLY
    mesh: Mesh | None = None
    over: str | tuple[str, ...] | None = None
    at_once: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            got = check.described(self.name)
            raise AxisError(f"Axis: name must be a non-empty string, got {got}; write px.Axis('clients', 8)")
        for field in ("size", "at_once") if self.at_once is not None else ("size",):
            number = check.count(f"Axis {self.name!r}", field, getattr(self, field), error=AxisError)
            object.__setattr__(self, field, number)
        if self.mesh is not None and not isinstance(self.mesh, Mesh):
            raise AxisError(f"Axis {self.name!r}: mesh must be a jax.sharding.Mesh, got {type(self.mesh).__name__}")


@dataclasses.dataclass(frozen=True)
class Scope:
    """The axes in force while a program or a body is traced.

    Attributes:
        declared: the axes of the current program.
        mapped: the axes being mapped, outermost first.
        mesh: what the outermost of these lies on, if that is known.
        taken: the mesh axes that they lie over.
        chunk: in a trace for some of the elements, gives for an axis and a tree of what a verb takes as its elements'
            values: an axis with as many as are traced for, and their rows.
        alone: every axis lies on one device, whatever it asks for.
    """

    declared: tuple[Axis, ...] = ()
    mapped: tuple[Axis, ...] = ()
    mesh: AbstractMesh | None = None
    taken: tuple[str, ...] = ()
    chunk: Callable[[Axis, Any], tuple[Axis, Any]] | None = None
    alone: bool = False


_scope: contextvars.ContextVar[Scope] = contextvars.ContextVar("paraxis_scope", default=Scope())
current = _scope.get


@contextlib.contextmanager
def entered(**changes: Any) -> Iterator[None]:
    """Within, the scope has these changes."""
    token = _scope.set(dataclasses.replace(current(), **changes))
    try:
        yield
    finally:
        _scope.reset(token)


def resolve(verb: str, axis: Axis | str | None) -> Axis:
    """Return the axis that a verb uses, or raise an AxisError if that cannot be told."""
    scope, name = current(), axis if isinstance(axis, str) else "clients"
    found = [axis] if isinstance(axis, Axis) else [a for a in scope.declared if axis in (None, a.name)]
    if len(found) != 1:
        missing = "no axis was given" if axis is None else f"there is no axis {axis!r}"
        names = ", ".join(repr(a.name) for a in scope.declared)
        here = f"the program has {names}" if names else "this is in no program"
        write = f"px.{verb}(…, px.Axis({name!r}, 8)), or declare it: @px.program({name}=8)"
        raise AxisError(f"{verb}: {missing}, and {here}; write {write}")
    return found[0] if scope.chunk is None else scope.chunk(found[0], None)[0]


def mapped_axis(collective: str, axis: Axis | str) -> Axis:
    """Return the mapped axis that a collective combines along, or raise an AxisError."""
    name, size = (axis.name, axis.size) if isinstance(axis, Axis) else (axis, None)
    mapped = current().mapped
    known = next((known for known in reversed(mapped) if known.name == name), None)
    if known is None or size not in (None, known.size):
        here = ", ".join(f"{a.name!r} of {a.size} elements" for a in mapped) or "nothing"
        of_size = f" of {size} elements" if size else ""
        raise AxisError(
            f"{collective}: axis {name!r}{of_size} is not being mapped here ({here} is). "
            f"Collectives belong inside the function given to px.map_fn or px.pmap; on a placed value write "
            f"px.reduce_sum(x, {name!r})"
        )
    return known


# --- the place of an axis -----------------------------------------------------------------------------------------


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

    def __str__(self) -> str:
        number, most = self.num_devices, "at most " * self.is_padded
        turns = f", {self.chunk} at once" if self.num_chunks > 1 else ""
        each = f"({most}{self.num_local} each{turns})"
        return f"{self.axis.name}={self.size} on {number} device{'s' * (number > 1)} {each}"

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

    @property
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

    @property
    def spans_processes(self) -> bool:
        """Return whether some of the devices belong to other processes."""
        return self.devices is not None and self.devices.is_multi_process


def place(axis: Axis) -> Placement:
    """Decide where an axis lies, here and now; an AxisError says what the mesh lacks."""
    scope, context = current(), jax.sharding.get_abstract_mesh()
    if scope.alone:
        return Placement(dataclasses.replace(axis, mesh=None, over=None), None, ())
    if scope.mapped:
        return _place_inside(axis, scope, context)
    mesh = context if axis.mesh is None else axis.mesh
    if not mesh.empty or axis.over is not None:
        return Placement(axis, mesh, _names_on(axis, mesh))
    mesh, entered = mesh_of(tuple(jax.devices()), axis.name), jax_api.entered_devices()
    if entered not in (0, mesh.size):
        raise AxisError(
            f"axis {axis.name!r} cannot be placed: `with mesh:` asks for {entered} of {mesh.size} devices, but has no "
            f"effect on an axis. Write `with jax.set_mesh(mesh): …`, or px.Axis({axis.name!r}, {axis.size}, mesh=mesh)"
        )
    return Placement(axis, mesh, (axis.name,)) if mesh.size > 1 else Placement(axis, None, ())


def _place_inside(axis: Axis, outer: Scope, context: AbstractMesh) -> Placement:
    """Inside another axis's body: the mesh axes still free, or none."""
    context = outer.mesh if context.empty and outer.mesh is not None else context
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
    over = axis.name if axis.over is None else axis.over
    names = (over,) if isinstance(over, str) else over
    missing = [name for name in names if name not in mesh.axis_names]
    if missing and required:
        has = ", ".join(f"{name!r} ({mesh.shape[name]})" for name in mesh.axis_names) or "none, as there is no mesh"
        which, own = ("its mesh", ", mesh=mesh") if axis.mesh is not None else ("the mesh set by jax.set_mesh", "")
        raise AxisError(
            f"axis {axis.name!r} cannot be placed: {which} has no axis {missing[0]!r}; it has {has}. "
            f"Write px.Axis({axis.name!r}, {axis.size}{own}, over={next(iter(mesh.axis_names), 'data')!r})"
        )
    return names


def as_here(placement: Placement) -> Placement:
    """Return the same placement where the mesh that it is on has been entered: some of its axes are taken."""
    context = jax.sharding.get_abstract_mesh()
    if context.empty or not isinstance(placement.mesh, AbstractMesh):
        return placement
    return dataclasses.replace(placement, mesh=context)


@functools.lru_cache(maxsize=64)
def mesh_of(devices: tuple[Any, ...], name: str = DEVICES) -> Mesh:
    """Return a mesh of one axis over these devices, by default one to set: axes that leave their place open lie on it.

    It is the same one each time.
    """
    return Mesh(np.array(devices), (name,))


@functools.lru_cache(maxsize=64)
def named_devices(placement: Placement) -> Any | None:
    """Return a jaxpr that only names the mesh, for ``jit`` to find its devices; ``None``: it knows them."""
    if not isinstance(placement.mesh, Mesh):
        return None
    nothing = shard_map(lambda: jnp.zeros(1), placement.mesh, placement.mesh_axes, ())
    with jax.sharding.use_abstract_mesh(placement.mesh.abstract_mesh):
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


def on_auto(placement: Placement) -> Placement:
    """Return the same place on a mesh with its devices and Auto axes only: the compiler splits what is computed."""
    mesh = placement.devices if placement.mesh_axes else None
    twin = mesh if mesh is None else Mesh(mesh.devices, mesh.axis_names)
    return Placement(placement.axis, twin, placement.mesh_axes if twin is not None else ())
