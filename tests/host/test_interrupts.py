"""No public face: Ctrl-C that waits until it is asked for."""

import signal
import threading

import pytest

from paraxis._host import interrupts


def test_one_is_noted_and_told_to_who_asks() -> None:
    with interrupts.asked_for() as asked:
        assert not asked()
        signal.raise_signal(signal.SIGINT)
        assert asked()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_one_takes_effect_at_once_and_one_that_nobody_asked_for_at_the_end() -> None:
    reached = []

    def interrupted(times: int) -> None:
        with interrupts.asked_for():
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
                reached.append(times)

    for times in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            interrupted(times)
        assert reached.count(times) == 1
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_within_another_one_the_same_is_asked_for() -> None:
    with interrupts.asked_for() as outer:
        signal.raise_signal(signal.SIGINT)
        with interrupts.asked_for() as inner:
            assert inner()
        assert outer()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_another_handler_and_another_thread_are_left_alone() -> None:
    found = []

    def handler(number: int, frame: object) -> None:
        found.append(number)

    before = signal.signal(signal.SIGINT, handler)
    try:
        assert not interrupts.can_be_asked_for()
        with interrupts.asked_for() as asked:
            signal.raise_signal(signal.SIGINT)
            assert not asked()
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert found == [signal.SIGINT]
    thread = threading.Thread(target=lambda: found.append(interrupts.can_be_asked_for()))
    thread.start()
    thread.join()
    assert found[-1] is False
