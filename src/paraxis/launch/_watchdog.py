"""A thread that ends a process which is alive but gets nothing done: a collective that a peer never enters has no end.

It counts from the beginning of a loop, ``processes.begin_progress()``, and from each step.
"""

import faulthandler
import os
import sys
import sysconfig
import threading
import time
from pathlib import Path
from types import FrameType

from paraxis._host import processes
from paraxis.launch import _run

STUCK = 79
ALIVE = "alive "
"""The messages of this thread to the launcher, each with the seconds for which it holds."""
MUCH = 1.0
"""Seconds. A thread that oversleeps by this much was suspended, and others with it: their silence means nothing."""
_FIRST_STEP = 600.0
"""Seconds, at least, for a loop's first step: it is compiled, after its first batch was read."""
_OTHERS_TOO = 3.0
"""Seconds. Those that wait for this process would fail as soon as it is gone; first they are to say where they are."""

# Python's own modules, what is installed, in a virtual environment too, this package, and what has no file.
_INSTALLED = (
    str(Path(os.__file__).parent),
    sysconfig.get_path("purelib"),
    sysconfig.get_path("platlib"),
    str(Path(__file__).parents[1]),
    "<",
)


def watch(stuck_after: float) -> None:
    """Start watching.

    Args:
        stuck_after: seconds without progress after which all stacks are printed and the process ends; before the
            first step of a loop at least 600.
    """
    threading.Thread(target=_watch, args=(stuck_after,), name="paraxis watchdog", daemon=True).start()


def _watch(stuck_after: float) -> None:
    pause, seen, lost = min(1.0, stuck_after / 20), None, 0.0
    before = time.monotonic()
    while True:
        time.sleep(pause)
        before, late = time.monotonic(), time.monotonic() - before - pause
        awaits_first, last = processes.awaits_first_step(), processes.last_progress()
        patience = max(stuck_after, _FIRST_STEP) if awaits_first or last is None else stuck_after
        # If this thread cannot run, as another one keeps Python's lock, the launcher has the stacks printed; without
        # one, a timer does, which cannot tell that from a process that was suspended.
        if not _run.tell(f"{ALIVE}{patience + 5}"):
            faulthandler.dump_traceback_later(patience + 5, exit=True)
        if last != seen:
            seen, lost = last, 0.0
        lost += late if late > MUCH else 0.0
        if last is not None and time.monotonic() - last - lost > patience:
            _end(f"no {'first step' if awaits_first else 'progress'} for {patience:g} s")


def _end(why: str) -> None:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    place = "" if frame is None else place_of(frame)
    _run.tell(f"stuck {place}")
    error = sys.__stderr__ or sys.stderr
    error.write(f"paraxis: {why}; the main thread is at {place}; all stacks:\n")
    error.flush()
    faulthandler.dump_traceback(all_threads=True)
    time.sleep(_OTHERS_TOO)
    os._exit(STUCK)


def place_of(frame: FrameType) -> str:
    """Return where a thread is: its innermost frame in code that is not installed, or else the innermost one."""
    found: FrameType | None = frame
    while found is not None and found.f_code.co_filename.startswith(_INSTALLED):
        found = found.f_back
    found = found or frame
    return f"{found.f_code.co_filename}:{found.f_lineno}"
