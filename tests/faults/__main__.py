"""Tries every fault, and writes what came of each into the table of ``docs/reliability.md``.

``python -m tests.faults`` is for the night: 200 SIGKILLs, and the cases of the tests that are about faults.
``--kills 10`` takes fewer, ``--only SIGKILL`` some of the faults; what is not tried stays in the table as it was.
"""

import argparse
import dataclasses
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
TABLE = re.compile(r"(?<=<!-- faults: written by python -m tests.faults -->\n).*?(?=\n<!-- faults: end -->)", re.DOTALL)
HEAD = "| fault | expected | tried | outcome |\n|---|---|---|---|"
PATIENCE = 300  # seconds for a kill, what comes before it and after it included
RUN = "same bits, history, log, TensorBoard points, checkpoints and best one"


@dataclasses.dataclass(frozen=True)
class Fault:
    """A row of the table: tests, each ``"file words"`` of their names; or of kills, processes, devices, and a share."""

    name: str
    expected: str
    tests: tuple[str, ...] = ()
    kills: tuple[int, int, float] | None = None


_TRAIN, _LAUNCH = "tests/train/test_{}.py {}".format, "tests/launch/test_{}.py {}".format
FAULTS = (
    Fault("SIGKILL of a run, 1 × 2 processes × devices", RUN, kills=(1, 2, 0.5)),
    Fault("SIGKILL of a run, 2 × 1 processes × devices", RUN, kills=(2, 1, 0.25)),
    Fault("SIGKILL of a run, 2 × 2 processes × devices", RUN, kills=(2, 2, 0.25)),
    Fault(
        "SIGKILL inside a save",
        "either this checkpoint or the one before is complete",
        (_TRAIN("checkpoint_damage", "killed"),),
    ),
    Fault(
        "files of a checkpoint damaged",
        "detected, named, renamed; the checkpoint before is used",
        (_TRAIN("checkpoint_damage", "damaged or flipped"),),
    ),
    Fault(
        "a full disk while a checkpoint is written",
        "a warning or error names it; earlier checkpoints stay",
        (_TRAIN("checkpoint_damage", "disk or cannot"),),
    ),
    Fault(
        "a full disk while a run writes its log and checkpoints",
        "a warning names it; the state is returned",
        (_TRAIN("fit_outputs", "full"),),
    ),
    Fault(
        "two runs in one place; a file that is not ours",
        "refused; existing files stay",
        (_TRAIN("fit_outputs", "no_log"), _TRAIN("checkpoint_damage", "another"), _TRAIN("checkpoints", "somebody")),
    ),
    Fault(
        "Ctrl-C and SIGTERM while a run trains",
        "saved; it resumes and ends with the same bits",
        (_TRAIN("fit_resume", "signal"), _TRAIN("processes", "told"), _LAUNCH("launch", "signal")),
    ),
    Fault(
        "a loss or gradient that is not finite",
        "an error names the step and its rows; the state before is saved",
        (_TRAIN("fit_outputs", "finite"), _TRAIN("processes", "finite")),
    ),
    Fault(
        "one of several processes raises, leaves or is killed",
        "all end within seconds; a message names the cause",
        (_LAUNCH("launch", "rank"), _TRAIN("processes", "error or killed")),
    ),
    Fault(
        "one of several processes is stuck",
        "it prints its stacks and exits, and the others end",
        (_LAUNCH("initialize", "stuck"),),
    ),
    Fault(
        "output of a launch that cannot be written",
        "the ranks continue; a message says so",
        (_LAUNCH("launch", "output_cannot"),),
    ),
)


def ran(*arguments: object, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    command = [sys.executable, "-m", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    if done.returncode:
        print((done.stdout + done.stderr)[-3000:], file=sys.stderr)
    return done


def tried(fault: Fault, kills: int, seed: int, folder: str) -> tuple[int, int]:
    """How often a fault was tried, and how often what came of it was not as expected."""
    if fault.kills is not None:
        number = max(1, round(kills * fault.kills[2]))
        command = "tests.train._fit_killer", folder, number, seed, *fault.kills[:2]
        done = ran(*command, timeout=PATIENCE * (number + 2))
        report = json.loads(done.stdout.splitlines()[-1]) if not done.returncode else {"kills": number, "wrong": "all"}
        return report["kills"], len(report["wrong"])
    number = wrong = 0
    for test in fault.tests:
        (file, words), report = test.split(" ", 1), Path(folder, f"report-{number}.xml")
        ran("pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", file, "-k", words)
        if not report.exists():
            return number + 1, wrong + 1
        counts = next(xml.etree.ElementTree.parse(report).iter("testsuite")).attrib
        number += int(counts["tests"]) - int(counts["skipped"])
        wrong += int(counts["failures"]) + int(counts["errors"])
    return number, wrong


def row(fault: Fault, number: int, wrong: int) -> str:
    words = f"**{wrong} of {number} not as expected**" if wrong else "as expected" if number else "not tried yet"
    return f"| {fault.name} | {fault.expected} | {number} | {words} |"


def main(arguments: list[str] | None = None, faults: tuple[Fault, ...] = FAULTS) -> int:
    """Return the exit status: 0 if all was as expected."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200, help="SIGKILLs in all (default: 200)")
    parser.add_argument("--seed", type=int, default=int(time.time()) // 86400, help="of the kills (default: the day)")
    parser.add_argument("--only", default="", help="only faults that have this in their names")
    parser.add_argument("--page", type=Path, default=PAGE, help="where the table is written")
    options = parser.parse_args(arguments)
    is_well, before = True, TABLE.findall(options.page.read_text(encoding="utf-8"))[0].splitlines()
    rows = {f.name: next((x for x in before if x.startswith(f"| {f.name} |")), row(f, 0, 0)) for f in faults}
    for fault in (fault for fault in faults if options.only in fault.name):
        with tempfile.TemporaryDirectory(prefix="paraxis-faults-") as folder:
            number, wrong = tried(fault, options.kills, options.seed, folder)
        rows[fault.name], is_well = row(fault, number, wrong), is_well and not wrong
        print(rows[fault.name], flush=True)
        # After each, so that a night that is cut short has told what it has seen.
        day = datetime.datetime.now(datetime.UTC).date()
        told = f"Last run: {day}, jax {jax.__version__}, Python {platform.python_version()}, seed {options.seed}."
        page = options.page.read_text(encoding="utf-8")
        table = "\n".join([told, "", HEAD, *rows.values()])
        options.page.write_text(page.replace(TABLE.findall(page)[0], table), encoding="utf-8")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
