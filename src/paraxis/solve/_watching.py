"""A function that is told of iterations: called between two of them, its exceptions raised where the run was called.

JAX tells of an iteration from within the compiled program. There, a function that computes something would wait for
devices that wait for it; and an exception would be one of XLA's, without the type that it had. So what is told is kept,
and the function is called by the run, when the program has given its result. Where a run is one program (of several
processes, within ``vmap``), it is called from within, and its exception is kept.
"""

import collections
import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from typing import Any

import jax

from paraxis._jax import jax_api, structure


class _Ear:
    """A run that listens: what was told and waits, if it ``waits``, and the first exception."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.waits = False
        self.kept: collections.deque[tuple[Callable[[Any], object], Any]] = collections.deque()


_ears: dict[Hashable, list[_Ear]] = {}  # of runs that are under way, by what the function that each tells does
_innermost: ContextVar[_Ear | None] = ContextVar("paraxis_watch", default=None)


def tell(watch: Callable[[Any], object], seen: Any) -> None:
    """Call a function that is told of iterations, or keep what it is told for a run that waits with it."""
    waiting = [ear for ear in _ears.get(structure.key(watch), ()) if ear.waits]
    if waiting:
        waiting[-1].kept.append((watch, seen))
    else:
        _call(watch, seen)


def _call(watch: Callable[[Any], object], seen: Any) -> None:
    """Call the function; once it has raised, no more until the run has ended."""
    ears = tuple(_ears.get(structure.key(watch), ()))
    if any(ear.error is not None for ear in ears):
        return
    token = _innermost.set(None)  # runs that it begins are told of by itself
    try:
        watch(seen)
    except BaseException as error:
        for ear in ears:
            ear.error = error
        if not ears:  # within jax.jit, nobody is there to raise it: it is shown, as those of other threads are
            shown = (type(error), error, error.__traceback__, threading.current_thread())
            threading.excepthook(threading.ExceptHookArgs(shown))
    finally:
        _innermost.reset(token)


@contextlib.contextmanager
def listening(watch: object, *, waits: bool = False) -> Iterator[None]:
    """Within, what the function raises can be asked for, if it is one; if it ``waits``, :func:`settle` calls it."""
    if not callable(watch):
        yield
        return
    ear = _Ear()
    ear.waits = waits
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
        while ear.kept:  # of another run that the same function listens to, told at the last moment
            _call(*ear.kept.popleft())


def is_listening() -> bool:
    """Return whether somebody may ask what such a function raises."""
    return _innermost.get() is not None


def raised() -> BaseException | None:
    """Return what the function of the innermost run has raised so far."""
    ear = _innermost.get()
    return None if ear is None else ear.error


def settle() -> None:
    """Wait until the function has been told of all iterations that were computed."""
    ear = _innermost.get()
    if ear is not None and not jax_api.is_tracing():
        jax.effects_barrier()
        while ear.kept:
            _call(*ear.kept.popleft())
