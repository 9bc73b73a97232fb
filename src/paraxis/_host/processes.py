"""Agreement among the processes of one computation: who is first, what all have, when all stop; their progress.

Nothing here starts them: ``paraxis.launch`` does. In a lone process each of these is at hand, and does nothing.
"""

import contextlib
import faulthandler
import itertools
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, Self

import jax
import numpy as np

from paraxis._core import arrays, jax_api
from paraxis._host import digests
from paraxis.errors import DataError, DeviceError, StateError


def is_first() -> bool:
    """Return whether this is the process that writes what is written once. Starts JAX's devices."""
    return jax.process_index() == 0


# The variables by which `paraxis.launch` tells a process that it is a rank.
NUM_PROCESSES, PROCESS, LAUNCHER = "PARAXIS_NUM_PROCESSES", "PARAXIS_PROCESS", "PARAXIS_LAUNCHER"


def is_launched() -> bool:
    """Return whether this process is a rank, and not one that a rank has started, which has its variables too."""
    return PROCESS in os.environ and os.environ.get(LAUNCHER, f"{os.getppid()}") == f"{os.getppid()}"


# The rank and the number of processes, as torchrun, Open MPI, and MPICH and Intel MPI tell them.
_OTHERS = (("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))


def launcher() -> tuple[str, str, str] | None:
    """Return the variables of rank and number of a launcher, ours or not, of several processes; and what they say."""
    known = [(PROCESS, NUM_PROCESSES)] if is_launched() else _OTHERS
    for rank, number in known:
        at, of = os.environ.get(rank, ""), os.environ.get(number, "")
        if at.isdigit() and of.isdigit() and int(of) > 1:
            return rank, number, f"{rank}={at} and {number}={of} say that this is one of several processes"
    return None


def require_joined(what: str) -> None:
    """Refuse to work alone, and write where others do, in a rank of ours that has not joined; warn in another's."""
    if (started := launcher()) is None or jax.distributed.is_initialized():
        return
    _, number, facts = started
    text = (
        f"{what}: {facts}, but px.initialize() was not called, so each would train alone and write to the same place; "
        f"write px.initialize() at the start, right after the imports"
    )
    if is_launched():
        raise StateError(text)
    warnings.warn(f"{text}, or unset {number} if each is alone", stacklevel=4)


_LONGEST = 400
living: tuple[Any, ...] | None = None
"""The devices of the processes that are not lost; ``None``: all."""
members: Any = None
"""The ``paraxis.launch._lost.Members`` of ``px.initialize(lost="continue")``."""


def reports(text: str) -> dict[int, str]:
    """Return what processes report, by their numbers: each text that is not empty. All processes must call it.

    Communicates: one all-gather of 400 bytes per device, the first of a long text.
    """
    if jax.process_count() == 1:
        return {0: text} if text else {}
    padded = np.frombuffer(text.encode(errors="replace")[:_LONGEST].ljust(_LONGEST, b"\0"), np.uint8)
    devices = living or tuple(jax.devices())  # a row for each, as processes may have different numbers of them
    rows = arrays.of_processes(np.tile(padded, (jax.local_device_count(), 1)), devices)
    gathered = {device.process_index: row for device, row in zip(devices, arrays.on_host(rows), strict=True)}
    return {number: bytes(row).rstrip(b"\0").decode(errors="ignore") for number, row in gathered.items() if row.any()}


_MOST_COMPARED = 40


def require_same(what: str, values: Mapping[str, Any], instead: str) -> None:
    """Check that each process was given the same arrays, as far as a digest of some of their rows tells.

    ``values``: arrays by the names of arguments, as many in each process; ``instead``: what to give, for the error.
    """
    if jax.process_count() == 1 or members is not None:  # one that comes back would be alone in asking
        return
    of_arguments = {name: digests.of_array(x) for name, x in itertools.islice(values.items(), _MOST_COMPARED)}
    mine = " ".join(digests.of_bytes(f"{name}: {text}".encode())[:8] for name, text in of_arguments.items()) or "none"
    number, report = next((item for item in reports(mine).items() if item[1] != mine), (0, mine))
    if report == mine:
        return
    both = itertools.zip_longest(of_arguments, mine.split(), report.split())
    name = next((name for name, one, other in both if one != other), None) or "data"
    raise DataError(
        f"{what}: {name} is another one in process {number} than in process {jax.process_index()}, which has "
        f"{of_arguments.get(name, 'none')}; {instead}"
    )


@contextlib.contextmanager
def together(what: str) -> Iterator[None]:
    """Around what processes do before they communicate: where one has an error, the others raise, and do not wait."""
    if members is not None:
        yield
        return
    try:
        yield
    except Exception as error:
        reports(f"{type(error).__name__}: {error}")
        raise
    for number, report in reports("").items():
        raise DeviceError(f"{what}: process {number} cannot continue: {report}")


_FIRST_STEP = 600.0  # seconds, at least, for a loop's first step: its first batch is read, and it is compiled

_stuck_after = _renewed = 0.0


def watch(stuck_after: float) -> None:
    """From now on, end this process if a loop takes no step for so many seconds; 0: never."""
    global _stuck_after
    _stuck_after = stuck_after


def begin_progress() -> None:
    _expect_step(max(_stuck_after, _FIRST_STEP))


def note_progress() -> None:
    """Tell the watchdog that a step was done. It waits for the next."""
    if time.monotonic() - _renewed > min(1.0, _stuck_after / 10):
        _expect_step(_stuck_after)


def end_progress() -> None:
    if _stuck_after:
        faulthandler.cancel_dump_traceback_later()


def _expect_step(seconds: float) -> None:
    """After so many seconds, print the stacks of all threads and exit: a collective without its peers has no end."""
    global _renewed
    if _stuck_after:
        _renewed = time.monotonic()
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or sys.stderr)


@contextlib.contextmanager
def handling(handlers: Mapping[int, Callable[[int, FrameType | None], Any]]) -> Iterator[None]:
    """Handle signals within; what handled them before does so again afterwards.

    One that is ignored, as under ``nohup``, stays so, and so does one whose handler is not Python's and could not be
    put back. Outside the main thread, Python handles no signals, so nothing is changed there.
    """
    is_main, before = threading.current_thread() is threading.main_thread(), dict[int, Any]()
    for number, handler in handlers.items() if is_main else ():
        if signal.getsignal(number) not in (None, signal.SIG_IGN):
            before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Within, Ctrl-C is noted and takes effect at the end: memory that was given away is replaced first."""
    noted: list[int] = []
    try:
        with handling({signal.SIGINT: lambda number, frame: noted.append(number)}):
            yield
    finally:
        if noted:
            signal.raise_signal(signal.SIGINT)


# Calls of `StopSignal.asked` in this process. It, and not the loop's own step, is what processes agree on: a second
# loop begins with step 0 again, and would never come to a step that was agreed on in the first.
_calls = itertools.count()
_stopped = False


class StopSignal(contextlib.ExitStack):
    """Within, SIGTERM and SIGINT (Ctrl-C) ask the loop to stop after a step, in all processes after the same one.

    A second Ctrl-C is the usual ``KeyboardInterrupt``.

    With several processes, SIGTERM is JAX's, from ``px.initialize()`` on: it tells the others, and all agree on a
    step, within about a second. A process that was asked to stop so is asked by every later loop too.
    """

    _asked: str | None = None

    def __enter__(self) -> Self:
        from jax._src import distributed  # no public function says whether processes stop together

        self._together = distributed.global_state.preemption_sync_manager is not None
        terminated = {} if jax.distributed.is_initialized() else {signal.SIGTERM: self._terminated}
        self.enter_context(handling({signal.SIGINT: self._interrupted, **terminated}))
        return self

    def asked(self) -> str | None:
        """Return the signal because of which to stop now, if any. Every process calls it once a step or batch.

        Communicates: nothing that is waited for; about 30 µs with several processes.
        """
        global _stopped
        if self._together:
            _stopped = _stopped or jax_api.multihost_utils.reached_preemption_sync_point(next(_calls))
            return "SIGTERM" if _stopped else None
        return self._asked

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if self._asked is not None:
            raise KeyboardInterrupt
        self._asked = "SIGINT"
        if self._together:
            os.kill(os.getpid(), signal.SIGTERM)

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        self._asked = self._asked or "SIGTERM"
