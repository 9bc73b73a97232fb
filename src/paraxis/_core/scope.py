"""The axes that are known here: those of the program being run, and those whose body is being traced.

Both are context variables, so threads and async tasks never see each other's.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from jax.sharding import AbstractMesh

from paraxis._core.axis import Axis
from paraxis.errors import CollectiveError, ScopeError


@dataclasses.dataclass(frozen=True)
class Scope:
    """``declared``: the axes of the current program. ``mapped``: axes being mapped, outermost first.

    ``mesh``: what the outermost of these lies on, if that is known; ``taken``: the mesh axes that they lie over.
    """

    declared: tuple[Axis, ...] = ()
    mapped: tuple[Axis, ...] = ()
    mesh: AbstractMesh | None = None
    taken: tuple[str, ...] = ()


_scope: contextvars.ContextVar[Scope] = contextvars.ContextVar("paraxis_scope", default=Scope())


def current() -> Scope:
    return _scope.get()


def within(axis: Axis, mesh: AbstractMesh | None = None, names: tuple[str, ...] = ()) -> Scope:
    """Return the scope of a body that is mapped along an axis, which lies over these axes of a mesh."""
    outer = current()
    return Scope(outer.declared, (*outer.mapped, axis), outer.mesh or mesh, (*outer.taken, *names))


@contextlib.contextmanager
def entered(scope: Scope) -> Iterator[None]:
    token = _scope.set(scope)
    try:
        yield
    finally:
        _scope.reset(token)


@dataclasses.dataclass(frozen=True)
class Chunked:
    """A trace for some of an axis' elements in place of all.

    ``axis`` returns an axis with as many elements as are traced for; ``rows``, of a tree of arrays that a verb takes
    as elements' values, their rows.
    """

    axis: Callable[[Axis], Axis]
    rows: Callable[[Any, Axis], Any]


_chunked: contextvars.ContextVar[Chunked | None] = contextvars.ContextVar("paraxis_chunked", default=None)


@contextlib.contextmanager
def chunked(chunk: Chunked) -> Iterator[None]:
    token = _chunked.set(chunk)
    try:
        yield
    finally:
        _chunked.reset(token)


def is_chunked() -> bool:
    return _chunked.get() is not None


def rows(tree: Any, axis: Axis) -> Any:
    """Return what a verb takes as elements' values: as it is, but in a trace for some of the elements."""
    chunk = _chunked.get()
    return tree if chunk is None else chunk.rows(tree, axis)


def resolve(verb: str, axis: Axis | str | None) -> Axis:
    """Return the axis that a verb is to use.

    Raises:
        ScopeError: if that cannot be told.
    """
    found, chunk = _resolved(verb, axis), _chunked.get()
    return found if chunk is None else chunk.axis(found)


def _resolved(verb: str, axis: Axis | str | None) -> Axis:
    if isinstance(axis, Axis):
        return axis
    declared = current().declared
    if axis is not None and not isinstance(axis, str):
        raise ScopeError(
            f"{verb}: axis must be a px.Axis or the name of one of the program's axes, got {type(axis).__name__}; "
            f"write px.{verb}(…, px.Axis('clients', 8))"
        )
    if not declared:
        missing = "no axis was given" if axis is None else f"axis {axis!r} is only a name"
        name = axis or "clients"
        raise ScopeError(
            f"{verb}: {missing}, and this is not inside a program. Either pass the axis itself, "
            f"px.{verb}(…, px.Axis({name!r}, 8)), or call the verb in a function decorated with "
            f"@px.program({name}=8)"
        )
    if axis is None:
        if len(declared) == 1:
            return declared[0]
        raise ScopeError(
            f"{verb}: this program has several axes, {_names(declared)}; say which: px.{verb}(…, {declared[-1].name!r})"
        )
    for known in declared:
        if known.name == axis:
            return known
    raise ScopeError(
        f"{verb}: no axis {axis!r} in this program, which has {_names(declared)}; "
        f"write px.{verb}(…, {declared[0].name!r})"
    )


def mapped_axis(collective: str, axis: Axis | str) -> Axis:
    """Return the axis, whose body is being traced, that a collective is to combine along.

    Raises:
        CollectiveError: if no such axis is being mapped here.
    """
    name = axis.name if isinstance(axis, Axis) else axis
    mapped = current().mapped
    for known in reversed(mapped):
        if known.name == name and isinstance(axis, Axis) and axis.size != known.size:
            raise CollectiveError(
                f"{collective}: axis {name!r} is mapped here with {known.size} elements, not {axis.size}; write "
                f"px.{collective}(…, {name!r})"
            )
        if known.name == name:
            return known
    where = f"the axes being mapped are {_names(mapped)}" if mapped else "nothing is being mapped"
    raise CollectiveError(
        f"{collective}: axis {name!r} is not being mapped here ({where}). Collectives belong inside the function "
        f"given to px.map_fn or px.pmap; on a placed value write px.reduce_sum(x, {name!r})"
    )


def _names(axes: tuple[Axis, ...]) -> str:
    return ", ".join(repr(a.name) for a in axes)
