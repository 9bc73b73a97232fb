"""The program of each process of a launch: it runs the user's script, and ends the process at once when that ends.

JAX alone would let a process that failed wait for the others, and the others for it. This file is run by its path and
imports the standard library only: a script may set what JAX reads when JAX is imported.
"""

import contextlib
import faulthandler
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from types import TracebackType

RAISED = 70
INTERRUPTED = 130


def tell(word: str) -> bool:
    """Tell the launcher how far this process is. Whether there is one."""
    if os.environ.get("PARAXIS_LAUNCHER") == str(os.getppid()) and "PARAXIS_TELL" in os.environ:
        with contextlib.suppress(OSError):
            os.write(int(os.environ["PARAXIS_TELL"]), f"{word}\n".encode())
        return True
    return False


def leave(status: int) -> None:
    """End the process now, after its output is out; what waits for other processes at its end is left out."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)


def leave_raised(kind: type[BaseException]) -> None:
    """End the process now, because of an exception that nobody caught."""
    interrupted = issubclass(kind, KeyboardInterrupt)
    tell("interrupted" if interrupted else "raised")  # a script may leave with the same status for reasons of its own
    leave(INTERRUPTED if interrupted else RAISED)


def status_of(code: object) -> int:
    """Return the exit status of ``raise SystemExit(code)``."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code % 256 or int(code != 0)
    sys.stderr.write(f"{code}\n")
    return 1


def main(arguments: list[str]) -> None:
    """Run ``script ARGS`` or ``-m module ARGS``."""
    _die_with(int(os.environ["PARAXIS_LAUNCHER"]))
    os.set_inheritable(int(os.environ["PARAXIS_TELL"]), False)
    faulthandler.enable()
    try:
        _run(arguments)
    except SystemExit as request:
        if status := status_of(request.code):
            leave(status)
    except BaseException as error:
        _show(error)
        leave_raised(type(error))
    tell("done")


def _run(arguments: list[str]) -> None:
    as_module = arguments[0] == "-m"
    sys.argv = arguments[as_module:]
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if as_module else os.path.dirname(os.path.abspath(sys.argv[0]))
    if as_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


def _show(error: BaseException) -> None:
    """Print it as Python would have, without the frames of this file."""
    shown: TracebackType | None = error.__traceback__
    while shown is not None and shown.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        shown = shown.tb_next
    error.__traceback__ = shown
    try:
        sys.excepthook(type(error), error, shown)
    except Exception:
        traceback.print_exception(type(error), error, shown)


def _die_with(launcher: int) -> None:
    """Have this process killed when the launcher is gone, however it went."""
    if sys.platform == "linux":
        import ctypes

        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_wait_for_the_end_of, args=(launcher,), daemon=True).start()
    if os.getppid() != launcher:  # gone before
        os._exit(RAISED)


def _wait_for_the_end_of(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
