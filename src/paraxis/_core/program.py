"""Programs: functions with axes of their own, and what was compiled, found by the structure of a trace.

While the function is traced, its axes are the declared ones of the scope; the verbs inside it go by their names.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ParamSpec, SupportsIndex, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from paraxis._core import arrays, jax_api, placing, pytrees
from paraxis._core.jax_api import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from paraxis._core.placing import Axis, Placement, current, entered
from paraxis.errors import AxisError

_P = ParamSpec("_P")
_R = TypeVar("_R")


def program(
    placements: Mapping[str, SupportsIndex | Axis] | None = None, **axes: SupportsIndex | Axis
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
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
    if callable(placements) or not (placements or axes):
        raise AxisError("program: no axis was given; write @px.program(clients=8)")
    sizes = {**(placements or {}), **axes}.items()
    declared = tuple(size if isinstance(size, Axis) else Axis(name, size) for name, size in sizes)  # pyright: ignore
    return lambda fn: Program(fn, declared)


class Program:
    """A function whose axes are declared; made by :func:`program`.

    It is an ordinary JAX function: you can call, jit, differentiate, vmap and nest it, and run it from any thread.
    Numbers and arrays among its arguments are traced; everything else is constant. Each call traces the function
    again, so values that it reads from outside may change, and reuses the program that was compiled for the same
    structure; put ``jax.jit`` around it to trace only once per shape.
    """

    def __init__(self, fn: Callable[..., Any], axes: tuple[Axis, ...]) -> None:
        functools.update_wrapper(self, fn)
        self.axes, self._fn, self._name = axes, fn, getattr(fn, "__name__", "program")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        declared = share_out(self.axes)
        leaves, treedef = jax.tree.flatten(pytrees.arguments(self._name, args, kwargs))
        is_traced = [isinstance(x, _NUMBERS) and not isinstance(x, (bool, np.bool_)) for x in leaves]
        constant = pytrees.select(leaves, is_traced, False)

        def run(*traced: Any) -> Any:
            args, kwargs = pytrees.combine(treedef.unflatten(pytrees.interleave(is_traced, traced, constant)))
            with entered(declared=declared):
                return pytrees.partition(self._fn(*args, **kwargs))

        vars(run)["__wrapped__"] = self._fn  # JAX's errors then name the user's function, and not this one
        placement = placing.place(declared[0])
        operands = [arrays.to_mesh(x, placement, rows=False) for x in pytrees.select(leaves, is_traced)]
        return pytrees.combine(_evaluated(run, operands, placement, declared))

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __repr__(self) -> str:
        return f"<program {self._name}: {', '.join(str(placing.place(axis)) for axis in share_out(self.axes))}>"


_NUMBERS = (int, float, complex, np.ndarray, np.generic, jax.Array)


def _evaluated(fn: Callable[..., Any], operands: list[Any], placement: Placement, declared: tuple[Axis, ...]) -> Any:
    """``fn(*operands)``, by a compiled program that is found by the structure of its trace.

    Where a function is traced to be compiled, its operations are noted there; where JAX looks for numbers that are not
    finite, they are carried out one by one, as it looks into no jaxpr. Under ``grad``, ``jvp`` and ``vmap``, a
    trace with derivative rules of the user's, which the structure does not tell apart, is carried out operation by
    operation, each map by its own compiled program; so is one with callbacks on CPU devices, where elements may raise.
    """
    if jax_api.is_staging() or jax_api.checks_numbers():
        return fn(*operands)
    operands = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in operands]
    traced, out_tree = jax_api.trace(fn, [jax_api.struct(x) for x in operands], {})
    closed = jax_api.dce(traced)[0]
    is_ruled = jax_api.holds(closed.jaxpr, "custom_jvp_call", "custom_vjp_call")
    may_raise = placement.is_on_cpu_devices and jax_api.calls_back(closed.jaxpr)
    if may_raise or (is_ruled and arrays.is_traced([*closed.consts, *operands])):
        opens = functools.partial(jax_api.is_jit_with, names=("px_map",))
        run = functools.partial(jax_api.evaluate, closed, opens=opens)
    else:
        closed, consts = jax_api.without_constants(closed)
        compiled = cached(jaxpr_key(closed), lambda: jax.jit(jax_api.jaxpr_as_fun(jax_api.with_copies(closed))))
        run = functools.partial(compiled, *consts)
    with entered(declared=declared):  # a rule of the user's is traced only now
        return jax.tree.unflatten(out_tree, run(*operands))


def share_out(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """Give several axes of a program one mesh, if there is none and they ask for none."""
    free = len(axes) > 1 and all(axis.mesh is None and axis.over is None for axis in axes)
    if not free or jax.device_count() == 1 or current().mapped or not jax.sharding.get_abstract_mesh().empty:
        return axes
    return tuple(dataclasses.replace(axis, mesh=_shared_mesh(axes, tuple(jax.devices()))) for axis in axes)


@functools.lru_cache(maxsize=64)
def _shared_mesh(axes: tuple[Axis, ...], devices: tuple[Any, ...]) -> Mesh:
    """Share devices out as :func:`program` says."""
    divisors, sizes = [d for d in range(1, len(devices) + 1) if len(devices) % d == 0], np.array([a.size for a in axes])
    splits = (s for s in itertools.product(divisors, repeat=len(axes)) if math.prod(s) == len(devices))
    split = min(splits, key=lambda s: (np.prod(-(-sizes // s)), [-part for part in s]))
    return Mesh(np.array(devices).reshape(split), tuple(axis.name for axis in axes))


# --- compiled programs, found by structure -----------------------------------------------------------------------
#
# Traces of the same computation have the same key, whatever functions they are of: operations, their parameters, the
# values of constants, and which result feeds which operand. Names, source lines and derivative rules are not in it, so
# that a compiled program that is found by it may be run, and not differentiated. A function that a program calls back
# is equal to itself alone.


def cached(structure: Hashable, make: Callable[[], Any]) -> Any:
    """Return what was made for a program of this structure, or make it; it must hold what the key was taken of."""
    if not (entry := _entry(structure)):
        fn = make()

        def run(*args: Any) -> Any:
            with placing.outside():  # so that JAX, too, finds it in each scope
                return fn(*args)

        entry.append(run)
    return entry[0]


@functools.lru_cache(maxsize=512)
def _entry(structure: Hashable) -> list[Any]:
    return []


def jaxpr_key(value: Any) -> Hashable:
    """Return the key of a jaxpr, or of a parameter that may hold some."""
    if isinstance(value, ClosedJaxpr):
        return (_of_jaxpr(value.jaxpr), *map(jaxpr_key, value.consts))
    if isinstance(value, Jaxpr):
        return _of_jaxpr(value)
    if isinstance(value, (tuple, list)):
        return (type(value), *map(jaxpr_key, value))
    if isinstance(value, Mapping):
        return (type(value), *sorted((name, jaxpr_key(entry)) for name, entry in value.items()))
    if isinstance(value, (np.ndarray, np.generic, float, complex)):
        array = np.asarray(value)  # its bytes tell 0.0 from -0.0
        kind = np.ndarray if isinstance(value, np.ndarray) else type(value)  # JAX's own arrays of NumPy are that, too
        return (kind, array.dtype, array.shape, array.tobytes())
    runs = callable(value) and not isinstance(value, type)  # equal ones may do different things
    if runs and dataclasses.is_dataclass(value):
        return (type(value), *(jaxpr_key(getattr(value, field.name)) for field in dataclasses.fields(value)))
    rule = getattr(value, "__wrapped__", None) if runs else None
    if rule is not None and type(value).__module__.startswith("jax."):  # the rule of a custom_vmap, say
        return (type(value), jaxpr_key(rule))
    # What is equal to itself alone, an array of JAX's too, is held by the program, so that its id stays its own.
    return (type(value), id(value) if runs or not isinstance(value, Hashable) else value)


def _of_jaxpr(jaxpr: Jaxpr) -> Hashable:
    numbers = collections.defaultdict[Any, int](itertools.count().__next__)

    def typed(variables: Sequence[Any]) -> Hashable:
        return tuple([(numbers[v], v.aval) for v in variables])

    def read(atoms: Sequence[Any]) -> Hashable:
        return tuple([(jaxpr_key(v.val), v.aval) if isinstance(v, Literal) else numbers[v] for v in atoms])

    def parameters(eqn: JaxprEqn) -> Hashable:
        is_ruled = eqn.primitive.name.startswith(("custom_jvp_call", "custom_vjp_call")) and "call_jaxpr" in eqn.params
        return jaxpr_key(eqn.params["call_jaxpr"] if is_ruled else [*eqn.params.items()])

    arguments = typed([*jaxpr.constvars, *jaxpr.invars])
    eqns = [(eqn.primitive, read(eqn.invars), parameters(eqn), eqn.ctx, typed(eqn.outvars)) for eqn in jaxpr.eqns]
    return arguments, tuple(eqns), read(jaxpr.outvars)
