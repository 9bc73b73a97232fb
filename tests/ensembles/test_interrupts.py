"""Ctrl-C waits until the members are whole again, and nothing else about it changes."""

import signal
import threading

import jax
import numpy as np
import pytest

import paraxis as px
from tests.ensembles._programs import After


@pytest.fixture
def ens(after: After) -> px.Ensemble:
    """Three ones; each call of a train step on them is followed by what is in ``after``."""
    return px.ensemble(lambda key, one: one, 3, 0, jax.numpy.ones(3))


def double(w: jax.Array) -> jax.Array:
    return 2 * w


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_waits_for_the_end_of_the_block(ens: px.Ensemble, after: After) -> None:
    done: list[str] = []
    after += [interrupt, interrupt, lambda: done.append("the program")]
    with pytest.raises(KeyboardInterrupt):
        ens.train(double)
    after.clear()
    assert done == ["the program"]
    np.testing.assert_array_equal(ens.stacked(), [2, 2, 2])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_users_own_handler_is_called_and_put_back(ens: px.Ensemble, after: After) -> None:
    calls: list[int] = []
    during: list[list[int]] = []
    handler = lambda number, frame: calls.append(number)  # noqa: E731
    before = signal.signal(signal.SIGINT, handler)
    after += [interrupt, lambda: during.append(list(calls))]
    try:
        ens.train(double)
        assert during == [[]]
        assert calls == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        ens.train(double)
        assert during == [[], [signal.SIGINT]]
        assert calls == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_are_not_held_up(ens: px.Ensemble, after: After) -> None:
    seen: list[bool] = []

    def work() -> None:
        before = signal.getsignal(signal.SIGINT)
        after.append(lambda: seen.append(signal.getsignal(signal.SIGINT) is before))
        ens.train(double)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [True]
