"""``launch``: one script in several processes on this machine, which live and end together."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator

from paraxis._calls import arguments
from paraxis.errors import ProcessError
from paraxis.launch import _reasons
from paraxis.launch._options import Options
from paraxis.launch._output import Screen
from paraxis.launch._ranks import Group
from paraxis.launch._reasons import Failure
from paraxis.launch._watchdog import MUCH

OUTPUT_LOST = 74
"""The exit status, that of the C library's ``EX_IOERR``, if all ranks did well and what they wrote was lost."""
_LOOK_EVERY = 0.02
# After the first failure, the time that others have to fail, too: which tells what was cause and what effect.
_SETTLE = 0.3
# Those that wait for one that is stuck are found stuck as well, and print their stacks.
_ALSO_STUCK = 2.0
_STOPPED_PATIENCE = 5.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@arguments.named()
def launch(options: Options) -> int:
    """Run a script in several processes on this machine, and wait until they end.

    Each process (rank) has its number in the environment, for :func:`paraxis.initialize`. This process prints their
    output line by line, marked by rank. When one rank fails, the others are ended within about a second: when it was
    killed by a signal, raised an exception, called ``sys.exit``, was stopped for five seconds, is stuck, or has
    finished while the others wait for it. Child processes of the ranks end with them. If this process is killed, the
    ranks die too.

    SIGINT, SIGTERM and SIGHUP are passed on to the ranks as one SIGTERM, which makes a training loop save and exit, at
    the same step in all ranks. A second signal kills the ranks, and so does the end of ``grace`` seconds.

    Args:
        options: what to run, and how.

    Returns:
        The exit status: 0 if that of every rank is 0, also after a signal; otherwise that of the rank that failed
        first for a reason of its own, or 128 + the signal that ended it. 74 if all ranks succeeded but their output
        could not be written, as on a full disk; that the reader of a pipe has left is no error.

    Raises:
        ProcessError: if ``options`` is not an :class:`Options`.

    Communicates: nothing itself; see :func:`paraxis.initialize`.

    Example:
        >>> import pathlib, tempfile
        >>> from paraxis.launch import Options, launch
        >>> script = pathlib.Path(tempfile.mkdtemp(), "train.py")
        >>> _ = script.write_text("import os; print('hello from', os.environ['PARAXIS_PROCESS'])")
        >>> launch(Options(1, str(script)))
        [0] hello from 0
        0
    """
    if not isinstance(options, Options):
        got = arguments.described(options)
        raise ProcessError(f"launch: options must be a launch.Options, got {got}; write launch(Options(2, 'train.py'))")
    screen = Screen()
    with _signals() as received:
        attempt = 0
        while (failure := _run(options, attempt, received, screen)) and not received and attempt < options.restarts:
            attempt += 1
            screen.say(f"starting all {options.num_processes} again: restart {attempt} of {options.restarts}")
    if failure is None:
        return OUTPUT_LOST if screen.is_cut_off else 0
    return failure.status


def _run(options: Options, attempt: int, received: list[int], screen: Screen) -> Failure | None:
    """Return one attempt, to its end."""
    with Group(options, attempt, screen) as group:
        failure = _watch(group, options, received, screen)
    # Now that they have ended, all their lines are out.
    if failure is not None:
        screen.say(_report(failure, group.ranks[failure.rank].last_lines()))
    elif received:
        screen.say(f"stopped by {_name(received)}: all {options.num_processes} ranks exited with status 0")
    return failure


def _watch(group: Group, options: Options, received: list[int], screen: Screen) -> Failure | None:
    """Look after the ranks until all have ended with 0, or they have to be ended: then why."""
    deadline, before = None, time.monotonic()
    while True:
        before, late = time.monotonic(), time.monotonic() - before - _LOOK_EVERY
        if late > MUCH:
            for rank in group.ranks:
                rank.excuse(late)
            deadline = None if deadline is None else deadline + late
        failure = _failure(group, options)
        if failure is not None:
            return failure
        if not any(rank.runs for rank in group.ranks):
            return None
        if received and deadline is None:
            deadline = time.monotonic() + options.grace
            screen.say(f"{_name(received)}: asking the ranks to save and exit, within {options.grace:g} s")
            group.send(signal.SIGTERM)
        if deadline is not None and (len(received) > 1 or time.monotonic() > deadline):
            return _killed(group, options, received)
        time.sleep(_LOOK_EVERY)


def _failure(group: Group, options: Options) -> Failure | None:
    """Tell why the ranks have to be ended, if they have."""
    endings, now = group.look(), time.monotonic()
    if any(ending.failed for ending in endings):
        if any(ending.stuck for ending in endings):
            _look_for(group, _ALSO_STUCK)
        _look_for(group, _SETTLE)
        return _reasons.failure_of(group.look())
    for rank, ending in zip(group.ranks, endings, strict=True):
        if rank.stopped_at is not None and now - rank.stopped_at > _STOPPED_PATIENCE:
            return _reasons.stopped_failure(ending, _STOPPED_PATIENCE)
    left = [rank.left_at for rank in group.ranks if rank.left_at is not None]
    if left and now - min(left) > options.grace:
        return _reasons.early_failure(endings, options.grace)
    return _reasons.absent_failure(endings)


def _look_for(group: Group, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and any(rank.runs for rank in group.ranks):
        time.sleep(_LOOK_EVERY)
        group.look()
    for rank in group.ranks:
        if not rank.runs:
            rank.finish_output()


def _killed(group: Group, options: Options, received: list[int]) -> Failure:
    left = [ending for ending in group.look() if ending.status is None]
    why = f"a second {_name(received[1:])}" if len(received) > 1 else f"{options.grace:g} s (--grace) have passed"
    message = f"killed {', '.join(f'rank {ending.rank}' for ending in left)} before it exited: {why}"
    return Failure(message, 128 + received[0], left[0].rank)


def _report(failure: Failure, lines: tuple[str, ...]) -> str:
    """Return what is said of a failure, with the last lines of the rank."""
    if not lines:
        return f"{failure.message}\nrank {failure.rank} wrote nothing"
    last = "\n".join(f"    {line}" for line in lines)
    return f"{failure.message}\nthe last lines of rank {failure.rank}:\n{last}"


def _name(received: list[int]) -> str:
    return signal.Signals(received[0]).name


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect the signals that come, in place of their effect; not those that are ignored, as under ``nohup``."""
    received: list[int] = []
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, lambda number, frame: received.append(number))
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
