"""Variables that are read or written while a function runs, noticed whatever led to them.

From Python 3.12 on, the interpreter tells when one of the functions of Flax that need a value begins
(``sys.monitoring``); nothing of Flax is touched. On Python 3.11 descriptors stand before the slots of a
variable. (It would do on later versions as well, but from 3.13 on a class that was changed a thousand times is slow for
ever.) Either is there only while somebody listens.
"""

import contextlib
import contextvars
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from flax.nnx import Variable, variablelib

from paraxis._modules import hooks

monitoring: Any = getattr(sys, "monitoring", None)  # from Python 3.12 on

Listener = Callable[[Variable[Any]], None]

_listener: contextvars.ContextVar[Listener | None] = contextvars.ContextVar("paraxis_reads", default=None)

_SLOTS = ("_raw_value", "_trace_state")  # what it holds; what is looked at before it is written
_MAKERS = ("__init__", "_new", "__setstate__")


@contextlib.contextmanager
def told_to(listener: Listener) -> Iterator[None]:
    """Within, in this thread, a function is given each variable before it is read or written."""
    with _hooks():
        token = _listener.set(listener)
        try:
            yield
        finally:
            _listener.reset(token)


@contextlib.contextmanager
def unnoticed() -> Iterator[None]:
    """Within, values are read without being noticed: what we look at ourselves is no part of a user's program."""
    token = _listener.set(None)
    try:
        yield
    finally:
        _listener.reset(token)


def _readers() -> Iterator[types.CodeType]:
    """Yield the functions of Flax that look into a variable. All others call one of these."""
    for x in (*vars(Variable).values(), *vars(variablelib).values()):
        code = getattr(x.fget if isinstance(x, property) else x, "__code__", None)
        if not isinstance(code, types.CodeType) or code.co_name in _MAKERS:
            continue
        if any(slot in (*code.co_names, *code.co_consts) for slot in _SLOTS):
            yield code


class _Monitor(hooks.Hook):
    """The interpreter tells when a reader begins."""

    def __init__(self) -> None:
        super().__init__()
        self._readers = tuple(_readers())
        self._tool = 0

    def put(self) -> None:
        self._tool = next(n for n in (4, 3, 5, 2, 1, 0) if monitoring.get_tool(n) is None)
        monitoring.use_tool_id(self._tool, "paraxis")
        monitoring.register_callback(self._tool, monitoring.events.PY_START, _begins)
        for code in self._readers:
            monitoring.set_local_events(self._tool, code, monitoring.events.PY_START)

    def take_away(self) -> None:
        for code in self._readers:
            monitoring.set_local_events(self._tool, code, 0)
        monitoring.register_callback(self._tool, monitoring.events.PY_START, None)
        monitoring.free_tool_id(self._tool)


def _begins(code: types.CodeType, offset: int) -> None:
    listener = _listener.get()
    if listener is None:
        return
    given = sys._getframe(1).f_locals
    found = [given[name] for name in code.co_varnames[: code.co_argcount]]
    variables = [x for x in found if isinstance(x, Variable)]
    if code.co_name == "__getattr__" and given["name"] in variables[0].get_metadata():
        return
    for variable in variables:
        listener(variable)


_UNNOTICED = ("paraxis._modules.graphs", "paraxis._calls.surroundings")


class _Slot:
    """Stands before a slot. What our own files read is not noticed, as it is not on later versions of Python."""

    def __init__(self, name: str) -> None:
        self._slot: Any = vars(Variable)[name]

    def __get__(self, variable: Variable[Any] | None, owner: Any = None) -> Any:
        listener = _listener.get()
        if variable is None:
            return self
        if listener is not None and sys._getframe(1).f_globals["__name__"] not in _UNNOTICED:
            listener(variable)
        return self._slot.__get__(variable, owner)

    def __set__(self, variable: Variable[Any], value: Any) -> None:
        self._slot.__set__(variable, value)


_HOOKS: list[hooks.Hook] = (
    [_Monitor()] if monitoring else [hooks.Attribute(Variable, name, _Slot(name)) for name in _SLOTS]
)


@contextlib.contextmanager
def _hooks() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for hook in _HOOKS:
            stack.enter_context(hook.entered())
        yield
