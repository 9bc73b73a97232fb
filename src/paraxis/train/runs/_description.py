"""Descriptions of what a run depends on, in short text, the same in every process and under every Python.

A value is described by what it says of itself; a function by its name, its code and what it closes over; large arrays
by some of their rows; and what says nothing of itself by its name. There are no addresses in it.
"""

import argparse
import contextlib
import dataclasses
import decimal
import functools
import importlib.metadata
import inspect
import io
import itertools
import os
import re
import sys
import sysconfig
import textwrap
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from paraxis._host import digests
from paraxis.train.runs._feed import Feed
from paraxis.train.steps._grouped import GroupedStep
from paraxis.train.steps._state import TrainState
from paraxis.train.steps._step import TrainStep

Description = dict[str, str]
"""By the path of a thing, such as ``"optimizer.update_fns[1].step_size"``."""

_DEEPEST = 12
_MOST_FACTS = 300  # of one thing
_MOST_ITEMS = 32  # of a list, else some of them
_MOST_SAID = 20
_LONGEST = 80
_MODEL, _INITIAL = "model", "optimizer.init"
_VERSION = "version of this description"
_LIBRARIES = ("optax", "flax", "equinox")
_INSTALLED = tuple(
    {str(Path(os.__file__).parent), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    | {str(Path(__file__).parents[3] / "paraxis")}
)


def describe(state: Any, step: Any, feed: Feed) -> Description:
    """Return a run that begins with a state. Read once: it takes some milliseconds.

    Args:
        state: its optimiser and the decay of its average count.
        step: a training step of ours tells its loss and its options; another is described as a function.
        feed: its data, and what is done to them.
    """
    things = step.depends_on if isinstance(step, (TrainStep, GroupedStep)) else {"step": step}
    if isinstance(state, TrainState):
        optimizer = state.recipe.optimizer
        things["optimizer"] = getattr(optimizer, "update", optimizer)
        things[_INITIAL] = getattr(optimizer, "init", None)
        things["ema"] = state.recipe.ema_decay
        things |= {_MODEL: state.recipe.form.kind} | _settings(state)
    things |= feed.depends_on()
    found = {name: importlib.metadata.version(name) for name in _LIBRARIES if name in sys.modules}
    for name, thing in things.items():
        facts = dict(itertools.islice(_Walk().facts(name, thing, 0), _MOST_FACTS))
        known = {_last(path) for path in found} if name == _INITIAL else ()
        found |= {path: text for path, text in facts.items() if _last(path) not in known}
    return found | {_VERSION: "2"}


def _is_same(was: str | None, is_now: str | None) -> bool:
    """Return whether two descriptions are equal, as texts or as numbers: a schedule of optax's makes ints floats."""
    if was == is_now or was is None or is_now is None:
        return was == is_now
    try:
        return decimal.Decimal(was) == decimal.Decimal(is_now)  # as floats, two large seeds may be equal
    except decimal.InvalidOperation:
        return False


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """Return what is described otherwise now, a line for each thing."""
    if _VERSION not in before:  # saved before as much was described
        now = {path: text for path, text in now.items() if path in before}
    found = [path for path in {**before, **now} if not _is_same(before.get(path), now.get(path))]
    # What came or went with something that is another now is not told by itself.
    paths = [p for p in found if (p in before and p in now) or not any(_is_part(p, other) for other in found)]
    last = [_last(path) for path in paths]
    lines = []
    for path, short in zip(paths, last, strict=True):
        name = short if last.count(short) == 1 else path
        was, is_now = before.get(path, "not there"), now.get(path, "not there")
        if short == "step_size" and _is_negative(was) and _is_negative(is_now):  # what optax makes of a learning rate
            name, was, is_now = name.replace("step_size", "learning_rate"), was[1:], is_now[1:]
        kept = ", for a new state: this one stays as it was saved" if "init" in path.split(".") else ""
        lines.append(f"{name}: was {was}, is {is_now}{kept}")
    more = [f"and {len(lines) - _MOST_SAID} more settings have changed"] if len(lines) > _MOST_SAID else []
    return (*lines[:_MOST_SAID], *more)


def _settings(state: TrainState) -> dict[str, Any]:
    """Return the settings of the model; none if it is gone, since a step was given the state."""
    try:
        found = state.recipe.form.settings(state.params, state.mutable)
    except Exception:  # whatever a module of the user's does when it is put together
        return {}
    return {f"{_MODEL}.{path}": value for path, value in found.items()}


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _is_part(path: str, whole: str) -> bool:
    return path.startswith(whole) and path[len(whole) : len(whole) + 1] in (".", "[")


def _is_negative(text: str) -> bool:
    return bool(re.fullmatch(r"-[\d.]+(e-?\d+)?", text))


class _Walk:
    """Goes through a thing, and through each function and container in it once."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}  # kept alive, so that no other object gets the same number

    def facts(self, path: str, x: Any, depth: int) -> Iterator[tuple[str, str]]:
        """Paths, and what is there."""
        try:
            yield from self._facts(path, x, depth)
        except Exception:  # whatever an object does when it is looked at
            yield path, _name(type(x))

    def _facts(self, path: str, x: Any, depth: int) -> Iterator[tuple[str, str]]:
        if x is None or isinstance(x, (bool, int, float, complex, str, bytes)):
            yield path, _short(repr(x))
            return
        if hasattr(x, "dtype") and hasattr(x, "shape"):
            yield path, digests.of_array(x)
            return
        if id(x) in self._seen or depth > _DEEPEST:
            return
        self._seen[id(x)] = x
        for inner, value in self._parts(path, x):
            if value is _TEXT:
                yield inner
            else:
                yield from self.facts(inner, value, depth + 1)

    def _parts(self, path: str, x: Any) -> Iterator[tuple[Any, Any]]:
        if isinstance(x, Mapping):
            for key, value in x.items():
                yield f"{path}[{key!r}]" if isinstance(key, str) else f"{path}[{_short(_text_of(key))}]", value
        elif isinstance(x, tuple) and hasattr(x, "_fields"):
            for name in getattr(x, "_fields", ()):
                yield f"{path}.{name}", getattr(x, name)
        elif isinstance(x, (list, tuple)):
            if len(x) > _MOST_ITEMS:
                yield (path, f"{_name(type(x))} of {len(x):,}"), _TEXT
            for number in digests.some(len(x), _MOST_ITEMS, _MOST_ITEMS // 4):
                yield f"{path}[{number}]", x[number]
        elif isinstance(x, functools.partial):
            yield path, x.func
            for number, value in enumerate(x.args):
                yield f"{path}[{number}]", value
            for name, value in x.keywords.items():
                yield f"{path}.{name}", value
        elif isinstance(x, MethodType):
            yield path, x.__func__
            yield f"{path}.self", x.__self__
        elif isinstance(x, type):
            yield (path, _name(x)), _TEXT
        elif isinstance(unwrapped := inspect.unwrap(x) if callable(x) else x, FunctionType):
            yield from _of_function(path, unwrapped)
        elif dataclasses.is_dataclass(x):
            yield (path, _name(type(x))), _TEXT
            for field in dataclasses.fields(x):
                yield f"{path}.{field.name}", getattr(x, field.name, None)
        else:
            yield (path, _name(x if hasattr(x, "__qualname__") else type(x))), _TEXT
            is_known = type(x).__module__.partition(".")[0] == "optax"  # whose settings are private attributes
            for name, value in sorted(getattr(x, "__dict__", {}).items()):
                if (is_known and callable(value)) or (_is_value(value) and (is_known or not name.startswith("_"))):
                    yield f"{path}.{name}", value


_TEXT = object()


def _of_function(path: str, function: FunctionType) -> Iterator[tuple[Any, Any]]:
    """Describe its name, its code, and what it reads: defaults, closure, globals."""
    code = function.__code__
    is_installed = _is_installed(function)
    text = "" if is_installed else _code(function)
    yield (path, f"{_name(function)}, code {digests.of_bytes(text.encode())}" if text else _name(function)), _TEXT
    for parameter in inspect.signature(function).parameters.values():
        if parameter.default is not parameter.empty:
            yield f"{path}.{parameter.name}", parameter.default
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"{path}.{name}", cell.cell_contents
        except ValueError:  # it has nothing yet
            continue
    if not is_installed:
        for name, value in _globals_read(code, function.__globals__):
            yield f"{path}.{name}", value


def _globals_read(code: CodeType, values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return globals that code reads, numbers and texts first; of what has attributes, those that code names."""
    found, names = list[tuple[str, Any]](), _global_names(code)
    for name in sorted(names):
        with contextlib.suppress(Exception):  # whatever an object does when it is looked at
            value = values.get(name)
            if _is_value(value) or dataclasses.is_dataclass(type(value)):
                found.append((name, value))
            elif isinstance(value, (SimpleNamespace, argparse.Namespace)) or not _is_installed(
                value if isinstance(value, (ModuleType, type)) else type(value)
            ):
                methods = (getattr(type(value), key, None) for key in names)
                named = names.union(*(_global_names(m.__code__) for m in methods if isinstance(m, FunctionType)))
                attributes = sorted(named & vars(value).keys())
                found += [(f"{name}.{key}", vars(value)[key]) for key in attributes if _is_value(vars(value)[key])]
    return sorted(found, key=lambda item: not isinstance(item[1], (bool, int, float, complex, str, bytes)))


def _text_of(key: Any) -> str:
    """Return a key as text, which for a set does not depend on the process's order of hashes."""
    return repr(sorted(key, key=repr) if isinstance(key, frozenset) else key)


def _is_value(x: Any) -> bool:
    """Return whether it is a number, a text, an array, or holds some; or a function of the user's."""
    if isinstance(x, FunctionType):
        return not _is_installed(x)
    # Of mappings, dicts alone: os.environ is another, and may hold what is secret.
    plain = (bool, int, float, complex, str, bytes, dict, MappingProxyType, list, tuple, functools.partial)
    return isinstance(x, plain) or (hasattr(x, "dtype") and hasattr(x, "shape"))


def _is_installed(x: Any) -> bool:
    """Return whether a module, class or function is of Python or of a library, whose code stays."""
    if isinstance(x, FunctionType):
        return x.__code__.co_filename.startswith((*_INSTALLED, "<frozen"))
    module = x if isinstance(x, ModuleType) else sys.modules.get(x.__module__)
    file = getattr(module, "__file__", None)
    return module is None or (module.__name__ != "__main__" if file is None else file.startswith(_INSTALLED))


def _global_names(code: CodeType) -> set[str]:
    inner = (_global_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)


def _code(function: FunctionType) -> str:
    """Return its source without comments and spaces; a lambda's if it is alone. Bytecode is each Python's own."""
    import ast

    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):  # typed at a prompt, or made by exec
        return ""
    if function.__name__ == "<lambda>":
        try:
            tree = ast.parse(source.strip())
        except SyntaxError:  # it ends inside the call that the lambda is given to
            return ""
        found = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
        if len(found) != 1:
            return ""
        source = ast.get_source_segment(source.strip(), found[0]) or ""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (tokenize.TokenError, SyntaxError):
        return re.sub(r"\s", "", source)
    lines = source.splitlines()
    for token in reversed(tokens):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return re.sub(r"\s", "", "".join(lines))


def _name(x: Any) -> str:
    module = str(getattr(x, "__module__", "") or "").partition(".")[0]
    name = str(getattr(x, "__qualname__", type(x).__qualname__)).replace(".<locals>", "")
    return name if module in ("", "builtins", "__main__") else f"{module}: {name}"


def _short(text: str) -> str:
    text = re.sub(r" at 0x[0-9a-fA-F]+", "", text)
    return (
        text
        if len(text) <= _LONGEST
        else f"{text[:20]}…, {len(text)} characters, digest {digests.of_bytes(text.encode())}"
    )
