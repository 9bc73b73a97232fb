"""A program: a function with axes of its own, by whose names the verbs inside it go.

It reduces to the core in one step: while the function is traced, its axes are the declared ones of the scope.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, SupportsIndex

import jax
import numpy as np

from paraxis._core import held, layout, scope
from paraxis._core.axis import Axis
from paraxis._core.errors import AxisError, ShapeError


def program(
    placements: Mapping[str, SupportsIndex | Axis] | None = None, **axes: SupportsIndex | Axis
) -> Callable[[Callable[..., Any]], "Program"]:
    """Declare the axes of a function, so that the verbs inside it may leave them out or name them.

    Args:
        placements: axes and their sizes, outermost first. A size, or a ``px.Axis`` of that name for one with wishes.
        **axes: the same, as keywords: ``@px.program(pods=4, clients=250)``.

    Returns:
        A decorator that makes the function a :class:`Program`.

    Raises:
        AxisError: if no axis, or a malformed one, is given.

    Where the axes lie: as :class:`paraxis.Axis` says for each, if a mesh is set. With no mesh and several axes, the
    devices are shared out: of all ways to write their number as a product, one factor per axis, the one in which the
    busiest device runs the fewest elements; ties go to the outermost axis. ``repr`` shows the result.

    Example:
        >>> import jax, jax.numpy as jnp, paraxis as px
        >>> @px.program(clients=4)
        ... def loss(w, x):
        ...     return px.reduce_mean(px.map_fn(lambda w, x: (w * x - 1) ** 2, (px.broadcast(w), x)))
        >>> jax.grad(loss)(2.0, jnp.array([0.0, 1.0, 2.0, 1.0]))
        Array(4., dtype=float32, weak_type=True)
    """
    if placements is not None and not isinstance(placements, Mapping):
        got = "the function itself" if callable(placements) else repr(placements)
        raise AxisError(f"program: its axes must be given by name, got {got}; write @px.program(clients=8)")
    declared = {**(placements or {}), **axes}
    if not declared:
        raise AxisError("program: no axis was given; write @px.program(clients=8)")
    made = tuple(_axis(name, size) for name, size in declared.items())
    return lambda fn: Program(fn, made)


class Program:
    """A function whose axes are declared; made by :func:`program`.

    It is an ordinary JAX function: it may be called, jitted, differentiated, vmapped, nested, and run from any
    thread. It is compiled once per shape, as by ``jax.jit``: numbers and arrays are traced; booleans, strings,
    ``None`` and functions among the arguments are constants.
    """

    def __init__(self, fn: Callable[..., Any], axes: tuple[Axis, ...]) -> None:
        functools.update_wrapper(self, fn)
        self.axes = axes
        self._fn = fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, structure = jax.tree.flatten((args, kwargs))
        static = tuple(not _is_traced(leaf) for leaf in leaves)
        _check_constants(self._fn, args, kwargs)
        constants = tuple(leaf for leaf, fixed in zip(leaves, static, strict=True) if fixed)
        traced = [leaf for leaf, fixed in zip(leaves, static, strict=True) if not fixed]
        declared = share_out(self.axes)
        call = (self._fn, structure, static, constants, scope.Scope(declared, scope.current().mapped))
        placement = layout.place(declared[0])
        settled = [layout.settle(leaf, placement, rows=False) for leaf in traced]
        if placement.mesh is None or placement.mesh.size == 1:  # of all axes, this one may be on one device
            return _run(call, *settled)
        # On CPU, several programs with collectives in flight can wait for each other for ever; a derivative is one.
        return held.ready(_run(call, *held.ready(settled)))

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __repr__(self) -> str:
        where = ", ".join(_where(axis) for axis in share_out(self.axes))
        return f"<program {getattr(self._fn, '__name__', 'fn')}: {where}>"


@functools.partial(jax.jit, static_argnums=0)
def _run(call: tuple[Any, ...], *traced: Any) -> Any:
    fn, structure, static, constants, inner = call
    fixed, given = iter(constants), iter(traced)
    args, kwargs = jax.tree.unflatten(structure, [next(fixed) if s else next(given) for s in static])
    with scope.entered(inner):
        return fn(*args, **kwargs)


def _check_constants(fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path((args, kwargs)):
        try:
            if not _is_traced(leaf):
                hash(leaf)
        except TypeError as error:
            which = "args" if path[0].idx == 0 else "kwargs"
            raise ShapeError(
                f"program {getattr(fn, '__name__', 'fn')}: {which}{jax.tree_util.keystr(path[1:])} is a "
                f"{type(leaf).__name__}, neither an array nor something that can be remembered by its hash; pass its "
                f"arrays, or a hashable description of it"
            ) from error


def _is_traced(leaf: Any) -> bool:
    return not isinstance(leaf, bool) and (isinstance(leaf, (int, float, complex, np.ndarray, np.generic, jax.Array)))


def share_out(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """Give several axes of a program one mesh, if there is none and they ask for none."""
    free = len(axes) > 1 and all(axis.mesh is None and axis.over is None for axis in axes)
    if not free or scope.current().mapped or not jax.sharding.get_abstract_mesh().empty:
        return axes
    devices = tuple(jax.devices())
    if len(devices) == 1:
        return axes
    mesh = layout.shared_mesh(tuple((axis.name, axis.size) for axis in axes), devices)
    return tuple(Axis(axis.name, axis.size, mesh=mesh, at_once=axis.at_once) for axis in axes)


def _axis(name: str, size: SupportsIndex | Axis) -> Axis:
    if not isinstance(size, Axis):
        return Axis(name, size)  # pyright: ignore[reportArgumentType]  (checked there)
    if size.name != name:
        raise AxisError(
            f"program: axis {name!r} was given as {size!r}, which has another name; "
            f"write @px.program({{{size.name!r}: …}})"
        )
    return size


def _where(axis: Axis) -> str:
    placement = layout.place(axis)
    devices = f"{placement.num_devices} device{'s' if placement.num_devices > 1 else ''}"
    turns = f", {placement.chunk} at once" if placement.num_chunks > 1 else ""
    return f"{axis.name}={axis.size} on {devices} ({placement.num_local} each{turns})"
