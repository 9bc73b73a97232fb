"""Ctrl-C waits for the end of a block, and nothing else about it changes."""

import signal
import threading

import pytest

from paraxis._core import interrupts


def test_an_interrupt_waits_for_the_end_of_the_block() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with interrupts.deferred():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            done.append("the block")
        done.append("after it")
    assert done == ["the block"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_an_interrupt_nothing_happens_and_errors_come_through() -> None:
    with interrupts.deferred(), interrupts.deferred():
        pass
    with pytest.raises(ValueError, match="the user's own"), interrupts.deferred():
        raise ValueError("the user's own")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_users_own_handler_is_called_and_put_back() -> None:
    calls: list[int] = []
    handler = lambda number, frame: calls.append(number)  # noqa: E731
    before = signal.signal(signal.SIGINT, handler)
    try:
        with interrupts.deferred():
            signal.raise_signal(signal.SIGINT)
            assert calls == []
        assert calls == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with interrupts.deferred():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_are_not_held_up() -> None:
    seen: list[bool] = []

    def work() -> None:
        before = signal.getsignal(signal.SIGINT)
        with interrupts.deferred():
            seen.append(signal.getsignal(signal.SIGINT) is before)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [True]
