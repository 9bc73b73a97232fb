"""A bound for the CPU time of a test of every day, and of processes that it starts.

CPU time, since on a machine that others use as well the time on the clock says little.
"""

import os
from collections.abc import Generator
from typing import Any

import pytest

MOST = 20.0  # seconds of a test without the mark `slow`


def _seconds() -> float:
    """This process's CPU time so far, with that of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fail a test that would otherwise pass."""
    begin = _seconds()
    result = yield
    took = _seconds() - begin
    if took > MOST and item.get_closest_marker("slow") is None and "COVERAGE_RUN" not in os.environ:
        pytest.fail(f"takes {took:.1f} s of CPU, more than {MOST:.0f}; make it cheaper, or mark it slow")
    return result
