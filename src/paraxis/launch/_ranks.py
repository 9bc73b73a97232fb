"""The processes of one attempt: started together, looked after, and ended together."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Self

from paraxis._host import threads
from paraxis.launch import _output, _run
from paraxis.launch._guardian import Guardian
from paraxis.launch._options import Options
from paraxis.launch._reasons import Ending
from paraxis.launch._variables import LAUNCHER, TELL, Place
from paraxis.launch._watchdog import ALIVE, STUCK


class Rank:
    """One process, in a process group of its own with whatever it starts."""

    def __init__(self, place: Place, options: Options, screen: _output.Screen) -> None:
        self.number = place.process
        self.stopped_at: float | None = None
        self.left_at: float | None = None
        self._said: list[str] = []
        self._heard = b""
        self._alive: tuple[float, float] | None = None
        self._silent = False
        self._ended_at = 0.0
        self._kept = _output.Kept()
        self._told, tell = os.pipe()
        os.set_blocking(self._told, False)
        command = [sys.executable, _run.__file__, *(["-m"] if options.module else []), options.target]
        try:
            self._process = subprocess.Popen(
                [*command, *options.arguments],
                env=environment(place, options, os.environ) | {LAUNCHER: str(os.getpid()), TELL: str(tell)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(tell,),
                process_group=0,
                bufsize=0,
            )
        finally:
            os.close(tell)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        streams = {"out": self._process.stdout, "error": self._process.stderr}
        self._pump = _output.pump(streams, self.number, place.num_processes, screen, self._kept)  # pyright: ignore[reportArgumentType]

    @property
    def group(self) -> int:
        """Its process group."""
        return self._process.pid

    @property
    def runs(self) -> bool:
        """Return whether it is still running."""
        return self._process.returncode is None

    def look(self) -> None:
        """See what became of it since the last look."""
        self._listen()
        if "done" in self._said and self.left_at is None:
            self.left_at = time.monotonic()
        if not self.runs:
            return
        number, status = os.waitpid(self._process.pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
        if number == 0:
            return
        if os.WIFSTOPPED(status):
            self.stopped_at = time.monotonic()
        elif os.WIFCONTINUED(status):
            self.stopped_at = None
        else:
            # Popen's own poll() does not tell of a process that was stopped; so it has to be told of the end.
            self._process.returncode = os.waitstatus_to_exitcode(status)
            self._ended_at = time.monotonic()
            self._listen()
            if self._process.returncode == 0 and self.left_at is None:
                self.left_at = self._ended_at

    def _listen(self) -> None:
        """Hear what it has told."""
        with contextlib.suppress(BlockingIOError):
            *lines, self._heard = (self._heard + os.read(self._told, 4096)).split(b"\n")
            for word in (line.decode(errors="replace") for line in lines):
                if word.startswith(ALIVE):
                    self._alive = time.monotonic(), float(word.removeprefix(ALIVE))
                else:
                    self._said.append(word)
        if self._alive is None or self._silent or "done" in self._said:  # at Python's end, threads stop
            return
        if time.monotonic() - self._alive[0] > self._alive[1]:
            self._silent = True
            self.send(signal.SIGABRT)  # at which faulthandler prints the stacks

    def excuse(self, seconds: float) -> None:
        """Do not count so many seconds, in which nobody could do anything."""
        self.stopped_at = None if self.stopped_at is None else self.stopped_at + seconds
        self.left_at = None if self.left_at is None else self.left_at + seconds
        if self._alive is not None:
            self._alive = self._alive[0] + seconds, self._alive[1]

    def ending(self) -> Ending:
        """Return how far it is."""
        stuck_at = next((word.removeprefix("stuck ") for word in self._said if word.startswith("stuck ")), None)
        if self._silent and stuck_at is None:
            stuck_at = ""
        return Ending(
            self.number,
            status=STUCK if self._silent and self._process.returncode == -signal.SIGABRT else self._process.returncode,
            ended_at=self._ended_at,
            joining="joining" in self._said,
            joined="joined" in self._said,
            done="done" in self._said,
            raised="raised" in self._said,
            interrupted="interrupted" in self._said,
            stuck_at=stuck_at,
            lines=self._kept.lines(),
        )

    def last_lines(self) -> tuple[str, ...]:
        """Return the lines that tell why it ended: its last ones; with XLA's log if JAX aborted it or it has none."""
        aborted = self._process.returncode == -signal.SIGABRT
        return self._kept.lines(logged=aborted) or self._kept.lines(logged=True)

    def send(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self.runs:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def end(self) -> None:
        """Kill it, and whatever of its process group is left, and wait for the end of its output."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        while self.runs:
            self.look()
            time.sleep(0.005)
        self.finish_output()
        if self._told >= 0:
            os.close(self._told)
            self._told = -1

    def finish_output(self) -> None:
        """Wait until its last lines are written. Something that it started may keep its streams open: not for long."""
        self._pump.join(timeout=1)


class Group:
    """All ranks of an attempt."""

    def __init__(self, options: Options, attempt: int, screen: _output.Screen) -> None:
        self.ranks: list[Rank] = []
        self._guardian = Guardian()
        self._port = _held_port()
        coordinator = f"127.0.0.1:{self._port.getsockname()[1]}"
        try:
            for number in range(options.num_processes):
                place = Place(coordinator, options.num_processes, number, attempt, options.grace, options.stuck_after)
                self.ranks.append(Rank(place, options, screen))
                self._guardian.guard(self.ranks[-1].group)
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Self:
        """Nothing more: they run."""
        return self

    def __exit__(self, *_: object) -> None:
        """Leave none behind."""
        for rank in self.ranks:
            rank.send(signal.SIGKILL)
        for rank in self.ranks:
            rank.end()
        self._port.close()
        self._guardian.dismiss()

    def look(self) -> list[Ending]:
        """Return how far each of them is."""
        for rank in self.ranks:
            rank.look()
        return [rank.ending() for rank in self.ranks]

    def send(self, number: int) -> None:
        """Send those that run a signal."""
        for rank in self.ranks:
            rank.send(number)


def _held_port() -> socket.socket:
    """Return a free port on loopback, bound as long as the ranks run, so that nobody else is given it.

    JAX's coordinator listens with ``SO_REUSEPORT``, which lets it have the port all the same.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(("127.0.0.1", 0))
    return held


def environment(place: Place, options: Options, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a rank: the launcher's, the rank's place, and what keeps its numbers reproducible.

    XLA takes as many threads as there are cores or devices, and their number changes the last bits of results; so it
    is the same here however the devices are shared out, and written down where a checkpoint can note it.
    """
    changed = {**variables, **place.written()}
    changed.setdefault("PYTHONUNBUFFERED", "1")
    if options.devices is not None:
        changed["JAX_NUM_CPU_DEVICES"] = str(options.devices)
        changed["XLA_FLAGS"] = threads.not_simulating(changed)
    if "NPROC" not in changed:
        changed.setdefault(threads.VARIABLE, str(threads.advised(options.devices or 1)))
    return changed
