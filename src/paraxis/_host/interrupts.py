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


class _Noted:
    """A handler that notes the first Ctrl-C, for whoever asks; a second one is a ``KeyboardInterrupt``."""

    def __init__(self) -> None:
        self.pending = self.told = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.pending:
            signal.default_int_handler(number, frame)
        self.pending = True

    def asked(self) -> bool:
        self.told = self.pending
        return self.told


def can_be_asked_for() -> bool:
    """Return whether :func:`asked_for` changes anything: in the main thread, with Python's own handler of Ctrl-C.

    Whoever has put another handler there has decided what it is to do.
    """
    handler = signal.getsignal(signal.SIGINT)
    ours = handler is signal.default_int_handler or isinstance(handler, _Noted)
    return ours and threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def asked_for() -> Iterator[Callable[[], bool]]:
    """Within, Ctrl-C is noted, and who computes asks whether there was one; a second one is a ``KeyboardInterrupt``.

    One that nobody has asked for takes effect at the end. Within another one, the same is asked for, to whose end it
    lasts.
    """
    if not can_be_asked_for():
        yield lambda: False
        return
    outer = signal.getsignal(signal.SIGINT)
    if isinstance(outer, _Noted):
        yield outer.asked
        return
    noted = _Noted()
    signal.signal(signal.SIGINT, noted)
    try:
        yield noted.asked
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if noted.pending and not noted.told:
            signal.raise_signal(signal.SIGINT)
