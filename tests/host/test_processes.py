"""No public face: runs ask which process this is, and note their steps, by functions that show nothing of themselves.

A lone process is first, and waits for nobody.
"""

import time

import pytest

import paraxis as px
from paraxis._host import processes


def test_a_lone_process_is_first_and_waits_for_nobody() -> None:
    assert (processes.index(), processes.count(), processes.is_first()) == (0, 1, True)
    processes.barrier("nobody")
    assert processes.reports("") == {}
    assert processes.reports("no room") == {0: "no room"}


def test_progress_is_when_it_was_last_noted() -> None:
    begun = time.monotonic()
    processes.note_progress()
    last = processes.last_progress()
    assert last is not None
    assert begun <= last <= time.monotonic()
    processes.end_progress()
    assert processes.last_progress() is None


def test_what_processes_tell_each_other_before_they_communicate(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(processes, "reports", lambda text: told.append(text) or {1: "ValueError: no"})
    with pytest.raises(AssertionError), processes.together("px.fit"):
        raise AssertionError
    assert told == ["AssertionError: "]
    with (
        pytest.raises(px.ProcessError, match=r"px\.fit: process 1 cannot go on: ValueError"),
        processes.together("px.fit"),
    ):
        pass
