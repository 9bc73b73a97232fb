"""The program of each rank: it runs the user's script, and ends the process at once if the script fails.

At Python's own exit, JAX would wait for the other ranks, and they for this one. Imports the standard library only: a
script may set variables that JAX reads when it is imported.
"""

import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any


def main(kind: str, target: str, *arguments: str) -> None:
    """Run ``target`` as ``kind``, a ``"script"`` or a ``"module"``."""
    threading.Thread(target=_end_with, args=(int(os.environ["PARAXIS_LAUNCHER"]),), daemon=True).start()
    sys.argv = [target, *arguments]
    sys.path[0] = os.getcwd() if kind == "module" else os.path.dirname(os.path.abspath(target))
    try:
        if kind == "module":
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target, run_name="__main__")
    except SystemExit as request:
        if not isinstance(request.code, int | None):
            sys.stderr.write(f"{request.code}\n")
            end(1)
        elif request.code:
            end(request.code)
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
            trace = trace.tb_next
        end_after(sys.excepthook, type(error), error.with_traceback(trace), trace)


def end_after(hook: Callable[..., Any], *error: Any) -> None:
    try:
        hook(*error)
    finally:
        end(1)


def end(status: int) -> None:
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _end_with(launcher: int) -> None:
    """Kill this rank and its child processes once the launcher is gone."""
    while os.getppid() == launcher:
        time.sleep(0.5)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
