"""Launches for the tests: in this process, or of the command, which signals are sent to; neither outlives its time."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paraxis.launch import launch

ROOT = Path(__file__).parents[2]
TRAINING = str(Path(__file__).with_name("_training.py"))
COMMAND = [sys.executable, "-c", "import sys; from paraxis.cli import main; sys.exit(main())"]
_TIMEOUT = 150.0

Launch = Callable[..., tuple[int, str, str]]


def plain_environment() -> dict[str, str]:
    """The environment without what the tests' own JAX was told."""
    ours = ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES")
    return {name: value for name, value in os.environ.items() if name not in ours}


def started(*arguments: object, **variables: str) -> subprocess.Popen[str]:
    """A Python process that finds the project and its tests."""
    env = plain_environment() | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])} | variables
    command, pipe = [sys.executable, *map(str, arguments)], subprocess.PIPE
    streams: dict[str, Any] = {"stdin": pipe, "stdout": pipe, "stderr": pipe, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=env, process_group=0, **streams)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Launch:
    """``launched(script, *arguments, n=2, …)``: the exit status, and what came out on stdout and stderr."""
    for name in set(os.environ) - set(plain_environment()):
        monkeypatch.delenv(name)

    def run(
        script: str, *arguments: str, n: int = 2, timeout: float = _TIMEOUT, **options: Any
    ) -> tuple[int, str, str]:
        capfd.readouterr()
        timer = threading.Timer(timeout, lambda: [os.kill(os.getpid(), signal.SIGTERM) for _ in range(2)])
        timer.start()
        try:
            status = launch(script, arguments, num_processes=n, **options)
        finally:
            timer.cancel()
        out, error = capfd.readouterr()
        return status, out, error

    return run


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A port that no other process is given. JAX's coordinator has it all the same, as it shares what it listens at."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


class Running:
    """The command, running; what it has written is in two files."""

    def __init__(self, directory: Path, arguments: tuple[str, ...]) -> None:
        self._out, self._error = directory / "out.txt", directory / "error.txt"
        with self._out.open("wb") as out, self._error.open("wb") as error:
            self.process = subprocess.Popen(
                [*COMMAND, "launch", *arguments], stdout=out, stderr=error, env=plain_environment(), process_group=0
            )

    @property
    def out(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def error(self) -> str:
        return self._error.read_text(errors="replace")

    def wait_for(self, text: str, times: int = 1) -> None:
        wait_until(lambda: self.out.count(text) >= times or self.process.poll() is not None)
        assert self.out.count(text) >= times, self.out + self.error

    def end(self) -> int:
        return self.process.wait(timeout=_TIMEOUT)


@contextlib.contextmanager
def running(directory: Path, *arguments: str) -> Iterator[Running]:
    """``paraxis launch`` with these arguments; it is gone afterwards, and its ranks with it."""
    run = Running(directory, arguments)
    try:
        yield run
    finally:
        run.process.kill()
        run.process.wait()


def wait_until(condition: Callable[[], bool], seconds: float = _TIMEOUT) -> None:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it is not a dead one that nobody has asked for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
