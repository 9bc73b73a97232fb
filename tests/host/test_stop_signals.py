"""A run stops after a step when a signal asks it to; with signals, all is as before when it is over."""

import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import paraxis as px

BOTH = (signal.SIGTERM, signal.SIGINT)


def run(at_step_2: Callable[[], Any], steps: int = 10) -> px.train.Fitted:
    """A run of steps that count; ``at_step_2`` is called in the second of them."""

    def step(number: int, batch: Any) -> tuple[int, dict[str, float]]:
        if number == 1:
            at_step_2()
        return number + 1, {"loss": 0.0}

    return px.fit(0, step, [np.zeros(1)] * steps, steps=steps, progress=False)


@pytest.mark.parametrize("number", BOTH)
def test_a_signal_asks_to_stop_and_its_handler_is_back_afterwards(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    before = {one: signal.getsignal(one) for one in BOTH}
    with pytest.raises(px.TrainingStopped) as stopped:
        run(lambda: signal.raise_signal(number))
    assert stopped.value.state == 2
    name = "Ctrl-C" if number is signal.SIGINT else "SIGTERM"
    assert f"px.fit: {name}: stopped after step 2," in capfd.readouterr().err
    assert {one: signal.getsignal(one) for one in BOTH} == before
    assert run(lambda: None).state == 10


def test_a_second_ctrl_c_interrupts_at_once() -> None:
    done: list[str] = []

    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        done.append("the first")
        signal.raise_signal(signal.SIGINT)
        done.append("the second")

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
