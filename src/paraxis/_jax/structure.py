"""A program's structure as a key: traces of the same computation have the same key, whatever functions they are of.

The key is the jaxpr's own: operations, their parameters, the values of constants, and which result feeds which
operand. Names, source lines and the identity of functions are not in it, nor is a function's derivative rule, so that
a compiled program that is found by it may be run, and not differentiated. Functions that a program calls back are the
same if their code is, and the variables that they close over.
"""

import dataclasses
import functools
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Generic, TypeVar

import jax
import numpy as np

from paraxis._jax import jax_api
from paraxis._jax.jax_api import ClosedJaxpr, Jaxpr, Literal, ShapedArray

_T = TypeVar("_T")


class Recent(Generic[_T]):
    """The things that were made last, by their keys. Any thread may ask."""

    def __init__(self, at_most: int) -> None:
        self._at_most = at_most
        self._made: OrderedDict[Hashable, _T] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], _T]) -> _T:
        with self._lock:
            if key in self._made:
                self._made.move_to_end(key)
                return self._made[key]
        made = make()
        with self._lock:
            made = self._made.setdefault(key, made)
            while len(self._made) > self._at_most:
                self._made.popitem(last=False)
        return made


def key(value: Any) -> Hashable:
    """Return the key of a jaxpr, or of a parameter that may hold some."""
    if isinstance(value, ClosedJaxpr) and value.consts:
        return (_of_jaxpr(value.jaxpr), tuple(map(_of_constant, value.consts)))
    if isinstance(value, (ClosedJaxpr, Jaxpr)):
        return _of_jaxpr(value.jaxpr if isinstance(value, ClosedJaxpr) else value)
    if isinstance(value, (tuple, list)):
        return (type(value), *map(key, value))
    if isinstance(value, Mapping):
        return (type(value), *sorted((name, key(entry)) for name, entry in value.items()))
    if isinstance(value, (np.ndarray, np.generic)):
        return _of_constant(value)
    if isinstance(value, (float, complex)):  # 0.0 and -0.0 are equal, and nan is not nan
        return (type(value), repr(value))
    if callable(value) and not isinstance(value, type):  # equal ones may do different things
        if not dataclasses.is_dataclass(value):
            return _of_function(value, ())
        return (type(value), *(key(getattr(value, field.name)) for field in dataclasses.fields(value)))
    try:
        hash(value)
    except TypeError:
        return _Same(value)
    return (type(value), value)


class _Same:
    """Something that is equal to itself alone. It is kept, so that no other takes its place in memory."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __hash__(self) -> int:
        return id(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value


_FIXED = (bool, int, float, complex, str, bytes, type(None), type, np.dtype, jax.tree_util.PyTreeDef)


def _of_function(fn: Any, within: tuple[Any, ...]) -> Hashable:
    """Return the key of something that can be called, of which each trace may make another that does the same."""
    inner = functools.partial(_held, within=(*within, fn))
    for depth, other in enumerate(within):
        if fn is other:
            return ("again", depth)
    if _is_of_jax(type(fn)) and hasattr(fn, "__dict__"):  # such as the rule of custom_vmap
        return (type(fn), inner(vars(fn), by_value=True))
    if getattr(fn, "__dict__", None) or _has_defaults(fn):
        return _Same(fn)
    if isinstance(fn, types.MethodType):
        return ("method", inner(fn.__func__), _Same(fn.__self__))
    if isinstance(fn, types.BuiltinMethodType):
        return ("method", fn.__name__, _Same(fn.__self__))
    if isinstance(fn, functools.partial):
        return ("partial", inner(fn.func), inner(fn.args))
    if not isinstance(fn, types.FunctionType):
        return _Same(fn)
    theirs = _is_of_jax(fn)
    content = functools.partial(inner, by_value=theirs)
    cells = tuple(_Cell(cell, content, theirs) for cell in fn.__closure__ or ())
    return (fn.__code__, _Same(fn.__globals__), cells)


def _is_of_jax(thing: Any) -> bool:
    """Return whether a function or class is JAX's own: what such a one holds is not changed later."""
    return (thing.__module__ or "").split(".")[0] == "jax"


def _has_defaults(fn: Any) -> bool:
    """Return whether something holds values that may be replaced in it later."""
    names = ("__defaults__", "__kwdefaults__") if isinstance(fn, types.FunctionType) else ("keywords",)
    return any(getattr(fn, name, None) for name in names)


def _held(value: Any, within: tuple[Any, ...], *, by_value: bool = False) -> Hashable:
    """Return the key of a value that a function holds. What can change is the same as itself alone."""
    inner = functools.partial(_held, within=within, by_value=by_value)
    if isinstance(value, tuple) or (isinstance(value, list) and by_value):
        return (type(value), *map(inner, value))
    if isinstance(value, (set, frozenset)) and by_value:
        return (type(value), frozenset(map(inner, value)))
    if isinstance(value, dict) and by_value:
        return (dict, *((name, inner(entry)) for name, entry in value.items()))
    if isinstance(value, (ClosedJaxpr, Jaxpr, ShapedArray)) and by_value:
        return key(value)
    if isinstance(value, _FIXED):
        return key(value)
    return _of_function(value, within) if callable(value) else _Same(value)


class _Cell:
    """A variable that a function closes over: the same one. Of JAX's functions, which rebind none, what it holds."""

    def __init__(self, cell: types.CellType, key_of: Callable[[Any], Hashable], theirs: bool) -> None:
        self._cell, self._theirs = cell, theirs
        try:
            self._content: Hashable = key_of(cell.cell_contents)
        except ValueError:  # not bound yet
            self._content = _Same(cell)

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Cell):
            return False
        return self._cell is other._cell or (self._theirs and other._theirs and self._content == other._content)


def _of_constant(value: Any) -> Hashable:
    if isinstance(value, (np.ndarray, np.generic, bool, int, float, complex)):
        array = np.asarray(value)
        kind = np.ndarray if isinstance(value, np.ndarray) else type(value)  # JAX's own arrays of NumPy are that, too
        return (kind, array.dtype, array.shape, array.tobytes())
    return _Same(value)  # an array of JAX's, which does not change


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
