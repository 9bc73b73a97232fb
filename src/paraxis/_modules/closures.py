"""Modules that a function reaches without being given them: an error at wrap time, since they would be frozen."""

import collections
import dis
import functools
import itertools
import numbers
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from paraxis._core.errors import StateError
from paraxis._modules import graphs

_AT_MOST = 20_000  # objects looked at for one function, the nearest first: what is larger is data
_PLAIN = (str, bytes, numbers.Number, type(None), np.ndarray, np.generic, jax.Array)


def check(
    fn: Callable[..., Any], transform: str, judge: Callable[[Any], bool | None], cure: Callable[[str], str]
) -> None:
    """Refuse a function that has a module in its closure, its globals, its defaults or a ``partial``.

    ``judge`` says which objects may be there, such as wrapped functions whose modules were all given; ``None`` means
    that it depends on what they hold. Functions that it calls, and objects, are looked into if they come from the same
    package; of an object, those attributes and methods whose names are used. ``cure`` says what to write instead, of
    the variable's name.

    Raises:
        StateError: naming the variable.
    """
    called = getattr(fn, "__name__", "the function")
    root = _package(fn)
    seen: dict[int, Any] = {id(fn): fn}  # kept, so that no other object takes its id
    names: set[str] = set()  # of attributes, in all code that was reached
    queue = collections.deque([(getattr(fn, "__name__", "f"), fn)])
    while queue and len(seen) < _AT_MOST:
        name, x = queue.popleft()
        verdict = judge(x)
        if verdict is False:
            raise StateError(
                f"{transform}: {called!r} uses {name!r}, a {type(x).__name__}, from outside; its variables would be "
                f"frozen into the compiled function. {cure(name)}"
            )
        if verdict:
            continue
        for inner_name, inner in _safely(_reached(x, name, root, names)):
            foreign = isinstance(inner, types.FunctionType) and inner_name != name and _package(inner) != root
            if not foreign and not isinstance(inner, _PLAIN) and id(inner) not in seen:
                seen[id(inner)] = inner
                queue.append((inner_name, inner))


def _safely(found: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Objects of others may do anything when they are looked at."""
    try:
        yield from found
    except Exception:
        return


def _reached(x: Any, name: str, root: str, names: set[str]) -> Iterator[tuple[str, Any]]:
    """What a function, a container or an object of the caller's own holds, with the name to show."""
    if isinstance(x, functools.partial):
        yield name, x.func
        yield from ((name, arg) for arg in x.args)
        yield from x.keywords.items()
    elif isinstance(x, types.MethodType):
        yield name, x.__func__
        names |= _attribute_names(x.__func__)
        yield name, x.__self__
    elif isinstance(x, types.FunctionType):
        names |= _attribute_names(x)
        yield from _variables_of(x)
    elif isinstance(x, (list, tuple, set, frozenset)):
        yield from ((name, item) for item in itertools.islice(x, _AT_MOST))
    elif isinstance(x, dict):
        items = itertools.islice(dict.items(x), _AT_MOST)
        yield from ((f"{name}[{key!r}]" if isinstance(key, (str, int)) else name, item) for key, item in items)
    elif graphs.is_module(x):
        return
    elif isinstance(x, type):
        if _package(x) == root:
            own = ((key, item) for key, item in vars(x).items() if not callable(item) or graphs.is_module(item))
            yield from ((f"{name}.{key}", item) for key, item in own)
    elif "__wrapped__" in getattr(x, "__dict__", {}):
        yield name, x.__wrapped__
    elif _package(type(x)) == root:
        yield from _used_of(x, name, names)


def _used_of(x: Any, name: str, names: set[str]) -> Iterator[tuple[str, Any]]:
    """The methods of an object that may be called, and the attributes that these, or its users, take of it."""
    members = {key: item for kind in reversed(type(x).__mro__) for key, item in vars(kind).items()}
    methods = {key: item for key, item in members.items() if isinstance(item, types.FunctionType)}
    used, before = {*names, "__call__"}, -1
    while len(used) != before:
        before = len(used)
        for key in used & methods.keys():
            used = used | _attribute_names(methods[key])
    yield from ((name, methods[key]) for key in sorted(used & methods.keys()))
    held = {key: item for key, item in members.items() if not callable(item) or graphs.is_module(item)}
    held |= {key: getattr(x, key) for key in _slots(x) & used if hasattr(x, key)} | getattr(x, "__dict__", {})
    yield from ((f"{name}.{key}", held[key]) for key in sorted(used & held.keys()))


def _slots(x: Any) -> set[str]:
    slots = [vars(kind).get("__slots__", ()) for kind in type(x).__mro__]
    return {key for of in slots for key in ([of] if isinstance(of, str) else of)}


def _attribute_names(fn: Callable[..., Any]) -> set[str]:
    def of(code: types.CodeType) -> set[str]:
        inner = (of(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
        return set(code.co_names).union(*inner)

    return of(fn.__code__) if isinstance(fn, types.FunctionType) else set()


def _variables_of(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    code = fn.__code__
    for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not bound yet
            continue
    for name, *attributes in sorted(_globals_of(code)):
        x = fn.__globals__.get(name)
        while isinstance(x, types.ModuleType) and attributes:  # not by getattr, which may import
            name, x = f"{name}.{attributes[0]}", vars(x).get(attributes.pop(0))
        if not isinstance(x, types.ModuleType):
            yield name, x
    positional = code.co_varnames[: code.co_argcount]
    defaults = fn.__defaults__ or ()
    yield from zip(positional[len(positional) - len(defaults) :], defaults, strict=True)
    yield from (fn.__kwdefaults__ or {}).items()


def _globals_of(code: types.CodeType) -> set[tuple[str, ...]]:
    """The global names that code loads, its inner functions included, with the attributes that are taken of each.

    Not those in ``co_names``, among which are attributes of anything.
    """
    found: set[tuple[str, ...]] = set()
    chain: tuple[str, ...] = ()
    for instruction in dis.get_instructions(code):
        if instruction.opname == "EXTENDED_ARG":
            continue
        if chain and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            chain = (*chain, instruction.argval)
            continue
        found |= {chain} if chain else set()
        chain = (instruction.argval,) if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") else ()
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _globals_of(constant)
    return found


def _package(fn: Any) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return (getattr(fn, "__module__", None) or "").partition(".")[0]
