"""No public face: Ctrl-C that waits until memory that was given away is replaced."""

import signal

import pytest

from paraxis._host import interrupts


def test_one_takes_effect_at_the_end() -> None:
    reached = []

    def interrupted() -> None:
        with interrupts.deferred():
            signal.raise_signal(signal.SIGINT)
            reached.append(True)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert reached == [True]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
