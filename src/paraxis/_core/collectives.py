"""Values exchanged between the elements of an axis, inside a mapped function.

A mapped function is traced with the axis's name bound to the whole logical axis, however many elements share a
device. So the collectives here, and those of ``jax.lax`` by the same name, say the same thing. When the body is
run, each collective over that name is carried out over the elements of a device and over the devices, with padding
masked away; one that cannot be is an error. None is ever partial.

Derivatives are those of ``jax.vmap``: the transpose of a sum over all elements is a sum over all elements.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._axes import layout, scope
from paraxis._axes.axis import Axis
from paraxis._axes.placing import Placement
from paraxis._calls import pytrees
from paraxis._core import primitives
from paraxis._jax import extremes, from_rows, jax_api, varying
from paraxis.errors import CollectiveError

# --- what a body writes ------------------------------------------------------------------------------------------

_Tree = TypeVar("_Tree")


def psum(x: _Tree, axis: Axis | str) -> _Tree:
    """Sum over all elements of an axis; every element gets the result.

    Args:
        x: pytree of arrays, any shape, one value per element.
        axis: the axis that is being mapped, or its name.

    Returns:
        Tree of the same shapes; booleans and integers as in ``jax.lax.psum``.

    Raises:
        CollectiveError: if called outside a function that is mapped along that axis.

    Communicates: one all-reduce the size of ``x``; none if the axis lies within one device.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> rows = px.Axis("rows", 3)
        >>> px.map_fn(lambda x: x / px.psum(x, rows), jnp.array([1.0, 1.0, 2.0]), rows)
        Array([0.25, 0.25, 0.5 ], dtype=float32)
    """
    return _exchanged("psum", x, axis)


def pmean(x: _Tree, axis: Axis | str) -> _Tree:
    """Average over all elements of an axis; every element gets the result. See :func:`psum`.

    Communicates: one all-reduce the size of ``x``.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> rows = px.Axis("rows", 3)
        >>> px.map_fn(lambda x: px.pmean(x, rows), jnp.array([1.0, 2.0, 6.0]), rows)
        Array([3., 3., 3.], dtype=float32)
    """
    return _exchanged("pmean", x, axis)


def pmax(x: _Tree, axis: Axis | str) -> _Tree:
    """Return the largest value over all elements of an axis to every element. See :func:`psum`.

    Like ``jax.lax.pmax``, it has no derivative; if you need one, reduce after the map with ``px.reduce_max``.

    Communicates: one all-reduce the size of ``x``.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> rows = px.Axis("rows", 3)
        >>> px.map_fn(lambda x: px.pmax(x, rows), jnp.array([1, 7, 3]), rows)
        Array([7, 7, 7], dtype=int32)
    """
    return _exchanged("pmax", x, axis)


def pmin(x: _Tree, axis: Axis | str) -> _Tree:
    """Return the smallest value over all elements of an axis to every element. See :func:`pmax`.

    Communicates: one all-reduce the size of ``x``.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> rows = px.Axis("rows", 3)
        >>> px.map_fn(lambda x: px.pmin(x, rows), jnp.array([1, 7, 3]), rows)
        Array([1, 1, 1], dtype=int32)
    """
    return _exchanged("pmin", x, axis)


def all_gather(x: _Tree, axis: Axis | str) -> _Tree:
    """Return the values of all elements, in order, to every element: ``(...)`` → ``(size, ...)``. See :func:`psum`.

    Communicates: one all-gather the size of ``size`` times ``x``.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> rows = px.Axis("rows", 3)
        >>> px.map_fn(lambda x: px.all_gather(x, rows), jnp.array([1, 2, 3]), rows)[0]
        Array([1, 2, 3], dtype=int32)
    """
    return _exchanged("all_gather", x, axis)


def axis_index(axis: Axis | str) -> jax.Array:
    """Return this element's index along the axis, an int32 scalar from 0 to ``size - 1``, without communication.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> rows = px.Axis("rows", 3)
        >>> px.map_fn(lambda x: x + px.axis_index(rows), jnp.zeros(3, int), rows)
        Array([0, 1, 2], dtype=int32)
    """
    return jax.lax.axis_index(scope.mapped_axis("axis_index", axis).name)


def axis_size(axis: Axis | str) -> int:
    """Return the number of elements of the axis that is being mapped, a Python integer, without communication.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> rows = px.Axis("rows", 3)
        >>> px.map_fn(lambda x: x / px.axis_size(rows), jnp.array([3.0, 6.0, 9.0]), rows)
        Array([1., 2., 3.], dtype=float32)
    """
    return scope.mapped_axis("axis_size", axis).size


def _exchanged(collective: str, x: Any, axis: Axis | str) -> Any:
    """JAX's collective of that name. Python's numbers stay such: their sum is known without a program."""
    x = pytrees.sealed(x)
    x = jax.tree.map(lambda leaf: jnp.asarray(leaf) if isinstance(leaf, bool) else leaf, x)
    return pytrees.opened(getattr(jax.lax, collective)(x, scope.mapped_axis(collective, axis).name))


# --- what a device runs ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The ways in which elements of a logical axis reach each other from inside the body.

    ``local`` names the elements of one device under ``vmap``, if there are several.
    """

    placement: Placement
    local: str | None

    @classmethod
    def of(cls, placement: Placement) -> "Exchange":
        return cls(placement, f"{placement.axis.name}.local" if placement.num_local > 1 else None)

    def index(self) -> jax.Array:
        first = jnp.asarray(layout.device_index(self.placement), np.int32) * self.placement.num_local
        return first if self.local is None else first + jax.lax.axis_index(self.local)

    def masked(self, kind: str, x: jax.Array) -> jax.Array:
        if not self.placement.is_padded:
            return x
        return jnp.where(self.index() < self.placement.size, x, primitives.identity(kind, x.dtype))

    def reduced(self, kind: str, x: jax.Array, across: tuple[str, ...]) -> jax.Array:
        """First over the elements of the device, then over the devices and whatever other axes were named.

        Not in one: on Explicit meshes JAX's own rule for a reduction over vmapped and mesh axes at once fails.
        """
        fold, within, identity = _REDUCTIONS[kind]
        x = self.masked(identity, jnp.asarray(x))  # a constant of the body may be a number of Python's
        if self.local is not None:
            x = within(jax.lax.all_gather(x, self.local), axis=0).astype(x.dtype)
        return fold(x, across) if across else x

    def gathered(self, x: jax.Array) -> jax.Array:
        rows = x[None] if self.local is None else jax.lax.all_gather(x, self.local)
        if self.placement.crossed_axes:
            rows = jax.lax.all_gather(rows, self.placement.crossed_axes, tiled=True)
        return rows[: self.placement.size]


def lifted(body: jax_api.ClosedJaxpr, mapped: Sequence[Axis]) -> jax_api.ClosedJaxpr:
    """Return the same body with the logical axes under names that no mesh axis has.

    A mesh axis may be called as a logical one, which has another size. Where a ``shard_map`` binds it, the name means
    the mesh axis; so a map nested in this one could neither be traced nor told apart from real exchange.
    """
    names = {axis.name: logical(axis.name) for axis in mapped}
    if not _mentions(body.jaxpr, frozenset(names)):
        return body

    def run(*args: Any) -> list[Any]:
        return _renamed(body, args, names)

    return jax_api.trace(run, body.in_avals, sizes(mapped))[0]


def differentiable(body: jax_api.ClosedJaxpr, mapped: Sequence[Axis], varies: Sequence[bool]) -> jax_api.ClosedJaxpr:
    """Return the body without what has no right transpose by itself: untiled ``all_to_all``, and uneven branches.

    An element that takes another branch than one that sums over all is in that sum too. So its value, and with it its
    derivative, comes from a branch that it does not take: all take each, and keep what their own gives.
    """
    known = {axis.name: axis.size for axis in mapped}
    apart: frozenset[int] = frozenset()
    for axis in mapped:  # of another than the innermost, even shared values may differ
        apart |= uneven(body.jaxpr, varies if axis is mapped[-1] else [True] * len(varies), axis.name)
    if not apart and not jax_api.holds(body.jaxpr, "all_to_all"):
        return body

    def changes(jaxpr: jax_api.Jaxpr) -> bool:
        return jax_api.holds(jaxpr, "all_to_all") or varying.contains(jaxpr, apart)

    def run(body: jax_api.ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        def special(eqn: jax_api.JaxprEqn, operands: Sequence[Any]) -> Sequence[Any] | None:
            if id(eqn) in apart and eqn.primitive.name == "cond":
                return varying.in_step(eqn, operands, run, jnp.asarray)
            if any(changes(sub) for sub in jax_api.subjaxprs(eqn)) and eqn.primitive.name != "px_map":
                return _rebind(eqn, operands, run)
            name = named_axes(eqn)[0] if eqn.primitive.name == "all_to_all" else None
            if name not in known or eqn.params.get("axis_index_groups") is not None:
                return None
            rows = jax.lax.all_gather(operands[0], name)
            return [from_rows.all_to_all(rows, jax.lax.axis_index(name), size=known[name], **eqn.params)]

        return jax_api.evaluate(body, args, lambda _: False, special)

    return jax_api.trace(lambda *args: run(body, args), body.in_avals, sizes(mapped))[0]


def sizes(mapped: Sequence[Axis]) -> dict[str, int]:
    """Return the names by which a body and those nested in it mean logical axes; the innermost of equal ones counts."""
    return {name: axis.size for axis in mapped for name in (axis.name, logical(axis.name))}


def logical(name: str) -> str:
    return f"{name}.elements"


def _renamed(body: jax_api.ClosedJaxpr, args: Sequence[Any], names: Mapping[str, str]) -> list[Any]:
    def special(eqn: jax_api.JaxprEqn, operands: Sequence[Any]) -> Sequence[Any] | None:
        if not names.keys().isdisjoint(named_axes(eqn)):
            key = "axes" if "axes" in eqn.params else "axis_name"
            old = eqn.params[key]
            new = names[old] if isinstance(old, str) else tuple(names.get(axis, axis) for axis in old)
            return jax_api.bind(eqn, {**eqn.params, key: new}, operands)
        inside = {name: new for name, new in names.items() if name not in _bound(eqn)}
        if any(_mentions(sub, frozenset(inside)) for sub in jax_api.subjaxprs(eqn)):
            return _rebind(eqn, operands, lambda body, args: _renamed(body, args, inside))
        return None

    return jax_api.evaluate(body, args, lambda _: False, special)


def used(jaxpr: jax_api.Jaxpr, placement: Placement) -> bool:
    """Return whether a lifted body exchanges values along an axis.

    Raises:
        CollectiveError: if it does so by the name of a mesh axis that carries it, which would leave out the other
            elements of each device.
    """
    return _checked(jaxpr, placement, placement.mesh_axes, logical(placement.axis.name))


def exchanges(jaxpr: jax_api.Jaxpr, placement: Placement, mapped: Sequence[Axis]) -> bool:
    """Return whether a body that is not lifted exchanges; there names of mapped axes hide those of mesh axes."""
    logical = {axis.name for axis in mapped}
    hidden = [name for name in placement.mesh_axes if name not in logical]
    return _checked(jaxpr, placement, hidden, placement.axis.name)


def _checked(jaxpr: jax_api.Jaxpr, placement: Placement, refused: Sequence[str], sought: str) -> bool:
    name = placement.axis.name
    for hidden in refused:
        if _mentions(jaxpr, frozenset([hidden])):
            raise CollectiveError(
                f"a collective inside the body names the mesh axis {hidden!r}, which carries the elements of axis "
                f"{name!r}: it would miss those that share a device. Write px.psum(x, {name!r}), or the like"
            )
    return _mentions(jaxpr, frozenset([sought]))


def mentions(jaxpr: jax_api.Jaxpr, axis: Axis) -> bool:
    """Return whether a body, not lifted, exchanges values along an axis."""
    return _mentions(jaxpr, frozenset([axis.name]))


def named_in(eqn: jax_api.JaxprEqn, names: Set[str]) -> bool:
    """Return whether an equation, or one inside it, names one of the axes."""
    return not names.isdisjoint(named_axes(eqn)) or any(
        _mentions(sub, frozenset(names)) for sub in jax_api.subjaxprs(eqn)
    )


def nests(eqn: jax_api.JaxprEqn) -> bool:
    """Return whether an equation, or one inside it, lays something out over a mesh."""
    is_laid = eqn.primitive.name in ("shard_map", "sharding_constraint", "reshard")
    if eqn.primitive.name == "px_map":
        is_laid = bool(eqn.params["how"].placement.mesh_axes)
    return is_laid or any(any(map(nests, sub.eqns)) for sub in jax_api.subjaxprs(eqn))


def _mentions(jaxpr: jax_api.Jaxpr, names: frozenset[str]) -> bool:
    return any(
        not names.isdisjoint(named_axes(eqn))
        or any(_mentions(sub, names - _bound(eqn)) for sub in jax_api.subjaxprs(eqn))
        for eqn in jaxpr.eqns
    )


def _bound(eqn: jax_api.JaxprEqn) -> frozenset[str]:
    """Return the names that mean another axis inside an equation's body."""
    if eqn.primitive.name == "px_map":
        return frozenset([eqn.params["axis"]])
    return jax_api.bound_axes(eqn) if eqn.primitive.name == "shard_map" else frozenset()


def named_axes(eqn: jax_api.JaxprEqn) -> tuple[Any, ...]:
    """Return the names of axes, and the numbers of dimensions, over which an equation works."""
    if eqn.primitive.name == "shard_map":
        return ()
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)


def uneven(jaxpr: jax_api.Jaxpr, varies: Sequence[bool], name: str) -> frozenset[int]:
    """Return the loops and branches, by ``id``, with exchange along an axis where its elements may part."""
    if not _mentions(jaxpr, frozenset([name])):
        return frozenset()

    def exchanged(eqn: jax_api.JaxprEqn) -> bool | None:
        return eqn.primitive.name not in (*_REDUCTIONS, "all_gather") if name in named_axes(eqn) else None

    return varying.uneven(jaxpr, varies, exchanged)


def evaluate(jaxpr: jax_api.ClosedJaxpr, args: Sequence[Any], exchange: Exchange, uneven: frozenset[int]) -> list[Any]:
    """Run a lifted body with each collective over the logical axis carried out over the real ones.

    Where elements exchange values, all take part: in every branch, and until the last of them leaves a loop, as under
    ``vmap``. Devices that went different ways would wait for each other forever.
    """
    name = logical(exchange.placement.axis.name)

    def special(eqn: jax_api.JaxprEqn, operands: Sequence[Any]) -> Sequence[Any] | None:
        if name in named_axes(eqn):
            return _carry_out(eqn, operands, exchange)
        if any(_mentions(sub, frozenset([name])) for sub in jax_api.subjaxprs(eqn)):
            if id(eqn) in uneven:
                return varying.in_step(eqn, operands, run, anyone)
            return _rebind(eqn, operands, run)
        return None

    def run(body: jax_api.ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        return evaluate(body, args, exchange, uneven)

    def anyone(asks: jax.Array) -> jax.Array:
        return exchange.reduced("pmax", jnp.asarray(asks, np.int32), exchange.placement.crossed_axes) > 0

    return jax_api.evaluate(jaxpr, args, lambda _: False, special)


def _rebind(eqn: jax_api.JaxprEqn, operands: Sequence[Any], change: Callable[..., list[Any]]) -> Sequence[Any]:
    """Return a loop, branch or call whose body communicates: the same, with its body run by ``change(body, args)``."""
    if eqn.primitive.name.startswith(("custom_jvp", "custom_vjp")):
        raise CollectiveError(
            f"a collective over a mapped axis stands inside a function with a derivative of its own "
            f"({eqn.primitive.name}), where it cannot be carried out; move it out of that function"
        )
    if eqn.primitive.name == "shard_map":
        return jax_api.rebind_shard_map(eqn, change, operands)

    def changed(body: jax_api.ClosedJaxpr) -> jax_api.ClosedJaxpr:
        return jax_api.trace(lambda *args: change(body, args), body.in_avals, {})[0]

    return jax_api.bind(eqn, jax_api.map_jaxprs(eqn.params, changed), operands)


def _carry_out(eqn: jax_api.JaxprEqn, operands: Sequence[Any], exchange: Exchange) -> Sequence[Any]:
    kind, params = eqn.primitive.name, eqn.params
    name, size = exchange.placement.axis.name, exchange.placement.size
    require_whole(eqn, name)
    if kind in _REDUCTIONS:
        ours, real = logical(name), exchange.placement.crossed_axes
        across = tuple(other for axis in named_axes(eqn) for other in (real if axis == ours else (axis,)))
        with jax_api.from_its_line(eqn):
            return [exchange.reduced(kind, x, across) for x in operands]
    if kind == "axis_index":
        return [exchange.index()]
    if len(named_axes(eqn)) == 1 and kind in from_rows.BY_NAME:
        with jax_api.from_its_line(eqn):
            rows = exchange.gathered(operands[0])
        return [from_rows.BY_NAME[kind](rows, exchange.index(), size=size, **params)]
    raise CollectiveError(
        f"{kind} over axis {name!r} is not defined here; use px.psum, px.pmean, px.pmax, px.pmin or px.all_gather"
    )


def require_whole(eqn: jax_api.JaxprEqn, name: str) -> None:
    """Refuse an exchange between some of an axis's elements, by a CollectiveError with what to write instead."""
    if (groups := eqn.params.get("axis_index_groups")) is not None:
        at = f", at {line}" if (line := jax_api.line_of(eqn)) else ""
        count, each = len(groups), len(groups[0])
        raise CollectiveError(
            f"{eqn.primitive.name} with axis_index_groups is not defined on axis {name!r}{at}: all elements take "
            f"part. Make two axes, groups = px.Axis('groups', {count}) and members = px.Axis({name!r}, {each}), one "
            f"in the other: px.map_fn(lambda x: px.map_fn(fn, x, members), x.reshape({count}, {each}, …), groups)"
        )


_REDUCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any], str]] = {
    "psum": (jax.lax.psum, jnp.sum, "sum"),
    "pmax": (extremes.pmax, jnp.max, "max"),
    "pmin": (extremes.pmin, jnp.min, "min"),
}
