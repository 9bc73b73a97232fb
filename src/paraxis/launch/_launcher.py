"""``launch``: one script in several processes on this machine, which start and end together."""

import contextlib
import glob
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from paraxis._core import check
from paraxis._host import processes, threads
from paraxis.errors import DeviceError
from paraxis.launch import _rank
from paraxis.launch._initialize import ATTEMPT, COORDINATOR, GRACE

_Ended = queue.SimpleQueue[tuple[int, int]]


def launch(
    script: str,
    arguments: Sequence[str] = (),
    *,
    num_processes: int,
    module: bool = False,
    devices: int | None = None,
    restarts: int = 0,
    rejoins: int | None = None,
    grace: float = 30.0,
) -> int:
    """Run a script in several processes on this machine, and wait until they end.

    Each process (rank) finds its number in the environment, for :func:`paraxis.initialize`. Their output is printed
    line by line, marked by rank. The first rank that exits with another status than 0 is named as the cause, and the
    others are killed at once, with their child processes. If this process is killed, the ranks end within a second.

    SIGINT, SIGTERM and SIGHUP are passed on as one SIGTERM, at which ``px.fit`` saves and exits, after the same step in
    all ranks. A second signal kills the ranks, and so does the end of ``grace`` seconds.

    Args:
        script: a Python file, or a directory with ``__main__.py``.
        arguments: the script's arguments.
        num_processes: the number of ranks.
        module: whether ``script`` is the name of a module, as in ``python -m``.
        devices: the number of devices of each rank: simulated ones on a CPU, else that many of the machine's GPUs;
            ``None``: the visible NVIDIA GPUs are divided evenly among the ranks.
        restarts: how often all ranks are started again after a failure, to resume from the script's checkpoint.
        rejoins: how often, in all, a rank that has failed is started again alone, of a script with
            ``px.initialize(lost="continue")``; after that, the others go on without. Rank 0 must live, and its status
            is the run's. ``None``: a rank that fails ends the others.
        grace: seconds to save and exit after a signal, or to finish after another rank has.

    Returns:
        The exit status: 0 if that of every rank is; else that of the rank that failed first, or 128 + its signal.

    Example:
        >>> import pathlib, tempfile
        >>> from paraxis.launch import launch
        >>> script = pathlib.Path(tempfile.mkdtemp(), "train.py")
        >>> _ = script.write_text("import os; print('hello from', os.environ['PARAXIS_PROCESS'])")
        >>> launch(str(script), num_processes=1)
        [0] hello from 0
        0
    """
    check.count("launch", "num_processes", num_processes, error=DeviceError)
    command = [sys.executable, _rank.__file__, "module" if module else "script", script, *arguments]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = len(glob.glob("/dev/nvidia[0-9]*") if visible is None else visible.replace(",", " ").split())
    if devices is None and gpus % num_processes:
        _say(f"{gpus} GPUs are no multiple of -n {num_processes}: some are idle, or missing")
    status, received = 0, list[int]()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    with processes.handling(dict.fromkeys(numbers, lambda number, frame: received.append(number))):
        for attempt in range(restarts + 1):
            if attempt:
                _say(f"starting all {num_processes} ranks again: restart {attempt} of {restarts}")
            with socket.socket() as held:  # a free port, which JAX's coordinator shares: it sets SO_REUSEPORT, too
                held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                held.bind(("127.0.0.1", 0))
                address = ":".join(map(str, held.getsockname()))
                common = {COORDINATOR: address, ATTEMPT: f"{attempt}", GRACE: f"{grace}"}
                of_ranks = (_variables(rank, num_processes, devices, gpus) for rank in range(num_processes))
                environments = [os.environ | common | variables for variables in of_ranks]
                status = _run(command, environments, received, grace, rejoins)
            if status == 0 or received:
                break
    return status


def _variables(rank: int, num_processes: int, devices: int | None, gpus: int) -> dict[str, str]:
    variables = {processes.NUM_PROCESSES: f"{num_processes}", processes.PROCESS: f"{rank}"}
    variables |= {processes.LAUNCHER: f"{os.getpid()}", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    # The last bits of results depend on the number of XLA's threads: the same for any number of ranks.
    variables |= threads.variables(devices)
    if num_processes > 1 and (devices or gpus) and "JAX_LOCAL_DEVICE_IDS" not in os.environ:
        each = devices or max(1, gpus // num_processes)
        variables["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, range(rank * each, (rank + 1) * each)))
    return variables


def _run(
    command: list[str], environments: Sequence[dict[str, str]], received: list[int], grace: float, rejoins: int | None
) -> int:
    """Run the ranks until all have exited with 0, or one has failed, or their time is over. Return the status."""
    ended, ranks, copies = _Ended(), dict[int, subprocess.Popen[str]](), list[threading.Thread]()

    def start(rank: int) -> None:
        ranks[rank] = process = subprocess.Popen(
            command,
            env=environments[rank],
            process_group=0,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        )
        mark = f"[{rank:>{len(str(len(environments) - 1))}}] "
        both = [_in_thread(_copy, *pair, mark) for pair in ((process.stdout, sys.stdout), (process.stderr, sys.stderr))]
        _in_thread(_tell_end, rank, process, both, ended)
        copies.extend(both)

    def outlive(rank: int, status: int) -> bool:
        """Return whether the others go on, and start this rank again alone if that is left."""
        nonlocal rejoins
        if rank == 0 or rejoins is None or received:
            return False
        again = rejoins > 0 and ranks[0].poll() is None
        _say(f"rank {rank} ended with {_how(status)}; {'it is started again' if again else 'the others go on'}")
        _kill(ranks[rank])
        if again:
            rejoins -= 1
            environments[rank][ATTEMPT] = f"{int(environments[rank][ATTEMPT]) + 1}"
            start(rank)
        return True

    try:
        for rank in range(len(environments)):
            start(rank)
        return _wait(ranks, ended, received, grace, outlive)
    finally:
        for process in ranks.values():
            _kill(process)
        for copy in copies:
            copy.join(timeout=1)  # a child process in a session of its own may hold the stream


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tell_end(rank: int, process: subprocess.Popen[str], copies: Sequence[threading.Thread], ended: _Ended) -> None:
    status = process.wait()
    for copy in copies:  # print the rank's last lines before the launcher names it
        copy.join(timeout=1)
    ended.put((rank, status))


def _in_thread(function: Callable[..., Any], *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


def _how(status: int) -> str:
    return f"status {status}" if status > 0 else signal.Signals(-status).name


def _wait(
    ranks: Mapping[int, subprocess.Popen[str]],
    ended: _Ended,
    received: list[int],
    grace: float,
    outlive: Callable[[int, int], bool],
) -> int:
    running, deadline, asked = set(range(len(ranks))), math.inf, False
    while running:
        with contextlib.suppress(queue.Empty):
            rank, status = ended.get(timeout=0.1)
            if status and outlive(rank, status):
                running -= {rank} if ranks[rank].poll() is not None else set()
                continue
            running.discard(rank)
            if status:
                _say(f"rank {rank} ended with {_how(status)}; the others are killed")
                return status if status > 0 else 128 - status
            deadline = min(deadline, time.monotonic() + grace)
        if received and not asked:
            asked, deadline = True, time.monotonic() + grace
            _say(f"{signal.Signals(received[0]).name}: asking the ranks to save and exit, within {grace:g} s")
            for process in ranks.values():
                process.terminate()
        if running and (len(received) > 1 or time.monotonic() > deadline):
            why = "a second signal" if len(received) > 1 else f"{grace:g} s (--grace) have passed"
            _say(f"killed {', '.join(f'rank {rank}' for rank in sorted(running))} before it exited: {why}")
            return 128 + received[0] if received else 1
    return 0


_lock = threading.Lock()


def _copy(source: TextIO, target: TextIO, mark: str) -> None:
    """Write each line of a rank's stream, with its mark, to the launcher's; lose it where that takes no more.

    That Gloo has connected them is said for who asks XLA to say more: ``TF_CPP_MIN_LOG_LEVEL=0``.
    """
    with source:
        for line in source:
            if line.startswith("[Gloo] Rank") and os.environ.get("TF_CPP_MIN_LOG_LEVEL") != "0":
                continue
            try:
                with _lock:
                    target.write(mark + line.removesuffix("\n") + "\n")
                    target.flush()
            except OSError as error:
                with open(os.devnull, "w") as nowhere:
                    os.dup2(nowhere.fileno(), target.fileno())
                if not isinstance(error, BrokenPipeError):
                    _say(f"the output of the ranks cannot be written and is lost: {error}")


def _say(message: str) -> None:
    with _lock, contextlib.suppress(OSError):
        sys.stderr.write(f"paraxis launch: {message}\n")
