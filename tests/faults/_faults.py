"""The faults that are tried, what is expected of each, and the table of what came out, as it stands in the docs."""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- faults: written by python -m tests.faults -->", "<!-- faults: end -->"
HEAD = "| fault | expected | tried | outcome |\n|---|---|---|---|"
ROW = re.compile(r"\| (.*) \| .* \| (\d+) \| (?:as expected|\*\*(\d+) of \d+ not as expected\*\*) \|")


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault: SIGKILLs of a training run with everything on, or tests' cases.

    Attributes:
        name: as it stands in the table.
        expected: likewise.
        tests: files, each with words of which names of its tests have one.
        layout: of kills: processes of the run, and devices of each.
        share: of all kills, in percent.
    """

    name: str
    expected: str
    tests: tuple[tuple[str, str], ...] = ()
    layout: tuple[int, int] = (0, 0)
    share: int = 0


def _kills(processes: int, devices: int, share: int) -> Fault:
    name = f"SIGKILL of a run, {processes} × {devices} processes × devices"
    expected = "same bits, history, log, TensorBoard points, checkpoints and best one"
    return Fault(name, expected, layout=(processes, devices), share=share)


FAULTS = (
    _kills(1, 2, 50),
    _kills(2, 1, 25),
    _kills(2, 2, 25),
    Fault(
        "SIGKILL inside a save",
        "either this checkpoint or the one before is complete",
        (("tests/train/test_checkpoint_kills.py", "killed"),),
    ),
    Fault(
        "files of a checkpoint damaged",
        "detected, named, renamed; the checkpoint before is used",
        (("tests/train/test_checkpoint_damage.py", ""),),
    ),
    Fault(
        "a full disk while a checkpoint is written",
        "a warning or error names it; earlier checkpoints stay",
        (("tests/train/test_checkpoint_failures.py", ""),),
    ),
    Fault(
        "a full disk while a run writes its log and checkpoints",
        "a warning names it; the state is returned",
        (("tests/train/test_fit_outputs.py", "full"),),
    ),
    Fault(
        "two runs in one place; a file that is not ours",
        "refused; existing files stay",
        (("tests/train/test_fit_outputs.py", "no_log"), ("tests/train/test_checkpoint_failures.py", "another")),
    ),
    Fault(
        "Ctrl-C and SIGTERM while a run trains",
        "saved; it resumes and ends with the same bits",
        (("tests/train/test_fit_kills.py", "told_to_stop"), ("tests/launch/test_launch.py", "signal")),
    ),
    Fault(
        "a loss or gradient that is not finite",
        "an error names the step and its rows; the state before is saved",
        (("tests/train/test_fit_nonfinite.py", ""),),
    ),
    Fault(
        "one of several processes raises, leaves or is killed",
        "all end within seconds; a message names the cause",
        (("tests/launch/test_launch.py", "rank"), ("tests/train/test_fit_processes.py", "")),
    ),
    Fault(
        "one of several processes is stuck",
        "it prints its stacks and exits, and the others end",
        (("tests/launch/test_initialize.py", "stuck"),),
    ),
    Fault(
        "output of a launch that cannot be written",
        "the ranks continue; a message says so",
        (("tests/launch/test_launch.py", "output_cannot"),),
    ),
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How often a fault was tried, and how often what came of it was not as expected."""

    tried: int
    wrong: int

    def __str__(self) -> str:
        return "as expected" if not self.wrong else f"**{self.wrong} of {self.tried} not as expected**"


def table(faults: Iterable[Fault], outcomes: dict[str, Outcome], told: str) -> str:
    """The table, below a line that tells of the run that made it."""
    lines = []
    for fault in faults:
        outcome = outcomes.get(fault.name)
        words = f"{outcome.tried} | {outcome}" if outcome else "0 | not tried yet"
        lines.append(f"| {fault.name} | {fault.expected} | {words} |")
    return "\n".join([told, "", HEAD, *lines])


def read(page: str) -> dict[str, Outcome]:
    """The outcomes that stand in a page, by the names of the faults."""
    cells = filter(None, map(ROW.fullmatch, _between(page).splitlines()))
    return {found[1]: Outcome(int(found[2]), int(found[3] or 0)) for found in cells}


def written(page: str, text: str) -> str:
    """A page with a new table in the place of the old one."""
    return page.replace(f"{BEGIN}\n{_between(page)}\n{END}", f"{BEGIN}\n{text}\n{END}")


def _between(page: str) -> str:
    _, begin, rest = page.partition(f"{BEGIN}\n")
    text, end, _ = rest.partition(f"\n{END}")
    if not begin or not end:
        raise ValueError(f"the page has no table: it goes between the lines {BEGIN} and {END}")
    return text


def kills(number: int, faults: Sequence[Fault]) -> dict[str, int]:
    """So many kills shared out, each fault at least one."""
    return {fault.name: max(1, round(number * fault.share / 100)) for fault in faults if fault.share}
