"""The reason why a launch failed: the rank that failed by itself, and what its end means. All others fail after it."""

import dataclasses
import re
import signal
from collections.abc import Sequence

from paraxis.launch._run import INTERRUPTED, RAISED
from paraxis.launch._watchdog import STUCK


@dataclasses.dataclass(frozen=True)
class Ending:
    """A rank's progress, now or when it ended.

    Attributes:
        rank: its number.
        status: its exit status, below 0 a signal; ``None``: it runs.
        ended_at: when it ended, in seconds of a clock.
        joining: whether it has called ``px.initialize()``.
        joined: whether that has returned.
        done: whether its script has come to its end.
        raised: whether it told of an exception that nobody caught.
        interrupted: whether it told of a ``KeyboardInterrupt``.
        stuck_at: where its main thread was when its watchdog saw no progress; ``None``: it told of nothing like that.
        lines: its last lines, without the log of XLA and Gloo.
    """

    rank: int
    status: int | None = None
    ended_at: float = 0.0
    joining: bool = False
    joined: bool = False
    done: bool = False
    raised: bool = False
    interrupted: bool = False
    stuck_at: str | None = None
    lines: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        """Return whether it ended with another status than 0."""
        return self.status not in (None, 0)

    @property
    def left(self) -> bool:
        """Return whether it takes no more steps, and not because it failed."""
        return self.done or self.status == 0

    @property
    def left_early(self) -> bool:
        """Return whether it ended with 0 before its script did, as by ``os._exit(0)``: JAX did not wait for others."""
        return self.status == 0 and not self.done

    @property
    def stuck(self) -> bool:
        """Return whether its watchdog ended it."""
        return self.status == STUCK and self.stuck_at is not None


@dataclasses.dataclass(frozen=True)
class Failure:
    """The reason why the ranks were ended.

    Attributes:
        message: which rank, and why.
        status: the exit status of the launcher.
        rank: the rank.
    """

    message: str
    status: int
    rank: int


# What a rank says that raised an exception only because another one is gone.
_PEER_GONE = re.compile(
    r"Gloo .*fail|NCCL .*(fail|error)|Connection (closed|reset) by peer|coordination ?service|barrier|"
    r"waited .* for the other processes",
    re.IGNORECASE,
)

_MEANINGS = {
    -signal.SIGKILL: "was killed (SIGKILL), by somebody or because the machine ran out of memory",
    -signal.SIGABRT: "was aborted (SIGABRT), as JAX does when another process is gone",
    -signal.SIGSEGV: "crashed in compiled code (SIGSEGV)",
    -signal.SIGBUS: "crashed in compiled code, or the disk or shared memory is full (SIGBUS)",
    -signal.SIGTERM: "was ended by SIGTERM before it could save: before px.initialize(), or without a loop that asks",
}


def meaning(ending: Ending) -> str:
    """Return what an end means, after the name of a rank."""
    status = ending.status
    assert status is not None
    if status == RAISED and ending.raised:
        return "raised an exception"
    if status == INTERRUPTED and ending.interrupted:
        return "was interrupted (KeyboardInterrupt)"
    if ending.left_early:
        return (
            "exited with status 0 before the end of its script, as os._exit(0) does, and the others failed without it"
        )
    if status in _MEANINGS:
        return _MEANINGS[status]
    if status < 0:
        return f"was ended by signal {-status} ({_signal_name(-status)})"
    return f"exited with status {status}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a real-time signal"


def failure_of(endings: Sequence[Ending]) -> Failure | None:
    """Return why a launch failed, if it has: the rank that was first to fail for its own reason."""
    if not any(ending.failed for ending in endings):
        return None
    failed = [ending for ending in endings if ending.failed or (ending.left_early and ending.joining)]
    failed.sort(key=lambda ending: ending.ended_at)
    first = next((ending for ending in failed if not _because_of_another(ending)), failed[0])
    assert first.status is not None
    status = 128 - first.status if first.status < 0 else first.status or 1
    if first.stuck:
        return _stuck_failure([ending for ending in endings if ending.stuck])
    absent = [ending for ending in endings if not ending.joining]
    if first.joining and not first.joined and _because_of_another(first) and absent:
        message = f"{_ranks(absent)} did not join: px.initialize() was not called there, and the others waited for it"
        return Failure(message, status, absent[0].rank)
    message = f"rank {first.rank} {meaning(first)}"
    own = [ending for ending in failed if ending is not first and not _because_of_another(ending)]
    if alike := [ending for ending in own if ending.status == first.status]:
        message += f"; so did {_ranks(alike)} after it"
    return Failure(message, status, first.rank)


def _stuck_failure(stuck: Sequence[Ending]) -> Failure:
    """Return those that are stuck, by where they are: the odd one out is at fault, all others wait for it."""
    places: dict[str, list[Ending]] = {}
    for ending in stuck:
        places.setdefault(ending.stuck_at or "", []).append(ending)
    ordered = sorted(places.items(), key=lambda item: len(item[1]))
    where = "; ".join(f"{_ranks(there)} at {place or 'an unknown place'}" for place, there in ordered)
    return Failure(
        f"no progress: {where}; the rank that is not in a collective holds up the others", STUCK, ordered[0][1][0].rank
    )


def _because_of_another(ending: Ending) -> bool:
    if ending.status == -signal.SIGABRT:
        return True
    # The last line of a traceback names the exception; JAX's own messages go on for some lines.
    return ending.status == RAISED and ending.raised and any(map(_PEER_GONE.search, ending.lines[-6:]))


def absent_failure(endings: Sequence[Ending]) -> Failure | None:
    """Return a failure if a rank has finished without ``px.initialize()``, where others wait for it in vain."""
    waiting = [ending for ending in endings if ending.joining and not ending.joined and ending.status is None]
    absent = [ending for ending in endings if ending.left and not ending.joining]
    if not (waiting and absent):
        return None
    message = f"{_ranks(absent)} exited with status 0 without px.initialize(), where {_ranks(waiting)} waited for it"
    return Failure(message, 1, absent[0].rank)


def early_failure(endings: Sequence[Ending], seconds: float) -> Failure | None:
    """Return a failure if a rank finished so many seconds ago, and others go on without it."""
    early = [ending for ending in endings if ending.left and ending.joined]
    others = [ending for ending in endings if not ending.left and ending.status is None]
    if not (early and others):
        return None
    message = (
        f"{_ranks(early)} exited with status 0, and {_ranks(others)} still ran {seconds:g} s later: if that was useful "
        "work, write --grace with more seconds; otherwise all ranks must take the same steps"
    )
    return Failure(message, 1, early[0].rank)


def stopped_failure(ending: Ending, seconds: float) -> Failure:
    """Return a rank that was stopped, and not continued, so many seconds ago."""
    message = f"rank {ending.rank} was stopped (SIGSTOP) {seconds:g} s ago, and all others wait for it"
    return Failure(message, 1, ending.rank)


def _ranks(endings: Sequence[Ending]) -> str:
    numbers = [str(ending.rank) for ending in endings]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"
