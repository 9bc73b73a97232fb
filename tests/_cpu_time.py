"""Each test's CPU time, processes that it starts included: the ten that take most, and a bound for those of every day.

CPU time, since on a machine that others use as well the time on the clock says little.
"""

import os
from collections.abc import Generator
from typing import Any

import pytest

MOST = 20.0  # seconds of a test without the mark `slow`, what its fixtures take included
NUM_SHOWN = 10
_NAME = "cpu_seconds"  # under which a report carries it


def cpu_seconds() -> float:
    """This process's CPU time so far, with that of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class CpuTime:
    """A plugin of pytest. With pytest-xdist, workers measure, and the process that started them reports."""

    def __init__(self) -> None:
        self._since = cpu_seconds()
        self._seconds: dict[str, float] = {}
        self._slow: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, Any, Any]:
        """Begin to measure where a test begins: what came before is collecting, and waiting for work."""
        self._since = cpu_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Write into the report of a test's setup, call or teardown what it took."""
        report = yield
        now = cpu_seconds()
        report.user_properties.append((_NAME, now - self._since))
        self._since = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up what was measured, here or in a worker."""
        seconds = sum(float(str(value)) for name, value in report.user_properties if name == _NAME)
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + seconds
        if "slow" in report.keywords:
            self._slow.add(report.nodeid)

    def too_slow(self) -> dict[str, float]:
        """The tests that take too long for those of every day."""
        if "COVERAGE_RUN" in os.environ:  # which takes time, too
            return {}
        return {name: seconds for name, seconds in self._seconds.items() if seconds > MOST and name not in self._slow}

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a run that would otherwise pass."""
        if session.exitstatus == pytest.ExitCode.OK and self.too_slow():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Show what took most."""
        if len(self._seconds) > 1:
            terminalreporter.section(f"CPU time, {NUM_SHOWN} slowest of {sum(self._seconds.values()):.0f} s in all")
            for name, seconds in sorted(self._seconds.items(), key=lambda entry: -entry[1])[:NUM_SHOWN]:
                terminalreporter.write_line(f"{seconds:6.1f} s  {name}")
        for name, seconds in self.too_slow().items():
            terminalreporter.write_line(
                f"FAILED {name}: takes {seconds:.1f} s of CPU, more than {MOST:.0f}; make it cheaper, or mark it slow"
            )
