"""A thread that ends a process which is alive but gets nothing done: a collective that a peer never enters has no end.

It counts from the first ``processes.note_progress()`` on, so the first compilation takes as long as it takes.
"""

import faulthandler
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from paraxis._core import processes
from paraxis.launch import _run

STUCK = 79
_OTHERS_TOO = 3.0
"""Seconds. Those that wait for this process would fail as soon as it is gone; first they are to say where they are."""

# Python's own modules and what is installed beside them, this package, and what has no file.
_INSTALLED = (str(Path(os.__file__).parent), str(Path(__file__).parents[1]), "<")


def watch(stuck_after: float) -> None:
    """Start watching.

    Args:
        stuck_after: seconds without progress after which all stacks are printed and the process ends.
    """
    threading.Thread(target=_watch, args=(stuck_after,), name="paraxis watchdog", daemon=True).start()


def _watch(stuck_after: float) -> None:
    while True:
        time.sleep(min(1.0, stuck_after / 20))
        # If this thread cannot run, as another one keeps Python's lock, this prints the stacks and ends the process.
        faulthandler.dump_traceback_later(stuck_after + 5, exit=True)
        last = processes.last_progress()
        if last is not None and time.monotonic() - last > stuck_after:
            _end(stuck_after)


def _end(stuck_after: float) -> None:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    place = "" if frame is None else place_of(frame)
    _run.tell(f"stuck {place}")
    error = sys.__stderr__ or sys.stderr
    error.write(f"paraxis: no progress for {stuck_after:g} s; the main thread is at {place}; all stacks:\n")
    error.flush()
    faulthandler.dump_traceback(all_threads=True)
    time.sleep(_OTHERS_TOO)
    os._exit(STUCK)


def place_of(frame: FrameType) -> str:
    """Where a thread is: its innermost frame in code that is not installed, or else the innermost one."""
    found: FrameType | None = frame
    while found is not None and found.f_code.co_filename.startswith(_INSTALLED):
        found = found.f_back
    found = found or frame
    return f"{found.f_code.co_filename}:{found.f_lineno}"
