"""A lone process: it is first, waits for nobody, and stops when a signal asks it to."""

import os
import signal
import threading
import time

import pytest

from paraxis._core import processes
from paraxis._core.processes import StopSignal


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_to_stop_and_its_handler_is_back_afterwards(number: signal.Signals) -> None:
    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)}
    with StopSignal() as stop:
        assert stop.asked() is None
        signal.raise_signal(number)
        assert stop.asked() == number.name
        assert stop.asked() == number.name
    assert {one: signal.getsignal(one) for one in before} == before
    with StopSignal() as another:
        assert another.asked() is None


def test_a_second_ctrl_c_interrupts_at_once() -> None:
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.asked() == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_handlers_are_back_after_an_error_and_nesting_gives_each_its_own() -> None:
    with pytest.raises(ValueError, match="the user's own"), StopSignal():
        raise ValueError("the user's own")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with StopSignal() as outer:
        with StopSignal() as inner:
            os.kill(os.getpid(), signal.SIGTERM)
            assert inner.asked() == "SIGTERM"
        assert outer.asked() is None


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopSignal() as stop:
            signal.raise_signal(signal.SIGINT)
            assert stop.asked() is None
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_in_another_thread_signals_are_left_alone() -> None:
    seen: list[object] = []

    def work() -> None:
        with StopSignal() as stop:
            seen.extend([signal.getsignal(signal.SIGINT), stop.asked()])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler, None]
