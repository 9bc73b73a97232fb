"""Ctrl-C that waits until memory that was given away is replaced."""

import contextlib
import signal
import threading
from collections.abc import Iterator
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
