"""No public face: which process this is, what all were given, and signals, as runs see them."""

import signal

import numpy as np
import pytest

import paraxis as px
from paraxis._host import processes

pytestmark = pytest.mark.floor

X, Y = np.random.default_rng(0).normal(size=(5000, 40)), np.arange(5000)  # X is more than is read whole


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        (None, {}),
        ("y", {"y": np.where(Y == 77, 0, Y)}),
        ("y", {"y": Y.astype("int32")}),
        ("X", {"X": np.vstack([X[:-1], X[:1]])}),
        (r"later\[19\]", {"later[19]": np.zeros(19)}),
    ],
)
def test_processes_compare_their_arrays_by_name(
    name: str | None, changed: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = {"X": X, "y": Y, **{f"later[{i}]": np.ones(i) for i in range(20)}}
    told: list[str] = []
    monkeypatch.setattr(processes.jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes, "reports", lambda text: told.append(text) or {0: text})
    processes.require_same("px.fit", mine | changed, "give all the same")
    assert len(told[0].encode()) <= 400
    monkeypatch.setattr(processes, "reports", lambda text: {0: text, 1: told[0]})
    if name is None:
        processes.require_same("px.fit", mine, "give all the same")
        return
    with pytest.raises(px.DataError, match=rf"px\.fit: {name} is another one in process 1 than .*; give all the same"):
        processes.require_same("px.fit", mine, "give all the same")


def test_an_error_without_words_is_told_to_the_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(processes, "reports", told.append)
    with pytest.raises(AssertionError), processes.together("px.fit"):
        raise AssertionError
    assert told == ["AssertionError: "]


def fit(*signals: signal.Signals) -> px.train.Fitted:
    """Ten steps that count; the signals come in the second of them."""

    def step(number: int, batch: None) -> tuple[int, float]:
        for each in signals if number == 1 else ():
            signal.raise_signal(each)
        return number + 1, 0.0

    return px.fit(0, step, [np.zeros(1)], steps=10, progress=False)


def test_a_second_ctrl_c_interrupts_at_once() -> None:
    with pytest.raises(KeyboardInterrupt):
        fit(signal.SIGINT, signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_ctrl_c_that_the_shell_wants_ignored_is_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert fit(signal.SIGINT, signal.SIGINT).state == 10
    finally:
        signal.signal(signal.SIGINT, before)
