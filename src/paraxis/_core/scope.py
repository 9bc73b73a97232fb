"""The axes known here: those of the program being traced, and those whose body is being traced.

They are a context variable, so threads and async tasks never see each other's.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from jax.sharding import AbstractMesh

from paraxis._core.axis import Axis
from paraxis.errors import AxisError


@dataclasses.dataclass(frozen=True)
class Chunked:
    """A trace for some of an axis' elements in place of all.

    ``axis`` returns an axis with as many elements as are traced for; ``rows``, of a tree of arrays that a verb takes
    as elements' values, their rows.
    """

    axis: Callable[[Axis], Axis]
    rows: Callable[[Any, Axis], Any]


@dataclasses.dataclass(frozen=True)
class Scope:
    """The axes in force while a program or a body is traced.

    Attributes:
        declared: the axes of the current program.
        mapped: the axes being mapped, outermost first.
        mesh: what the outermost of these lies on, if that is known.
        taken: the mesh axes that they lie over.
        chunk: which elements are traced for; ``None``: all.
        alone: every axis lies on one device, whatever it asks for.
    """

    declared: tuple[Axis, ...] = ()
    mapped: tuple[Axis, ...] = ()
    mesh: AbstractMesh | None = None
    taken: tuple[str, ...] = ()
    chunk: Chunked | None = None
    alone: bool = False


_scope: contextvars.ContextVar[Scope] = contextvars.ContextVar("paraxis_scope", default=Scope())
current = _scope.get


@contextlib.contextmanager
def entered(scope: Scope) -> Iterator[None]:
    token = _scope.set(scope)
    try:
        yield
    finally:
        _scope.reset(token)


def resolve(verb: str, axis: Axis | str | None) -> Axis:
    """Return the axis that a verb uses.

    Raises:
        AxisError: if that cannot be told.
    """
    scope = current()
    found = axis if isinstance(axis, Axis) else _declared(verb, axis, scope.declared)
    return found if scope.chunk is None else scope.chunk.axis(found)


def _declared(verb: str, name: str | None, declared: tuple[Axis, ...]) -> Axis:
    if not declared:
        missing = "no axis was given" if name is None else f"axis {name!r} is only a name"
        raise AxisError(
            f"{verb}: {missing}, and this is not inside a program. Pass the axis itself, px.{verb}(…, "
            f"px.Axis({name or 'clients'!r}, 8)), or decorate the function: @px.program({name or 'clients'}=8)"
        )
    found = [axis for axis in declared if name in (None, axis.name)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(repr(axis.name) for axis in declared)
    several = f"this program has several axes, {names}; say which"
    missing = f"no axis {name!r} in this program, which has {names}; write"
    raise AxisError(f"{verb}: {several if name is None else missing}: px.{verb}(…, {declared[-1].name!r})")


def mapped_axis(collective: str, axis: Axis | str) -> Axis:
    """Return the mapped axis that a collective combines along.

    Raises:
        AxisError: if no such axis is being mapped here.
    """
    name, mapped = axis.name if isinstance(axis, Axis) else axis, current().mapped
    known = next((known for known in reversed(mapped) if known.name == name), None)
    if known is None:
        here = ", ".join(repr(a.name) for a in mapped) or "nothing"
        raise AxisError(
            f"{collective}: axis {name!r} is not being mapped here ({here} is). Collectives belong inside the "
            f"function given to px.map_fn or px.pmap; on a placed value write px.reduce_sum(x, {name!r})"
        )
    if isinstance(axis, Axis) and axis.size != known.size:
        raise AxisError(
            f"{collective}: axis {name!r} is mapped here with {known.size} elements, not {axis.size}; write "
            f"px.{collective}(…, {name!r})"
        )
    return known
