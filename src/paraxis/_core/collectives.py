"""Values exchanged between the elements of an axis, inside a mapped function, and what may differ between elements.

A body is traced with the axis's name bound to the whole logical axis, however many elements share a device. So these
collectives, and those of ``jax.lax`` by the same name, say the same thing, and none is ever partial. Derivatives are
those of ``jax.vmap``: the transpose of a sum over all elements is a sum over all elements.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from paraxis._core import jax_api, primitives, pytrees
from paraxis._core.jax_api import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var
from paraxis._core.placing import Axis, Placement, mapped_axis
from paraxis.errors import AxisError

# --- what a body writes ------------------------------------------------------------------------------------------

_Tree = TypeVar("_Tree")


def psum(x: _Tree, axis: Axis | str) -> _Tree:
    """Sum a pytree of arrays over all elements of an axis that is being mapped; every element gets the result.

    Shapes stay; booleans and integers are summed as in ``jax.lax.psum``.

    Raises:
        AxisError: if called outside a function that is mapped along that axis.

    Communicates: one all-reduce the size of ``x``; none if the axis lies within one device.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.map_fn(lambda x: x / px.psum(x, "rows"), jnp.array([1.0, 1.0, 2.0]), px.Axis("rows", 3))
        Array([0.25, 0.25, 0.5 ], dtype=float32)
    """
    return _exchanged("psum", x, axis)


def pmean(x: _Tree, axis: Axis | str) -> _Tree:
    """Average over all elements of an axis; every element gets the result. See :func:`psum`.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.map_fn(lambda x: px.pmean(x, "rows"), jnp.array([1.0, 2.0, 6.0]), px.Axis("rows", 3))
        Array([3., 3., 3.], dtype=float32)
    """
    return _exchanged("pmean", x, axis)


def pmax(x: _Tree, axis: Axis | str) -> _Tree:
    """Return the largest value over all elements of an axis to every element. See :func:`psum`.

    NaN wins. Like ``jax.lax.pmax``, it has no derivative; if you need one, reduce after the map: ``px.reduce_max``.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.map_fn(lambda x: px.pmax(x, "rows"), jnp.array([1.0, 2.0, 6.0]), px.Axis("rows", 3))
        Array([6., 6., 6.], dtype=float32)
    """
    return _exchanged("pmax", x, axis)


def pmin(x: _Tree, axis: Axis | str) -> _Tree:
    """Return the smallest value over all elements of an axis to every element. See :func:`pmax`.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.map_fn(lambda x: px.pmin(x, "rows"), jnp.array([1.0, 2.0, 6.0]), px.Axis("rows", 3))
        Array([1., 1., 1.], dtype=float32)
    """
    return _exchanged("pmin", x, axis)


def all_gather(x: _Tree, axis: Axis | str) -> _Tree:
    """Return the values of all elements, in order, to every element: ``(...)`` → ``(size, ...)``. See :func:`psum`.

    Communicates: one all-gather the size of ``size`` times ``x``.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.map_fn(lambda x: px.all_gather(x, "rows"), jnp.array([1, 2, 3]), px.Axis("rows", 3))[0]
        Array([1, 2, 3], dtype=int32)
    """
    return _exchanged("all_gather", x, axis)


def axis_index(axis: Axis | str) -> jax.Array:
    """Return this element's index along the axis, an int32 scalar from 0 to ``size - 1``, without communication.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.map_fn(lambda x: x + px.axis_index("rows"), jnp.array([1.0, 2.0, 6.0]), px.Axis("rows", 3))
        Array([1., 3., 8.], dtype=float32)
    """
    return jax.lax.axis_index(mapped_axis("axis_index", axis).name)


def axis_size(axis: Axis | str) -> int:
    """Return the number of elements of the axis that is being mapped, a Python integer, without communication.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.map_fn(lambda x: x / px.axis_size("rows"), jnp.array([3.0, 6.0, 9.0]), px.Axis("rows", 3))
        Array([1., 2., 3.], dtype=float32)
    """
    return mapped_axis("axis_size", axis).size


def _exchanged(collective: str, x: Any, axis: Axis | str) -> Any:
    """JAX's collective of that name. Python's numbers stay such: their sum is known without a program."""
    name = mapped_axis(collective, axis).name
    x = jax.tree.map(lambda leaf: jnp.asarray(leaf) if isinstance(leaf, bool) else leaf, pytrees.sealed(x))
    if collective in ("pmax", "pmin"):
        return pytrees.opened(jax.tree.map(lambda leaf: primitives.across(jnp.asarray(leaf), collective, name), x))
    return pytrees.opened(getattr(jax.lax, collective)(x, name))


# --- what a body names -------------------------------------------------------------------------------------------


def mentions(jaxpr: Jaxpr, axis: Axis) -> bool:
    """Return whether a body exchanges values along an axis."""
    return any(jax_api.axis_of(effect) == axis.name for effect in jaxpr.effects)


def parts(jaxpr: Jaxpr, name: str, *kinds: str) -> bool:
    """Return whether elements exchange values inside operations of these kinds, which they may leave apart."""
    return any(
        (eqn.primitive.name in kinds and _exchanges(eqn, name))
        or any(parts(sub, name, *kinds) for sub in jax_api.subjaxprs(eqn))
        for eqn in jaxpr.eqns
    )


def _exchanges(eqn: JaxprEqn, name: str) -> bool:
    if name in jax_api.named_axes(eqn) and eqn.primitive.name != "axis_index":
        return True
    return any(_exchanges(inner, name) for sub in jax_api.subjaxprs(eqn) for inner in sub.eqns)


def require_no_mesh_axis(jaxpr: Jaxpr, placement: Placement, mapped: Sequence[Axis]) -> None:
    """Refuse a body that names a mesh axis under its elements; names of mapped axes hide those of mesh axes."""
    name = placement.axis.name
    for hidden in map(jax_api.axis_of, jaxpr.effects):
        if hidden in placement.mesh_axes and all(axis.name != hidden for axis in mapped):
            raise AxisError(
                f"a collective inside the body names the mesh axis {hidden!r}, which carries the elements of axis "
                f"{name!r}: it would miss those that share a device. Write px.psum(x, {name!r}), or the like"
            )


# --- what differs between elements -------------------------------------------------------------------------------

_watch_p = Primitive("px_watch")  # the identity, which calls `note` under vmap with which operands are batched
_watch_p.multiple_results = True
_watch_p.def_abstract_eval(lambda *avals, note: avals)


def _watched(operands: Sequence[Any], dims: Sequence[Any], *, note: Callable[[list[bool]], None]) -> Any:
    note([dim is not None for dim in dims])
    return operands, dims


jax_api.batching.primitive_batchers[_watch_p] = _watched


def watched(x: Any, index: jax.Array, note: Callable[[list[bool]], None]) -> Any:
    """Return ``x`` in a function under ``vmap``, which calls ``note`` with which leaves may differ between elements.

    ``index``, the element's number, does differ: this vmap, and not one around it, then answers.
    """
    leaves, structure = jax.tree.flatten(x)
    return jax.tree.unflatten(structure, _watch_p.bind(index, *leaves, note=lambda differ: note(differ[1:]))[1:])


def batched(
    body: ClosedJaxpr, in_axes: Sequence[int | None], size: int, name: str | None, names: Mapping[str, int]
) -> list[bool]:
    """Return, for each result of a body: whether it may differ along the batch in which these arguments do."""
    found: list[bool] = []

    def one(index: jax.Array, *args: Any) -> list[Any]:
        return watched(list(jax_api.jaxpr_as_fun(body)(*args)), index, found.extend)

    avals = [
        jax.ShapeDtypeStruct(a.shape if at is None else (size, *a.shape), a.dtype, weak_type=a.weak_type)
        for a, at in zip(body.in_avals, in_axes, strict=True)
    ]
    over = jax.vmap(one, in_axes=(0, *in_axes), axis_size=size, axis_name=name)
    jax_api.trace(over, [jax.ShapeDtypeStruct((size,), jnp.int32), *avals], names)
    return found


def differing(jaxpr: Jaxpr, shared: Sequence[bool]) -> set[Any]:
    """Return the variables that may differ between elements."""
    found = {v for v, is_shared in zip(jaxpr.invars, shared, strict=True) if not is_shared}
    for eqn in jaxpr.eqns:
        if eqn.effects or any(v in found for v in eqn.invars if not isinstance(v, Literal)):
            found.update(eqn.outvars)
    return found


def refuse_uneven(body: ClosedJaxpr, shared: Sequence[bool], axis: Axis, names: Mapping[str, int]) -> None:
    """Refuse the derivative of a body whose elements exchange values in a branch that they may take apart.

    All elements take part in an exchange, and each keeps what its own branch gives. The transpose of a branch is a
    branch: an element that does not take it sends nothing back to the others, so JAX's derivative is not the
    function's. Values, forward derivatives, loops, and branches that all take alike are right.
    """
    if parts(body.jaxpr, axis.name, "cond"):
        marked = ClosedJaxpr(_marked(body.jaxpr, axis.name), body.consts)
        batched(marked, [None if s else 0 for s in shared], axis.size, axis.name, names)


def _marked(jaxpr: Jaxpr, name: str) -> Jaxpr:
    """Return the same jaxpr, which is an error under a vmap that takes an exchanging branch apart."""
    eqns = list[JaxprEqn]()
    for each in jaxpr.eqns:
        eqn = each.replace(params=jax_api.map_jaxprs(each.params, lambda sub: _marked(sub, name)))
        if eqn.primitive.name == "cond" and _exchanges(eqn, name):
            taken, *args = eqn.invars
            seen, params = Var(taken.aval), {"note": functools.partial(_refuse, eqn, name)}
            mark = eqn.replace(primitive=_watch_p, invars=[taken], outvars=[seen], params=params, effects=set())
            eqns += [mark, eqn.replace(invars=[seen, *args])]
        else:
            eqns.append(eqn)
    return jaxpr.replace(eqns=eqns)


def _refuse(eqn: JaxprEqn, name: str, _: list[bool]) -> None:
    at = f", at {line}" if (line := jax_api.line_of(eqn)) else ""
    raise AxisError(
        f"elements of axis {name!r} exchange values in a branch that each takes by itself{at}: its derivative "
        f"in JAX is not the function's. Exchange before the branch, or choose a result: jnp.where(taken, a, b)"
    )
