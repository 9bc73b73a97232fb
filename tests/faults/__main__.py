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
from tests.faults._faults import ROOT, Fault, Outcome

_PATIENCE = 300  # seconds for a kill, what comes before it and after it included


def ran(*arguments: object, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    command = [sys.executable, "-m", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    if done.returncode:
        print((done.stdout + done.stderr)[-3000:], file=sys.stderr)
    return done


def of_kills(fault: Fault, number: int, seed: int, folder: str) -> Outcome:
    done = ran("tests.train._fit_killer", folder, number, seed, *fault.layout, timeout=_PATIENCE * (number + 2))
    if done.returncode:
        return Outcome(number, number)
    report = json.loads(done.stdout.splitlines()[-1])
    if report["wrong"]:
        print(f"{fault.name}: {report}", file=sys.stderr)
    return Outcome(report["kills"], len(report["wrong"]))


def of_tests(fault: Fault, folder: str) -> Outcome:
    tried = wrong = 0
    for number, (file, words) in enumerate(fault.tests):
        report = Path(folder, f"report-{number}.xml")
        selection = ["-k", words] if words else []
        ran("pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", file, *selection)
        if not report.exists():
            return Outcome(tried + 1, wrong + 1)
        counts = next(xml.etree.ElementTree.parse(report).iter("testsuite")).attrib
        tried += int(counts["tests"]) - int(counts["skipped"])
        wrong += int(counts["failures"]) + int(counts["errors"])
    return Outcome(tried, wrong)


def main(arguments: list[str] | None = None) -> int:
    """Return the exit status: 0 if all was as expected."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200, help="SIGKILLs in all (default: 200)")
    parser.add_argument("--seed", type=int, default=int(time.time()) // 86400, help="of the kills (default: the day)")
    parser.add_argument("--only", default="", help="only faults that have this in their names")
    parser.add_argument("--page", type=Path, default=faults.PAGE, help="where the table is written")
    options = parser.parse_args(arguments)
    found, is_well = faults.read(options.page.read_text(encoding="utf-8")), True
    numbers = faults.kills(options.kills, faults.FAULTS)
    for fault in (fault for fault in faults.FAULTS if options.only in fault.name):
        number = numbers.get(fault.name)
        with tempfile.TemporaryDirectory(prefix="paraxis-faults-") as folder:
            outcome = of_kills(fault, number, options.seed, folder) if number else of_tests(fault, folder)
        found[fault.name] = outcome
        is_well &= not outcome.wrong
        print(f"{outcome.tried:4}  {outcome!s:12}  {fault.name}", flush=True)
        # After each, so that a night that is cut short has told what it has seen.
        day = datetime.datetime.now(datetime.UTC).date()
        told = f"Last run: {day}, jax {jax.__version__}, Python {platform.python_version()}, seed {options.seed}."
        page = options.page.read_text(encoding="utf-8")
        text = faults.table(faults.FAULTS, found, told)
        options.page.write_text(faults.written(page, text), encoding="utf-8")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
