"""Ctrl-C that waits: until memory that was given away is replaced, or until who computes asks for it."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Within, an interrupt is noted and takes effect at the end. Other threads than the main one get none anyway."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    noted: list[tuple[int, Any]] = []
    before = signal.getsignal(signal.SIGINT)
    if before is None:  # a handler that is not Python's: it cannot be put back
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: noted.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if noted and callable(before):
            before(*noted[0])
        elif noted:
            signal.raise_signal(signal.SIGINT)


def can_be_asked_for() -> bool:
    """Whether :func:`asked_for` changes anything here: in the main thread, where Ctrl-C does what Python does with it.

    Whoever has put another handler there has decided what it is to do.
    """
    ours = threading.current_thread() is threading.main_thread()
    return ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler


@contextlib.contextmanager
def asked_for() -> Iterator[Callable[[], bool]]:
    """Within, Ctrl-C is noted, and who computes asks whether there was one; a second one is a ``KeyboardInterrupt``.

    One that nobody has asked for takes effect at the end.
    """
    if not can_be_asked_for():
        yield lambda: False
        return
    pending = told = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pending
        if pending:
            signal.default_int_handler(number, frame)
        pending = True

    def asked() -> bool:
        nonlocal told
        told = pending
        return told

    signal.signal(signal.SIGINT, note)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if pending and not told:
            signal.raise_signal(signal.SIGINT)
