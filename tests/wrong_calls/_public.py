"""All that users can call, by the names that the tables give it."""

import inspect
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import paraxis
import paraxis.engines
import paraxis.ensembles
import paraxis.errors
import paraxis.launch
import paraxis.reports
import paraxis.solve
import paraxis.testing
import paraxis.train
import paraxis.transforms

ROOMS: dict[str, types.ModuleType] = {
    "px": paraxis,
    "engines": paraxis.engines,
    "ensembles": paraxis.ensembles,
    "errors": paraxis.errors,
    "reports": paraxis.reports,
    "launch": paraxis.launch,
    "objective": paraxis.solve.objective,
    "prox": paraxis.solve.prox,
    "solve": paraxis.solve,
    "testing": paraxis.testing,
    "train": paraxis.train,
    "transforms": paraxis.transforms,
}
METHODS = ("__call__", "__getitem__")  # beside those whose names have no underscore
PROTOCOL = ("tree_",)  # methods that JAX calls


def callables(rooms: Mapping[str, types.ModuleType]) -> dict[str, Any]:
    """What can be called with an argument, by its names; a method that classes share has several."""
    public = {f"{room}.{name}": getattr(module, name) for room, module in rooms.items() for name in module.__all__}
    classes = {cls for x in public.values() for cls in [x if isinstance(x, type) else type(x)] if _is_ours(cls)}
    found = {name: _called(x) for name, x in public.items() if not isinstance(x, types.ModuleType)}
    found |= {f"{cls.__name__}.{name}": method for cls in classes for name, method in _methods(cls)}
    return {name: x for name, x in found.items() if x is not None and _takes_arguments(x)}


def untabled(names: Mapping[str, Any], tabled: Iterable[str], without: Iterable[str]) -> set[str]:
    """Names of which there is no table, under none of their names, and that are not said to need none."""
    known = {id(names[name]) for name in (*tabled, *without) if name in names}
    return {name for name, x in names.items() if id(x) not in known}


def _called(x: Any) -> Any:
    if isinstance(x, type):
        return None if issubclass(x, BaseException) else x
    if isinstance(x, types.FunctionType):
        return x
    return vars(type(x)).get("__call__") if _is_ours(type(x)) else None


def _methods(cls: type) -> Iterator[tuple[str, Any]]:
    for name in dir(cls):
        static = inspect.getattr_static(cls, name)
        method = static.__func__ if isinstance(static, (classmethod, staticmethod)) else static
        shown = name in METHODS or not name.startswith(("_", *PROTOCOL))
        if shown and isinstance(method, types.FunctionType) and _is_ours(method):
            yield name, method


def _is_ours(x: Any) -> bool:
    return x.__module__.partition(".")[0] == "paraxis"


def _takes_arguments(x: Any) -> bool:
    return any(name not in ("self", "cls") for name in inspect.signature(x).parameters)
