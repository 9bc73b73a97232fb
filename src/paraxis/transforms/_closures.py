"""Modules that a function reaches without being given them: an error at wrap time, since they would be frozen."""

import dis
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any

from paraxis._core.errors import StateError
from paraxis.transforms import _nnx

_AT_MOST = 1000  # items of one container: a longer one is data


def check(fn: Callable[..., Any], transform: str, judge: Callable[[Any], bool | None]) -> None:
    """Refuse a function that has a module in its closure, its globals, its defaults or a ``partial``.

    ``judge`` says which objects may be there, such as wrapped functions whose modules were all given; ``None`` means
    that it depends on what they hold. Functions that it calls, and objects, are looked into if they come from the
    same package.

    Raises:
        StateError: naming the variable.
    """
    root = _package(fn)
    seen: dict[int, Any] = {}  # kept, so that no other object takes its id

    def visit(name: str, x: Any, depth: int) -> None:
        if id(x) in seen or depth > 8:
            return
        seen[id(x)] = x
        verdict = judge(x)
        if verdict:
            return
        if verdict is False:
            raise StateError(
                f"{transform}: {getattr(fn, '__name__', 'the function')!r} uses {name!r}, a {type(x).__name__}, from "
                f"outside; its variables would be frozen into the compiled function. Give it as an argument, "
                f"px.{transform}(lambda net, …: …, {name}), or say that it is constant: px.freeze({name})"
            )
        for inner_name, inner in _reached(x, name, root):
            if not isinstance(inner, types.FunctionType) or inner_name == name or _package(inner) == root:
                visit(inner_name, inner, depth + 1)

    visit(getattr(fn, "__name__", "f"), fn, 0)


def _reached(x: Any, name: str, root: str) -> Iterator[tuple[str, Any]]:
    """What a function, a container or an object of the caller's own holds, with the name to show."""
    if isinstance(x, functools.partial):
        yield name, x.func
        yield from ((name, arg) for arg in x.args)
        yield from x.keywords.items()
    elif isinstance(x, types.MethodType):
        yield name, x.__func__
        yield name, x.__self__
    elif isinstance(x, types.FunctionType):
        yield from _variables_of(x)
    elif isinstance(x, (list, tuple, set, frozenset)):
        yield from ((name, item) for item in itertools.islice(x, _AT_MOST))
    elif isinstance(x, dict):
        yield from ((f"{name}[{key!r}]", item) for key, item in itertools.islice(x.items(), _AT_MOST))
    elif _nnx.is_module(x):
        return
    elif isinstance(x, type):
        if _package(x) == root:
            own = ((key, item) for key, item in vars(x).items() if not callable(item) or _nnx.is_module(item))
            yield from ((f"{name}.{key}", item) for key, item in own)
    elif "__wrapped__" in getattr(x, "__dict__", {}):
        yield name, x.__wrapped__
    elif _package(type(x)) == root:
        yield from ((name, f) for f in vars(type(x)).values() if isinstance(f, types.FunctionType))
        yield from ((f"{name}.{key}", item) for key, item in _attributes(x))


def _attributes(x: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(x, "__dict__", {}).items()
    for kind in type(x).__mro__:
        slots = vars(kind).get("__slots__", ())
        yield from ((key, getattr(x, key)) for key in ([slots] if isinstance(slots, str) else slots) if hasattr(x, key))
        if _package(kind) == _package(type(x)):
            yield from ((key, item) for key, item in vars(kind).items() if not callable(item) or _nnx.is_module(item))


def _variables_of(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    code = fn.__code__
    for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not bound yet
            continue
    for name, *attributes in sorted(_globals_of(code)):
        x = fn.__globals__.get(name)
        while isinstance(x, types.ModuleType) and attributes:
            name, x = f"{name}.{attributes[0]}", getattr(x, attributes.pop(0), None)
        if not isinstance(x, types.ModuleType):
            yield name, x
    parameters = list(inspect.signature(fn).parameters.values())
    yield from ((p.name, p.default) for p in parameters if p.default is not inspect.Parameter.empty)


def _globals_of(code: types.CodeType) -> set[tuple[str, ...]]:
    """The global names that code loads, its inner functions included, with the attributes that are taken of each.

    Not those in ``co_names``, among which are attributes of anything.
    """
    found: set[tuple[str, ...]] = set()
    chain: tuple[str, ...] = ()
    for instruction in dis.get_instructions(code):
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
