"""A script, run as Python would, and then told: each function that it has jitted and called."""

import sys
from collections.abc import Sequence
from pathlib import Path

from paraxis.cli._errors import CommandError
from paraxis.cli._scripts import run_as_main
from paraxis.reports import Called, Report, units, watching


def run_script(path: Path, rest: Sequence[str]) -> int:
    """Run a script, and print the report on each jitted function that it called, those that send most first.

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
    found = [(call, call.report()) for call in list(called)]
    found.sort(key=lambda pair: -pair[0].times * pair[1].total_bytes)
    telling = [(call, report) for call, report in found if report.collectives or report.findings or report.work.flops]
    sys.stdout.flush()
    print(f"\n{path.name} called {units.of(len(found), 'jitted function')}")
    for number, (call, report) in enumerate(telling, 1):
        print(f"\n{number}. {_heading(call, report)}\n")
        print(str(report))
    if rest := len(found) - len(telling):
        print(f"\nand {units.of(rest, 'function')} without matrix products, of which nothing is sent or found")


def _heading(call: Called, report: Report) -> str:
    total = units.size(call.times * report.total_bytes)
    return f"{call.name}, called {call.times:,} {'time' if call.times == 1 else 'times'}, sent {total} per device"
