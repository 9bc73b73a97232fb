"""Tries every fault, and writes what came of each into the table of ``docs/reliability.md``.

``python -m tests.faults`` is for the night: 200 SIGKILLs, and the cases of the tests that are about faults.
``--kills 10`` takes fewer, ``--only SIGKILL`` some of the faults; what is not tried stays in the table as it was.
"""

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from pathlib import Path

import jax

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"
PATIENCE = 300  # seconds for a kill, what comes before it and after it included
FIT, CHECKPOINTS, PROCESSES = "tests/test_fit", "tests/test_checkpoints", "tests/processes/test_"

# By names in the table: of SIGKILLs of a run, processes, devices, and a share of all; else, tests by words of names.
FAULTS: dict[str, tuple[int, int, float] | list[str]] = {
    "SIGKILL of a run, 1 × 2 processes × devices": (1, 2, 0.5),
    "SIGKILL of a run, 2 × 1 processes × devices": (2, 1, 0.25),
    "SIGKILL of a run, 2 × 2 processes × devices": (2, 2, 0.25),
    "SIGKILL inside a save": [f"{CHECKPOINTS}_damage.py killed"],
    "files of a checkpoint damaged": [f"{CHECKPOINTS}_damage.py damaged or flipped"],
    "a full disk while a checkpoint is written": [f"{CHECKPOINTS}_damage.py disk or cannot"],
    "a full disk while a run writes its log and checkpoints": [f"{FIT}_outputs.py full"],
    "two runs in one place; a file that is not ours": [
        *(f"{FIT}_outputs.py no_log", f"{CHECKPOINTS}_damage.py another", f"{CHECKPOINTS}.py somebody")
    ],
    "Ctrl-C and SIGTERM while a run trains": [*(f"{FIT}_resume.py signal", f"{PROCESSES}launch.py signal")],
    "a loss or gradient that is not finite": [f"{FIT}_outputs.py finite", f"{PROCESSES}training.py finite"],
    "one of several processes raises, leaves or is killed": [f"{PROCESSES}launch.py rank"],
    "one of several processes is stuck": [f"{PROCESSES}initialize.py stuck"],
    "processes that are lost from a loop, and come back": [f"{PROCESSES}lost.py killed or end"],
    "output of a launch that cannot be written": [f"{PROCESSES}launch.py output_cannot"],
}


def ran(*arguments: object, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    command = [sys.executable, "-m", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    if done.returncode:
        print((done.stdout + done.stderr)[-3000:], file=sys.stderr)
    return done


def tried(name: str, kills: int, seed: int, folder: str) -> tuple[int, int]:
    """How often a fault was tried, and how often what came of it was not as expected."""
    fault, number, wrong = FAULTS[name], 0, 0
    if isinstance(fault, tuple):
        number = max(1, round(kills * fault[2]))
        command = "tests.processes._fit_killer", folder, number, seed, *fault[:2]
        done = ran(*command, timeout=PATIENCE * (number + 2))
        found = ["it failed"] * number if done.returncode else json.loads(done.stdout.splitlines()[-1])["wrong"]
        print(*found, file=sys.stderr)
        return number, len(found)
    for test in fault:
        (file, words), report = test.split(" ", 1), Path(folder, f"report-{number}.xml")
        ran("pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", file, "-k", words)
        if not report.exists():
            return number + 1, wrong + 1
        counts = next(xml.etree.ElementTree.parse(report).iter("testsuite")).attrib
        number += int(counts["tests"]) - int(counts["skipped"])
        wrong += int(counts["failures"]) + int(counts["errors"])
    return number, wrong


def main(arguments: list[str] | None = None) -> int:
    """Return the exit status: 0 if all was as expected."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200, help="SIGKILLs in all (default: 200)")
    parser.add_argument("--seed", type=int, default=int(time.time()) // 86400, help="of the kills (default: the day)")
    parser.add_argument("--only", default="", help="only faults that have this in their names")
    parser.add_argument("--page", type=Path, default=PAGE, help="where the table is written")
    options, is_well = parser.parse_args(arguments), True
    for name in (name for name in FAULTS if options.only in name):
        with tempfile.TemporaryDirectory(prefix="paraxis-faults-") as folder:
            number, wrong = tried(name, options.kills, options.seed, folder)
        outcome = f"{number} | " + (f"**{wrong} of {number} not as expected**" if wrong else "as expected")
        print(f"{outcome}  {name}", flush=True)
        is_well = is_well and not wrong
        # After each, so that a night that is cut short has told what it has seen.
        day = datetime.datetime.now(datetime.UTC).date()
        told = f"Last run: {day}, jax {jax.__version__}, Python {platform.python_version()}, seed {options.seed}."
        page = re.sub(r"^Last run: .*$", told, options.page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        row = re.compile(rf"^(\| {re.escape(name)} \| [^|]* \|).*$", re.MULTILINE)
        options.page.write_text(row.sub(rf"\1 {outcome} |", page), encoding="utf-8")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
