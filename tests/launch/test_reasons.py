"""No public face: launches that end in each of these ways, at these times, would take a minute.

Which rank is named, and what an exit status is said to mean.
"""

import re
import signal
from typing import Any

import pytest

from paraxis.launch._reasons import Ending, absent_failure, early_failure, failure_of, meaning

BUG = ("Traceback (most recent call last):", "ValueError: a bug")
PEER = (
    "Traceback (most recent call last):",
    "jax.errors.JaxRuntimeError: UNKNOWN: Gloo all-reduce failed: [gloo/tcp/pair.cc:547] Connection closed by peer",
)


def together(rank: int, status: int | None = None, at: float = 0.0, **more: Any) -> Ending:
    return Ending(rank, status, at, **{"joining": True, "joined": True, "raised": status == 70, **more})


def test_as_long_as_nobody_fails_there_is_no_reason() -> None:
    assert failure_of([together(0), together(1, 0), Ending(2)]) is None


@pytest.mark.parametrize(
    ("endings", "rank", "status"),
    [
        # Who was first, whatever its number.
        ([together(0, 70, 2.0, lines=BUG), together(1, 70, 1.0, lines=BUG)], 1, 70),
        # Effects are no reasons, even if they were seen first.
        ([together(0, 70, 1.0, lines=PEER), together(1, 70, 2.0, lines=BUG)], 1, 70),
        ([together(0, -6, 1.0), together(1, -9, 2.0), together(2)], 1, 137),
        ([together(0, -6, 1.0), together(1, 70, 1.1, lines=PEER), together(2, 3, 1.2)], 2, 3),
        # If there are only effects, the first.
        ([together(0, -6, 2.0), together(1, -6, 1.0)], 1, 134),
        ([together(0, 70, 2.0, lines=PEER), together(1, 70, 1.0, lines=PEER)], 1, 70),
    ],
)
def test_the_rank_that_failed_first_for_its_own_reason_is_named(endings: list[Ending], rank: int, status: int) -> None:
    failure = failure_of(endings)
    assert failure is not None
    assert (failure.rank, failure.status) == (rank, status)
    assert failure.message.startswith(f"rank {rank} ")


def test_those_that_failed_in_the_same_way_are_told() -> None:
    endings = [together(k, 70, k, lines=BUG) for k in range(3)] + [together(3, 70, 3.0, lines=PEER)]
    failure = failure_of(endings)
    assert failure is not None
    assert failure.message == "rank 0 raised an exception; so did ranks 1 and 2 after it"


def test_who_did_not_come_is_named_and_not_who_waited() -> None:
    waited = Ending(0, -6, 1.0, joining=True)
    failure = failure_of([waited, Ending(1), Ending(2, joining=True), Ending(3)])
    assert failure is not None
    assert failure.rank == 1
    assert failure.message.startswith("ranks 1 and 3 did not join")
    failed_itself = failure_of([waited, Ending(1, 70, 0.5, raised=True, lines=BUG)])
    assert failed_itself is not None
    assert failed_itself.message == "rank 1 raised an exception"


def test_leaving_with_0_is_a_failure_only_where_others_wait() -> None:
    waits, works = Ending(0, joining=True), Ending(0)
    assert absent_failure([works, Ending(1, 0, done=True)]) is None
    assert absent_failure([waits, Ending(1)]) is None
    assert absent_failure([waits, Ending(1, done=True)]) is not None
    assert absent_failure([waits, Ending(1, 0)]) is not None
    assert early_failure([works, Ending(1, 0, done=True)], 30) is None
    assert early_failure([together(0), together(1, done=True)], 30) is not None
    assert early_failure([together(0), together(1, 0)], 30) is not None
    assert early_failure([together(0, done=True), together(1, done=True)], 30) is None


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (0, "exited with status 0 before the end of its script"),
        (-9, "killed .* out of memory"),
        (-6, "aborted .* another process is gone"),
        (-11, "crashed in compiled code"),
        (-7, "disk or shared memory is full"),
        (-15, "ended by SIGTERM before it could save"),
        (-int(signal.SIGUSR2), r"ended by signal \d+ \(SIGUSR2\)"),
        (-40, "ended by signal 40"),
        (5, "exited with status 5"),
        # A script's own, which has told of nothing.
        (70, "exited with status 70"),
        (79, "exited with status 79"),
        (130, "exited with status 130"),
    ],
)
def test_a_status_is_put_into_words(status: int, words: str) -> None:
    assert re.search(words, meaning(Ending(0, status)))


def test_what_a_rank_told_is_believed() -> None:
    assert meaning(Ending(0, 70, raised=True)) == "raised an exception"
    assert meaning(Ending(0, 130, interrupted=True)) == "was interrupted (KeyboardInterrupt)"
    stuck = failure_of([together(0, 79, 1.0, stuck_at="a.py:1"), together(1, 79, 1.0)])
    assert stuck is not None
    assert stuck.message.startswith("no progress: rank 0 at a.py:1; the rank that")


def test_a_script_that_leaves_with_the_status_of_a_stuck_rank_is_not_stuck() -> None:
    failure = failure_of([together(0), together(1, 79, 1.0, lines=("a wrong setting",))])
    assert failure is not None
    assert (failure.message, failure.status) == ("rank 1 exited with status 79", 79)


def test_who_left_with_0_before_its_end_is_named_and_not_who_failed_without_it() -> None:
    left, failed = together(1, 0, 1.0), together(0, 70, 2.0, lines=BUG)
    for others in ([failed], [together(0, 70, 2.0, lines=PEER)], [together(0, -6, 2.0)]):
        failure = failure_of([*others, left])
        assert failure is not None
        assert (failure.rank, failure.status) == (1, 1)
        assert failure.message.startswith("rank 1 exited with status 0 before the end of its script")
    # Not so one that came to its end, failed later, or has nothing to do with the others.
    for other in (together(1, 0, 1.0, done=True), together(1, 0, 3.0), Ending(1, 0, 1.0)):
        failure = failure_of([failed, other])
        assert failure is not None
        assert failure.message == "rank 0 raised an exception"
