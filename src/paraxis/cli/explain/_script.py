"""A script, run as Python would, and then told: each compiled function that it has run."""

import sys
from collections.abc import Sequence
from pathlib import Path

from paraxis.cli._errors import CommandError
from paraxis.cli._scripts import run_as_main
from paraxis.reports import Called, Report, units, watching


def run_script(path: Path, rest: Sequence[str]) -> int:
    """Run a script, and print the report on each compiled function that it ran, those that send most first.

    Returns:
        The script's exit status.

    Raises:
        CommandError: if there is no such script.
    """
    if not path.is_file():
        raise CommandError(f"there is no file {path}")
    with watching() as called:
        try:
            return run_as_main(path, rest)
        finally:  # whatever has ended it: what it called until then can be told
            _tell(path, called)


def _tell(path: Path, called: Sequence[Called]) -> None:
    found = [(call, call.report()) for call in list(called) if call.times]
    found = [(call, report) for call, report in found if report.collectives or not call.is_helper]
    found.sort(key=lambda pair: -pair[0].times * pair[1].total_bytes)
    telling = [(call, report) for call, report in found if report.collectives or report.findings or report.work.flops]
    sys.stdout.flush()
    print(f"\n{path.name} called {units.of(len(found), 'compiled function')}")
    for number, (call, report) in enumerate(telling, 1):
        print(f"\n{number}. {_heading(call, report)}\n")
        print(str(report))
    if rest := len(found) - len(telling):
        print(f"\nand {units.of(rest, 'function')} without matrix products, of which nothing is sent or found")


def _heading(call: Called, report: Report) -> str:
    total = units.size(call.times * report.total_bytes)
    line = "" if call.line is None else f"; {call.line}  {call.line.code}"
    times = "1 time" if call.times == 1 else f"{call.times:,} times"
    return f"{call.name}, called {times}, sent {total} per device{line}"
