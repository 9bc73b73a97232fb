"""Axes, the scope in which they are known, and their place: which devices, how many elements on each, which padding.

An axis is a value: it holds no arrays and no devices' state. The scope is a user context of JAX: it is part of the key
of each of JAX's caches, so what was traced in one scope is never used in another; and each thread has its own.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol

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
        layout: which elements a device has: ``"blocks"``, neighbours; or ``"cyclic"``, they are dealt like cards, so
            that a sorted sweep loads all devices alike. All else goes by elements, as ever; a map whose elements
            exchange values is in blocks. Deal only with ``lowering="lanes"`` or ``at_once=1``: by ``vmap``, a device
            takes as long as its slowest element, and neighbours are alike. Rows of operands, of results, and of what
            a derivative keeps, change devices: by an all-to-all if a device has a multiple of as many elements as there
            are devices, else each device gets all. For a sweep's few numbers an element, that is nothing.

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
    layout: Literal["blocks", "cyclic"] = "blocks"

    def __post_init__(self) -> None:
        for field in ("size", "at_once") if self.at_once is not None else ("size",):
            number = check.count(f"Axis {self.name!r}", field, getattr(self, field), error=AxisError)
            object.__setattr__(self, field, number)
        check.one_of(f"Axis {self.name!r}", "layout", self.layout, ("blocks", "cyclic"), AxisError)


@dataclasses.dataclass(eq=False)
class Number:
    """The number of an element that runs by itself, an operand, and the depth of its axis; equal to itself alone."""

    depth: int
    value: Any = None


class Chunk(Protocol):
    """What verbs ask for in a trace for some of the elements; it is equal to another that gives the same."""

    def __call__(self, axis: Axis, tree: Any) -> tuple[Axis, Any]:
        """Return an axis with as many elements as are traced for, and of what a verb takes as its values their rows."""
        ...

    def count(self, axis: Axis) -> Any:
        """Return the number of all elements, by which a mean divides."""
        ...


@dataclasses.dataclass(frozen=True)
class Scope:
    """The axes in force while a program or a body is traced. It is hashed at each call of ``jax.jit`` within."""

    declared: tuple[Axis, ...] = ()  # of the current program
    mapped: tuple[Axis, ...] = ()  # outermost first
    mesh: AbstractMesh | None = None  # of the outermost one, if it has one that is known
    covered: tuple[str, ...] = ()  # the mesh axes that they lie over
    chunk: "Chunk | None" = None  # in a trace for some of the elements
    numbers: tuple[Number, ...] = ()
    alone: bool = False  # every axis lies on one device, whatever it asks for


_OUTSIDE = Scope()
_scope = jax.make_user_context()  # None, outside: nothing is to be hashed at other calls of jax.jit


def current() -> Scope:
    """Return the scope in force."""
    return _scope.value or _OUTSIDE


def entered(**changes: Any) -> contextlib.AbstractContextManager[None]:
    """Within, the scope has these changes."""
    return _scope(dataclasses.replace(current(), **changes))


def outside() -> contextlib.AbstractContextManager[None]:
    """Within, no axis is in force."""
    return _scope(None)


def resolve(verb: str, axis: Axis | str | None) -> Axis:
    """Return the axis that a verb uses, or raise an AxisError if that cannot be told."""
    scope, name = current(), axis if isinstance(axis, str) else "clients"
    axes = [axis] if isinstance(axis, Axis) else [a for a in scope.declared if axis in (None, a.name)]
    if len(axes) != 1:
        missing = "no axis was given" if axis is None else f"there is no axis {axis!r}"
        names = ", ".join(repr(a.name) for a in scope.declared)
        here = f"the program has {names}" if names else "this is in no program"
        write = f"px.{verb}(…, px.Axis({name!r}, 8)), or declare it: @px.program({name}=8)"
        raise AxisError(f"{verb}: {missing}, and {here}; write {write}")
    return axes[0] if scope.chunk is None else scope.chunk(axes[0], None)[0]


def mapped_axis(collective: str, axis: Axis | str) -> Axis:
    """Return the mapped axis that a collective combines along, or raise an AxisError."""
    name, size = (axis.name, axis.size) if isinstance(axis, Axis) else (axis, None)
    mapped = current().mapped
    known = next((known for known in reversed(mapped) if known.name == name), None)
    if known is None or size not in (None, known.size):
        here = ", ".join(f"{a.name!r} of {a.size} elements" for a in mapped) or "nothing"
        of_size = f" of {size} elements" if size else ""
        raise AxisError(
            f"{collective}: axis {name!r}{of_size} is not being mapped here ({here} is). On a placed value, write "
            f"px.reduce_sum(x, {name!r}); along an axis of jax.vmap, jax.lax.{collective}(…, {name!r})"
        )
    return known


@dataclasses.dataclass(unsafe_hash=True)  # once made, it stays as it is
class Placement:
    """An axis with its place decided, and what follows: devices have blocks of equal size, which run in equal chunks.

    A block is of neighbours, or of elements that are dealt: element ``i`` is row ``i // num_devices`` of its device's.
    Rows beyond the elements are padding; a device that has no other rows is idle.
    """

    axis: Axis
    mesh: Mesh | AbstractMesh | None  # None: there is one device
    mesh_axes: tuple[str, ...]  # these split the elements; (): one device has them all

    def __post_init__(self) -> None:
        names, shape = self.mesh_axes, dict(self.mesh.shape) if self.mesh is not None else {}
        self.size = self.axis.size
        self.num_devices = math.prod(map(shape.__getitem__, names))  # as many as blocks
        per_device = -(-self.size // self.num_devices)
        self.num_chunks = -(-per_device // (self.axis.at_once or per_device))  # that a device runs in turns
        self.chunk = -(-self.size // (self.num_devices * self.num_chunks))  # elements of one
        self.num_local = self.chunk * self.num_chunks  # rows of a block
        self.num_padded = self.num_local * self.num_devices  # rows of all
        self.is_padded = self.num_padded > self.size
        self.is_dealt = self.axis.layout == "cyclic" and min(self.num_devices, self.num_local) > 1
        self.has_idle_device = not self.is_dealt and self.num_padded - self.size >= self.num_local
        self.divides = self.size % self.num_devices == 0  # blocks could be equal without padding
        self.is_chosen = self.axis.mesh is not None or isinstance(self.mesh, AbstractMesh)  # not chosen by default
        self.is_explicit = self.mesh is not None and not set(names).isdisjoint(self.mesh.explicit_axes)
        self.has_mesh_alone = shape.keys() == set(names)  # a block is on one device, and not on a group
        # JAX does not enter mesh axes of one device, so nothing can be sent along them.
        self.crossed_axes = tuple([name for name in names if shape[name] > 1])
        self.spec = P(names) if names else P()

    def __str__(self) -> str:
        number, turns = self.num_devices, f", {self.chunk} at once" * (self.num_chunks > 1)
        each = f"{'at most ' * self.is_padded}{self.num_local} each{turns}"
        return f"{self.axis.name}={self.size} on {number} device{'s' * (number > 1)} ({each})"

    def is_where(self, other: "Placement") -> bool:
        """Return whether an axis lies in the same place, however many are under way at once, and which on a device."""
        fields = {"at_once": self.axis.at_once, "layout": self.axis.layout}
        return self == dataclasses.replace(other, axis=dataclasses.replace(other.axis, **fields))

    def holding(self, size: int) -> "Placement":
        """Return the same place for another number of elements."""
        return dataclasses.replace(self, axis=dataclasses.replace(self.axis, size=size))

    @property
    def devices(self) -> Mesh | None:
        """The mesh with its devices; ``None`` where these are not known, or there is none."""
        return self.mesh if isinstance(self.mesh, Mesh) else mesh_in_force()

    @property
    def is_on_cpu_devices(self) -> bool:
        """Return whether several CPU devices have the elements: XLA ends a process where one waits long for others."""
        # To jaxlib 0.12 at least, after a minute: xla_cpu_collective_call_terminate_timeout_seconds.
        mesh = self.devices if self.mesh_axes else None
        return mesh is not None and mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"

    @property
    def spans_processes(self) -> bool:
        """Return whether some of the devices belong to other processes."""
        return self.devices is not None and self.devices.is_multi_process


def place(axis: Axis) -> Placement:
    """Decide where an axis lies, here and now; an AxisError says what the mesh lacks."""
    scope, mesh = current(), jax.sharding.get_abstract_mesh()
    if scope.alone:
        return Placement(axis, None, ())
    is_nested = bool(scope.mapped or mesh.manual_axes)
    if is_nested:  # inside another axis's body, or a jax.shard_map: the mesh axes still free, or none
        mesh = scope.mesh if mesh.empty and scope.mesh is not None else mesh
        if mesh.empty:
            return Placement(axis, None, ())
        if axis.mesh is not None and dict(axis.mesh.shape) != dict(mesh.shape):
            outside = f"{scope.mapped[-1].name!r}, which lies" if scope.mapped else "a jax.shard_map, which is"
            raise AxisError(
                f"axis {axis.name!r} has a mesh of its own, {dict(axis.mesh.shape)}, but is mapped inside {outside} on "
                f"{dict(mesh.shape)}. Put both on one mesh: px.Axis({axis.name!r}, {axis.size}, mesh=mesh, over=…)"
            )
    elif axis.mesh is not None:
        mesh = axis.mesh
    elif mesh.empty and axis.over is None:
        mesh, old = mesh_of(tuple(jax.devices()), axis.name), jax_api.mesh_entered()
        if old is not None and old.size != mesh.size:
            raise AxisError(
                f"axis {axis.name!r} cannot be placed: `with mesh:` asks for {old.size} of {mesh.size} devices, but "
                f"has no effect on an axis. Write `with jax.set_mesh(mesh): …`, or px.Axis(…, {axis.size}, mesh=mesh)"
            )
        if mesh.size == 1:
            return Placement(axis, None, ())
    over = (DEVICES if DEVICES in mesh.axis_names else axis.name) if axis.over is None else axis.over
    names, has = (over,) if isinstance(over, str) else over, mesh.axis_names
    missing = [name for name in names if name not in has]
    if missing and (axis.over is not None or not is_nested):
        which, option = ("its mesh", ", mesh=mesh") if axis.mesh is not None else ("the mesh set by jax.set_mesh", "")
        if mesh.empty:
            raise AxisError(
                f"axis {axis.name!r} cannot be placed over {axis.over!r}: there is no mesh. Write "
                f"with jax.set_mesh(jax.make_mesh((jax.device_count(),), ({missing[0]!r},))): …, or leave `over` out"
            )
        listed = ", ".join(f"{name!r} ({mesh.shape[name]})" for name in has)
        raise AxisError(
            f"axis {axis.name!r} cannot be placed: {which} has no axis {missing[0]!r}; it has {listed}. "
            f"Write px.Axis({axis.name!r}, {axis.size}{option}, over={next(iter(has), 'data')!r})"
        )
    covered = {*mesh.manual_axes, *scope.covered} if is_nested else set[str]()
    if axis.over is not None and covered.intersection(names):
        raise AxisError(
            f"axis {axis.name!r} is to lie over mesh axis {axis.over!r}, which already carries an axis that it is "
            f"nested in; lay it over another one, or leave `over` out to keep it within each device"
        )
    free = () if missing else tuple([name for name in names if name not in covered])
    return Placement(axis, mesh, free) if free else Placement(axis, None, ())


@functools.lru_cache(maxsize=64)
def mesh_of(devices: tuple[Any, ...], name: str = DEVICES) -> Mesh:
    """Return the one mesh of one axis over these devices; by default, axes without a place of their own lie on it."""
    return Mesh(np.array(devices), (name,))


@functools.lru_cache(maxsize=64)
def mesh_witness(placement: Placement) -> Any | None:
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
    out = P(names) if out is None else out
    if not isinstance(mesh, Mesh) and not jax.sharding.get_abstract_mesh().empty:
        mesh = None  # the one in force, some of whose axes may be taken
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out, axis_names=set(names), check_vma=False)


def on_devices(
    fn: Callable[..., Any], placement: Placement, ins: Sequence[int | None], outs: Sequence[int]
) -> Callable[..., Any]:
    """Return a function that each device runs on its rows, in these dimensions; ``None``: an operand is whole."""
    if not placement.mesh_axes:
        return fn
    specs = [P() if dim is None else P(*[None] * dim, placement.mesh_axes) for dim in (*ins, *outs)]
    return shard_map(fn, placement.mesh, placement.mesh_axes, tuple(specs[: len(ins)]), specs[len(ins) :])


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


def without_context() -> contextlib.AbstractContextManager[Any]:
    """Within, no mesh is in force: for work on devices that were chosen before. Under ``jit`` it stays as it is."""
    return contextlib.nullcontext() if mesh_in_force() is None else jax.set_mesh(Mesh(np.empty((), object), ()))


def settled(axis: Axis) -> Axis:
    """Return the same axis with the mesh that it lies on here and now, to lie there wherever it is used."""
    placement = place(axis)
    if isinstance(placement.mesh, Mesh) or placement.devices is None:
        return axis
    return dataclasses.replace(axis, mesh=placement.devices, over=placement.mesh_axes)
