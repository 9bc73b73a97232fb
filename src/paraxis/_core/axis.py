"""An axis is a named, repeated dimension of a program; a scope, the axes that are declared and mapped in a trace.

An axis is a value: it holds no arrays and no devices' state. The scope is a context variable, so threads and async
tasks never see each other's.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from paraxis._core import check
from paraxis.errors import AxisError


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
        if isinstance(self.over, list):
            object.__setattr__(self, "over", tuple(self.over))

    @property
    def mesh_names(self) -> tuple[str, ...]:
        """The mesh axes this axis asks for."""
        over = self.name if self.over is None else self.over
        return (over,) if isinstance(over, str) else over


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
    scope = current()
    found = axis if isinstance(axis, Axis) else _declared(verb, axis, scope.declared)
    return found if scope.chunk is None else scope.chunk(found, None)[0]


def _declared(verb: str, name: str | None, declared: tuple[Axis, ...]) -> Axis:
    found = [axis for axis in declared if name in (None, axis.name)]
    if len(found) == 1:
        return found[0]
    missing = "no axis was given" if name is None else f"there is no axis {name!r}"
    here = f"the program has {', '.join(repr(axis.name) for axis in declared)}" if declared else "this is in no program"
    named = f"px.Axis({name or 'clients'!r}, 8)), or @px.program({name or 'clients'}=8"
    axis = repr(declared[-1].name) if declared else named
    raise AxisError(f"{verb}: {missing}, and {here}; write px.{verb}(…, {axis})")


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
