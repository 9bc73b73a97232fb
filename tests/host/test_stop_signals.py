"""No public face: a run stops after a step when a signal asks; with signals, all is as before when it is over."""

import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import paraxis as px
from paraxis._host import interrupts


def run(at_step_2: Callable[[], Any]) -> px.train.Fitted:
    """Ten steps that count; ``at_step_2`` is called in the second of them."""

    def step(number: int, batch: Any) -> tuple[int, dict[str, float]]:
        if number == 1:
            at_step_2()
        return number + 1, {"loss": 0.0}

    return px.fit(0, step, [np.zeros(1)], steps=10, progress=False)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_to_stop_and_its_handler_is_back_afterwards(number: signal.Signals) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with pytest.raises(px.TrainingStopped) as stopped:
        run(lambda: signal.raise_signal(number))
    assert stopped.value.state == 2
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert run(lambda: None).state == 10


def test_a_second_ctrl_c_interrupts_at_once() -> None:
    done: list[str] = []

    def twice() -> None:
        for word in ("the first", "the second"):
            signal.raise_signal(signal.SIGINT)
            done.append(word)

    with pytest.raises(KeyboardInterrupt):
        run(twice)
    assert done == ["the first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert run(lambda: signal.raise_signal(signal.SIGINT)).state == 10
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_deferred_interrupt_takes_effect_at_the_end() -> None:
    """No public face: memory that was given away is replaced first."""
    reached = []

    def interrupted() -> None:
        with interrupts.deferred():
            signal.raise_signal(signal.SIGINT)
            reached.append(True)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert reached == [True]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
