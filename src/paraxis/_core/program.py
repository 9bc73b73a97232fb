"""A program: a function with axes of its own, by whose names the verbs inside it go.

It reduces to the core in one step: while the function is traced, its axes are the declared ones of the scope.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, Self, SupportsIndex, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import arrays, check, jax_api, placing, pytrees, scope, structure
from paraxis._core.axis import Axis
from paraxis.errors import AxisError

_P = ParamSpec("_P")
_Q = ParamSpec("_Q")
_R = TypeVar("_R")


def program(
    placements: Mapping[str, SupportsIndex | Axis] | None = None, **axes: SupportsIndex | Axis
) -> Callable[[Callable[_P, _R]], "Program[_P, _R]"]:
    """Declare the axes of a function, so that the verbs inside it can refer to them by name or leave them out.

    Args:
        placements: names of axes, outermost first, each with its size, or with a ``px.Axis`` of that name.
        **axes: the same, as keywords: ``@px.program(pods=4, clients=250)``.

    Returns:
        A decorator that makes the function a :class:`Program`.

    Raises:
        AxisError: if there is no axis, or a malformed one.

    If a mesh is set, each axis lies as :class:`paraxis.Axis` says. Without a mesh, several axes divide the devices
    among them: of all ways to write the number of devices as a product, one factor per axis, the program takes the one
    in which the busiest device runs the fewest elements; ties go to the outermost axis. ``repr`` shows the result.

    Example:
        >>> import jax, jax.numpy as jnp, paraxis as px
        >>> @px.program(clients=4)
        ... def loss(w, x):
        ...     return px.reduce_mean(px.map_fn(lambda w, x: (w * x - 1) ** 2, (px.broadcast(w), x)))
        >>> jax.grad(loss)(2.0, jnp.array([0.0, 1.0, 2.0, 1.0]))
        Array(4., dtype=float32, weak_type=True)
    """
    if callable(placements):
        raise AxisError("program: placements must be a dict of axes and sizes; write @px.program(clients=8)")
    declared = {**(placements or {}), **axes}
    if not declared:
        raise AxisError("program: no axis was given; write @px.program(clients=8)")
    made = tuple(_axis(name, size) for name, size in declared.items())

    def decorate(fn: Callable[_P, _R]) -> "Program[_P, _R]":
        check.function("program", "fn", fn, "@px.program(clients=8) before a function")
        return Program(fn, made)

    return decorate


class Program(Generic[_P, _R]):
    """A function whose axes are declared; made by :func:`program`.

    It is an ordinary JAX function: you can call, jit, differentiate, vmap and nest it, and run it from any thread.
    Numbers and arrays among its arguments are traced; everything else is constant. Each call traces the function
    again, so values that it reads from outside may change, and reuses the program that was compiled for the same
    structure; put ``jax.jit`` around it to trace only once per shape.
    """

    def __init__(self, fn: Callable[_P, _R], axes: tuple[Axis, ...]) -> None:
        functools.update_wrapper(self, fn)
        self.axes = axes
        self._fn: Callable[..., _R] = fn

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        declared = share_out(self.axes)
        inner = dataclasses.replace(scope.current(), declared=declared)
        leaves, treedef = jax.tree.flatten(pytrees.sealed((args, kwargs)))
        if any(map(check.why_cut, leaves)):
            for argument, given in (("args", args), ("kwargs", kwargs)):
                check.no_cut(getattr(self._fn, "__name__", "program"), argument, given)
        is_traced = [_is_traced(leaf) for leaf in leaves]

        def run(*traced: Any) -> Any:
            given = iter(traced)
            whole = [next(given) if moves else leaf for leaf, moves in zip(leaves, is_traced, strict=True)]
            args, kwargs = pytrees.opened(jax.tree.unflatten(treedef, whole))
            with scope.entered(inner):
                return pytrees.sealed(self._fn(*args, **kwargs))

        vars(run)["__wrapped__"] = self._fn  # JAX's errors then name the user's function, and not this one
        placement = placing.place(declared[0])
        traced = [leaf for leaf, moves in zip(leaves, is_traced, strict=True) if moves]
        return pytrees.opened(_evaluated(run, [arrays.settle(leaf, placement, rows=False) for leaf in traced]))

    @overload
    def __get__(self, instance: None, owner: Any = None) -> Self: ...
    @overload
    def __get__(self: "Program[Concatenate[Any, _Q], _R]", instance: object, owner: Any = None) -> Callable[_Q, _R]: ...
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __repr__(self) -> str:
        where = ", ".join(_where(axis) for axis in share_out(self.axes))
        return f"<program {getattr(self._fn, '__name__', 'fn')}: {where}>"


def _evaluated(fn: Callable[..., Any], operands: Sequence[Any]) -> Any:
    """``fn(*operands)``, by a compiled program that is found by the structure of its trace.

    Where a function is traced to be compiled, its operations are noted there. Under ``grad``, ``jvp`` and ``vmap``, a
    trace with derivative rules of the user's, which the structure does not tell apart, is carried out operation by
    operation, each map by its own compiled program.
    """
    if isinstance(jnp.zeros(()), jax_api.Tracer):
        return fn(*operands)
    operands = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in operands]
    closed, out_tree = jax_api.trace(fn, [jax_api.struct(x) for x in operands], {})
    closed, consts = jax_api.without_constants(closed)
    closed, everything = jax_api.dce(closed)[0], [*consts, *operands]
    is_ruled = jax_api.holds(closed.jaxpr, "custom_jvp_call", "custom_vjp_call")
    run = jax_api.jaxpr_as_fun(closed) if is_ruled and arrays.is_traced(everything) else structure.compiled(closed)
    return jax.tree.unflatten(out_tree, run(*everything))


def _is_traced(leaf: Any) -> bool:
    is_number = isinstance(leaf, (int, float, complex, np.ndarray, np.generic, jax.Array))
    return is_number and not isinstance(leaf, (bool, np.bool_))


def share_out(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """Give several axes of a program one mesh, if there is none and they ask for none."""
    free = len(axes) > 1 and all(axis.mesh is None and axis.over is None for axis in axes)
    if not free or scope.current().mapped or not jax.sharding.get_abstract_mesh().empty:
        return axes
    devices = tuple(jax.devices())
    if len(devices) == 1:
        return axes
    mesh = placing.shared_mesh(tuple((axis.name, axis.size) for axis in axes), devices)
    return tuple(Axis(axis.name, axis.size, mesh=mesh, at_once=axis.at_once) for axis in axes)


def _axis(name: str, size: SupportsIndex | Axis) -> Axis:
    if not isinstance(size, Axis):
        return Axis(name, size)  # pyright: ignore[reportArgumentType]
    if size.name != name:
        raise AxisError(
            f"program: axis {name!r} was given as {size!r}, which has another name; "
            f"write @px.program({{{size.name!r}: …}})"
        )
    return size


def _where(axis: Axis) -> str:
    placement = placing.place(axis)
    devices = f"{placement.num_devices} device{'s' if placement.num_devices > 1 else ''}"
    turns = f", {placement.chunk} at once" if placement.num_chunks > 1 else ""
    most = "at most " * (placement.num_devices * placement.num_local > axis.size)
    return f"{axis.name}={axis.size} on {devices} ({most}{placement.num_local} each{turns})"
