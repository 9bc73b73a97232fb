"""Exceptions of a function that is told of iterations: kept, and raised where the run was called.

The function is called within a compiled program. An exception there would be one of XLA's, without the type that it
had; and if several devices take part in the program, the others would wait for ever.
"""

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from typing import Any

import jax

from paraxis._jax import jax_api, structure


class _Ear:
    error: BaseException | None = None


_ears: dict[Hashable, list[_Ear]] = {}  # of runs that are under way, by what the function that each tells does
_innermost: ContextVar[_Ear | None] = ContextVar("paraxis_watch", default=None)


def tell(watch: Callable[[Any], object], seen: Any) -> None:
    """Call a function that is told of iterations; once it has raised, no more until the run has ended."""
    ears = tuple(_ears.get(structure.key(watch), ()))
    if any(ear.error is not None for ear in ears):
        return
    try:
        watch(seen)
    except BaseException as error:
        for ear in ears:
            ear.error = error
        if not ears:  # within jax.jit, nobody is there to raise it: it is shown, as those of other threads are
            shown = (type(error), error, error.__traceback__, threading.current_thread())
            threading.excepthook(threading.ExceptHookArgs(shown))


@contextlib.contextmanager
def listening(watch: object) -> Iterator[None]:
    """Within, what the function raises can be asked for, if it is one."""
    if not callable(watch):
        yield
        return
    ear = _Ear()
    place = structure.key(watch)  # the program may be that of an earlier run, with a function that does the same
    ears = _ears.setdefault(place, [])
    ears.append(ear)
    token = _innermost.set(ear)
    try:
        try:
            yield
        finally:
            settle()  # what arrives after the run's end, as it may on other threads, would be nobody's
    finally:
        _innermost.reset(token)
        ears.remove(ear)
        if not ears:
            _ears.pop(place, None)


def is_listening() -> bool:
    """Return whether somebody may ask what such a function raises."""
    return _innermost.get() is not None


def raised() -> BaseException | None:
    """Return what the function of the innermost run has raised so far."""
    ear = _innermost.get()
    return None if ear is None else ear.error


def settle() -> None:
    """Wait until the function has been told of all iterations that were computed."""
    if is_listening() and not jax_api.is_tracing():
        jax.effects_barrier()
