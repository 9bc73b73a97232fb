"""The memory that this process holds and does not use."""

import ctypes
import functools
from collections.abc import Callable
from typing import Any


@functools.cache
def _trim() -> Callable[[int], Any] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc alone


def give_back() -> None:
    """Give freed memory back to the system.

    Arrays of some megabytes, made and freed by several threads, leave gaps in which no later one fits: the process
    grew to five times what it used.
    """
    trim = _trim()
    if trim is not None:
        trim(0)
