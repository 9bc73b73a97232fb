"""A program's structure as a key: traces of the same computation have the same key, whatever functions they are of.

The key is the jaxpr's own: operations, their parameters, the values of constants, and which result feeds which
operand. Names, source lines and derivative rules are not in it, so that a compiled program that is found by it may be
run, and not differentiated. A function that a program calls back is equal to itself alone.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import numpy as np

from paraxis._core import jax_api
from paraxis._core.jax_api import ClosedJaxpr, Jaxpr, Literal

_MOST = 512
_programs: dict[Hashable, Any] = {}


def kept(structure: Hashable, make: Callable[[], Any]) -> Any:
    """Return what was made for a program of this structure, or make it; it must hold what the key was taken of."""
    found = _programs.get(structure)
    if found is None:
        if len(_programs) >= _MOST:
            _programs.pop(next(iter(_programs)), None)
        found = _programs.setdefault(structure, make())
    return found


def compiled(closed: ClosedJaxpr) -> Callable[..., Any]:
    """Return the compiled program of a trace, of flat arguments and results, made once for each structure."""
    closed, consts = jax_api.without_constants(closed)
    return functools.partial(kept(key(closed), lambda: jax.jit(jax_api.jaxpr_as_fun(closed))), *consts)


def key(value: Any) -> Hashable:
    """Return the key of a jaxpr, or of a parameter that may hold some."""
    if isinstance(value, ClosedJaxpr):
        return (_of_jaxpr(value.jaxpr), *map(_of_constant, value.consts))
    if isinstance(value, Jaxpr):
        return _of_jaxpr(value)
    if isinstance(value, (tuple, list)):
        return (type(value), *map(key, value))
    if isinstance(value, Mapping):
        return (type(value), *sorted((name, key(entry)) for name, entry in value.items()))
    if isinstance(value, (np.ndarray, np.generic, float, complex)):
        return _of_constant(value)
    if callable(value) and not isinstance(value, type):  # equal ones may do different things
        if not dataclasses.is_dataclass(value):
            return _itself(value)
        return (type(value), *(key(getattr(value, field.name)) for field in dataclasses.fields(value)))
    try:
        hash(value)
    except TypeError:
        return _itself(value)
    return (type(value), value)


def _itself(value: Any) -> Hashable:
    """Return the key of something that is equal to itself alone. The program holds it, so that the id stays its own."""
    return (type(value), id(value))


def _of_constant(value: Any) -> Hashable:
    if isinstance(value, (np.ndarray, np.generic, bool, int, float, complex)):
        array = np.asarray(value)  # its bytes tell 0.0 from -0.0
        kind = np.ndarray if isinstance(value, np.ndarray) else type(value)  # JAX's own arrays of NumPy are that, too
        return (kind, array.dtype, array.shape, array.tobytes())
    return _itself(value)  # an array of JAX's, which does not change


def _of_jaxpr(jaxpr: Jaxpr) -> Hashable:
    numbers: dict[Any, int] = {}

    def named(variables: Any) -> Hashable:
        return tuple((numbers.setdefault(v, len(numbers)), v.aval) for v in variables)

    def read(atom: Any) -> Hashable:
        return (_of_constant(atom.val), atom.aval) if isinstance(atom, Literal) else numbers[atom]

    arguments = named((*jaxpr.constvars, *jaxpr.invars))
    equations = tuple(
        (eqn.primitive, tuple(map(read, eqn.invars)), _of_parameters(eqn), eqn.ctx, named(eqn.outvars))
        for eqn in jaxpr.eqns
    )
    return arguments, equations, tuple(map(read, jaxpr.outvars))


def _of_parameters(eqn: jax_api.JaxprEqn) -> Hashable:
    if eqn.primitive.name.startswith(("custom_jvp_call", "custom_vjp_call")) and "call_jaxpr" in eqn.params:
        return key(eqn.params["call_jaxpr"])
    return tuple((name, key(value)) for name, value in eqn.params.items())
