"""Tries every fault, and writes what came of each into the table of ``docs/reliability.md``.

``python -m tests.faults`` is for the night: 200 SIGKILLs, and the cases of the tests that are about faults.
``--kills 10`` takes fewer, ``--only SIGKILL`` some of the faults; what is not tried stays in the table as it was.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from pathlib import Path

import jax

from tests.faults import _faults as faults
from tests.faults._faults import ROOT, Cases, Kills, Outcome

_PATIENCE = 300  # seconds for a kill, what comes before it and after it included


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}


def of_kills(fault: Kills, number: int, seed: int) -> Outcome:
    """What came of kills."""
    words = [number, seed, fault.processes, fault.devices]
    with tempfile.TemporaryDirectory(prefix="paraxis-faults-") as folder:
        command = [sys.executable, "-m", "tests.train._fit_killer", folder, *map(str, words)]
        patience = _PATIENCE * (number + 2)
        done = subprocess.run(
            command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=patience, check=False
        )
    if done.returncode:
        print(done.stderr[-3000:], file=sys.stderr)
        return Outcome(number, number)
    report = json.loads(done.stdout.splitlines()[-1])
    if report["wrong"]:
        print(f"{fault.name}: {report}", file=sys.stderr)
    return Outcome(report["kills"], len(report["wrong"]))


def of_cases(fault: Cases) -> Outcome:
    """What came of tests' cases."""
    tried = wrong = 0
    for file, words in fault.tests:
        with tempfile.TemporaryDirectory(prefix="paraxis-faults-") as folder:
            report = Path(folder) / "report.xml"
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", file]
            done = subprocess.run(
                [*command, *(["-k", words] if words else [])],
                cwd=ROOT,
                env=environment(),
                capture_output=True,
                text=True,
                check=False,
            )
            if not report.exists():
                print(done.stdout + done.stderr, file=sys.stderr)
                return Outcome(tried + 1, wrong + 1)
            counts = next(xml.etree.ElementTree.parse(report).iter("testsuite")).attrib
        bad = int(counts["failures"]) + int(counts["errors"])
        if bad:
            print(done.stdout[-3000:], file=sys.stderr)
        tried, wrong = tried + int(counts["tests"]) - int(counts["skipped"]), wrong + bad
    return Outcome(tried, wrong)


def main(arguments: list[str] | None = None) -> int:
    """Return the exit status: 0 if all was as expected."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200, help="SIGKILLs in all (default: 200)")
    parser.add_argument("--seed", type=int, default=int(time.time()) // 86400, help="of the kills (default: the day)")
    parser.add_argument("--only", default="", help="only faults that have this in their names")
    parser.add_argument("--page", type=Path, default=faults.PAGE, help="where the table is written")
    options = parser.parse_args(arguments)
    found = faults.read(options.page.read_text(encoding="utf-8"))
    is_well = True
    numbers = dict(zip(faults.KILLS, faults.shares(options.kills, faults.KILLS), strict=True))
    for fault in (*faults.KILLS, *faults.CASES):
        if options.only not in fault.name:
            continue
        outcome = of_kills(fault, numbers[fault], options.seed) if isinstance(fault, Kills) else of_cases(fault)
        found[fault.name] = outcome
        is_well &= not outcome.wrong
        print(f"{outcome.tried:4}  {outcome.in_words():12}  {fault.name}", flush=True)
        _write(options, found)  # after each, so that a night that is cut short has told what it has seen
    return 0 if is_well else 1


def _write(options: argparse.Namespace, found: dict[str, Outcome]) -> None:
    day = datetime.datetime.now(datetime.UTC).date()
    told = f"Last run: {day}, jax {jax.__version__}, Python {platform.python_version()}, seed {options.seed}."
    outcomes = [(fault, found.get(fault.name)) for fault in (*faults.KILLS, *faults.CASES)]
    page = options.page.read_text(encoding="utf-8")
    options.page.write_text(faults.written(page, faults.table(outcomes, told)), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
