"""Values exchanged between the elements of an axis, inside a mapped function.

A mapped function is traced with the axis's name bound to the whole logical axis, however many elements share a device.
So the collectives here, and those of ``jax.lax`` by the same name, say the same thing. None is ever partial.

Derivatives are those of ``jax.vmap``: the transpose of a sum over all elements is a sum over all elements.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from paraxis._core import jax_api, primitives, pytrees, scope
from paraxis._core.axis import Axis
from paraxis._core.placing import Placement
from paraxis.errors import AxisError

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
        AxisError: if called outside a function that is mapped along that axis.

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

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> rows = px.Axis("rows", 3)
        >>> px.map_fn(lambda x: px.pmean(x, rows), jnp.array([1.0, 2.0, 6.0]), rows)
        Array([3., 3., 3.], dtype=float32)
    """
    return _exchanged("pmean", x, axis)


def pmax(x: _Tree, axis: Axis | str) -> _Tree:
    """Return the largest value over all elements of an axis to every element. See :func:`psum`.

    NaN wins. Like ``jax.lax.pmax``, it has no derivative; if you need one, reduce after the map: ``px.reduce_max``.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> rows = px.Axis("rows", 3)
        >>> px.map_fn(lambda x: px.pmax(x, rows), jnp.array([1.0, 2.0, 6.0]), rows)
        Array([6., 6., 6.], dtype=float32)
    """
    return _exchanged("pmax", x, axis)


def pmin(x: _Tree, axis: Axis | str) -> _Tree:
    """Return the smallest value over all elements of an axis to every element. See :func:`pmax`.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> rows = px.Axis("rows", 3)
        >>> px.map_fn(lambda x: px.pmin(x, rows), jnp.array([1.0, 2.0, 6.0]), rows)
        Array([1., 1., 1.], dtype=float32)
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
        >>> px.map_fn(lambda x: x + px.axis_index(rows), jnp.array([1.0, 2.0, 6.0]), rows)
        Array([1., 3., 8.], dtype=float32)
    """
    return jax.lax.axis_index(scope.mapped_axis("axis_index", axis).name)


def axis_size(axis: Axis | str) -> int:
    """Return the number of elements of the axis that is being mapped, a Python integer, without communication.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> rows = px.Axis("rows", 3)
        >>> px.map_fn(lambda x: x / px.axis_size(rows), jnp.array([1.0, 2.0, 6.0]), rows)
        Array([0.33333334, 0.6666667 , 2.        ], dtype=float32)
    """
    return scope.mapped_axis("axis_size", axis).size


def _exchanged(collective: str, x: Any, axis: Axis | str) -> Any:
    """JAX's collective of that name. Python's numbers stay such: their sum is known without a program."""
    name = scope.mapped_axis(collective, axis).name
    x = jax.tree.map(lambda leaf: jnp.asarray(leaf) if isinstance(leaf, bool) else leaf, pytrees.sealed(x))
    if collective in ("pmax", "pmin"):
        return pytrees.opened(jax.tree.map(lambda leaf: primitives.across(jnp.asarray(leaf), collective, name), x))
    return pytrees.opened(getattr(jax.lax, collective)(x, name))


# --- what a body names -------------------------------------------------------------------------------------------


def mentions(jaxpr: jax_api.Jaxpr, axis: Axis) -> bool:
    """Return whether a body exchanges values along an axis."""
    return any(jax_api.axis_of(effect) == axis.name for effect in jaxpr.effects)


def parts(jaxpr: jax_api.Jaxpr, name: str) -> bool:
    """Return whether a body exchanges values in a branch or a loop, which elements may leave apart."""
    return any(
        (eqn.primitive.name in ("cond", "while") and any(jax_api.axis_of(e) == name for e in eqn.effects))
        or any(parts(sub, name) for sub in jax_api.subjaxprs(eqn))
        for eqn in jaxpr.eqns
    )


def require_no_mesh_axis(jaxpr: jax_api.Jaxpr, placement: Placement, mapped: Sequence[Axis]) -> None:
    """Refuse a body that names a mesh axis under its elements; names of mapped axes hide those of mesh axes.

    Raises:
        AxisError: if it does so, which would leave out the other elements of each device.
    """
    name = placement.axis.name
    for effect in jaxpr.effects:
        hidden = jax_api.axis_of(effect)
        if hidden in placement.mesh_axes and all(axis.name != hidden for axis in mapped):
            raise AxisError(
                f"a collective inside the body names the mesh axis {hidden!r}, which carries the elements of axis "
                f"{name!r}: it would miss those that share a device. Write px.psum(x, {name!r}), or the like"
            )
