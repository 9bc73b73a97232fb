"""Ctrl-C in a step waits until the members are whole again."""

import signal
from typing import Any

import jax
import numpy as np
import pytest

import paraxis as px


def test_an_interrupt_waits_until_the_members_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a program has run, memory has been given away, and what came in its place is not kept yet."""
    jit, when = jax.jit, {"interrupts": False}

    class Jitted:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._run: Any = jit(*args, **kwargs)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            result = self._run(*args, **kwargs)
            if when["interrupts"]:
                signal.raise_signal(signal.SIGINT)
            return result

        def __getattr__(self, name: str) -> Any:
            return getattr(self._run, name)

    monkeypatch.setattr(jax, "jit", Jitted)
    ens = px.ensemble(lambda key, one: one, 3, 0, jax.numpy.ones(3), donate=True)
    for number in range(1, 3):
        when["interrupts"] = True
        with pytest.raises(KeyboardInterrupt):
            ens.train(lambda w: 2 * w)
        when["interrupts"] = False
        np.testing.assert_array_equal(ens.stacked(), np.full(3, 2**number))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
