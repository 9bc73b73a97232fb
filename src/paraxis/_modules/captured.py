"""Modules that a function uses without being given them: an error, since they would be frozen into a program.

Nothing is searched. A variable that is read while the function is traced, and was made before that trace began, was
not given: what is given is put together anew in each trace. Whatever led there, the read is noticed. Only to say in the
error which module it was, the callers are looked at.
"""

import collections
import concurrent.futures
import contextvars
import dataclasses
import functools
import itertools
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from flax.nnx import Variable

from paraxis._calls import surroundings
from paraxis._calls.surroundings import Place
from paraxis._modules import graphs, reads
from paraxis.errors import StateError

_AT_MOST = 2_000  # objects that are looked at for a name

_around: contextvars.ContextVar[tuple[Any, ...]] = contextvars.ContextVar("paraxis_traces", default=())
"""The traces of the runs that this one is within."""


@dataclasses.dataclass(frozen=True)
class Guard:
    """The words of an error. ``cure``: what to write instead, of the module's name."""

    transform: str
    called: str
    cure: Callable[[str], str]


def guarded(guard: Guard, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which raises if it uses what it is not given. See :func:`run`."""
    return lambda *args, **kwargs: run(guard, fn, args, kwargs)


def run(guard: Guard | None, fn: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Call a function. ``None``: what is around it decides what it may use.

    Raises:
        StateError: naming the module, if it reads a variable that was made before.
    """
    here, around = graphs.trace_state(), _around.get()
    token = _around.set((*around, here))
    try:
        if guard is None:
            return fn(*args, **kwargs)
        outside = [trace for trace in (_outermost(), *around) if trace != here]
        return _watched(guard, outside, fn, args, kwargs)
    finally:
        _around.reset(token)


def _watched(guard: Guard, outside: list[Any], fn: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    found: list[StateError] = []

    def read(variable: Variable[Any]) -> None:
        if graphs.made_in(variable) in outside:
            with reads.unnoticed():
                found.append(_error(guard, fn, variable))
            raise found[0]

    try:
        with reads.told_to(read):
            result = fn(*args, **kwargs)
    except Exception as error:
        if found and error is not found[0]:
            raise found[0] from error
        raise
    if found:  # somebody has caught it, and gone on with something else
        raise found[0]
    return result


@functools.cache
def _outermost() -> Any:
    """Return the trace that variables are made in where nothing is traced. A new thread is always there."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(graphs.trace_state).result()


def _error(guard: Guard, fn: Callable[..., Any], variable: Variable[Any]) -> StateError:
    name, owner, place = _led_to(variable, fn)
    return StateError(
        f"{guard.transform}: {guard.called!r} uses {name!r}, a {type(owner).__name__}, from outside{place}; its "
        f"variables would be frozen into the compiled function. {guard.cure(name)}"
    )


# --- what it is called -----------------------------------------------------------------------------------------------


def _led_to(variable: Variable[Any], fn: Callable[..., Any]) -> tuple[str, Any, str]:
    """Return a name of the module that a variable was read of, the module, and, if it is in another file, the place."""
    frames = _callers()
    users = [frame for frame in frames if not surroundings.is_library(frame.f_globals.get("__name__"))]
    for frame in users:
        found = _first_with(variable, _names_in(frame), surroundings.names_of(frame.f_code))
        if found is not None:
            file = frame.f_code.co_filename
            is_elsewhere = file != users[0].f_code.co_filename
            return *found, f" ({os.path.basename(file)}:{frame.f_lineno})" if is_elsewhere else ""
    called = ((iter([Place("f", fn)]), surroundings.names_in(fn)),)
    for places, used in (*called, *((_names_in(frame), surroundings.names_of(frame.f_code)) for frame in frames)):
        found = _first_with(variable, places, used)
        if found is not None:
            return *found, ""
    return "variable", variable, ""


def _callers() -> list[types.FrameType]:
    """Return the frames between the function that was called and the read, outermost first."""
    frames: list[types.FrameType] = []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _watched.__code__:
        frames.insert(0, frame)
        frame = frame.f_back
    return frames


def _names_in(frame: types.FrameType) -> Iterator[Place]:
    yield from itertools.starmap(Place, frame.f_locals.items())
    yield from surroundings.of_globals(frame.f_code, frame.f_globals)


def _first_with(variable: Variable[Any], places: Iterator[Place], used: frozenset[str]) -> tuple[str, Any] | None:
    """Return the first of some things, and what they hold, nearest first, that is a module with this variable."""
    queue = collections.deque((place, used) for place in places)
    seen: dict[int, Any] = {}  # kept, so that no other object takes its id
    while queue and len(seen) < _AT_MOST:
        (name, x, *_), used = queue.popleft()
        if id(x) in seen:
            continue
        seen[id(x)] = x
        try:
            if _holds(x, variable):
                return name, x
            if not graphs.is_module(x):
                inner = surroundings.names_in(x) or used
                held = surroundings.parts(name, x, inner, every=True)
                queue.extend((place, inner) for place in itertools.islice(held, _AT_MOST))
        except Exception:  # objects of others may do anything when they are looked at
            continue
    return None


def _holds(x: Any, variable: Variable[Any]) -> bool:
    if isinstance(x, graphs.Holder):
        return any(_holds(module, variable) for module in x.modules)
    if graphs.is_state(x):
        return any(leaf is variable for leaf in jax.tree.leaves(x, is_leaf=graphs.is_module))
    return graphs.is_module(x) and any(node is variable for _, node in graphs.nodes(x))
