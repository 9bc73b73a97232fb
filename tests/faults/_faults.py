"""The faults that are tried, what is expected of each, and the table of what came out, as it stands in the docs."""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- faults: written by python -m tests.faults -->", "<!-- faults: end -->"
HEAD = "| fault | expected | tried | outcome |\n|---|---|---|---|"
NOT_TRIED = "not tried yet"
_ROW = r"\| (.*) \| .* \| (\d+) \| (?:as expected|\*\*(\d+) of \d+ not as expected\*\*) \|"


@dataclasses.dataclass(frozen=True)
class Kills:
    """SIGKILLs of a training run with everything on, at random moments.

    Attributes:
        processes: of the run.
        devices: of each.
        share: of all kills, in percent.
    """

    processes: int
    devices: int
    share: int

    expected = "same bits, history, log, TensorBoard points, checkpoints and best one"

    @property
    def name(self) -> str:
        """As it stands in the table."""
        return f"SIGKILL of a run, {self.processes} × {self.devices} processes × devices"


@dataclasses.dataclass(frozen=True)
class Cases:
    """Faults that are tests' cases.

    Attributes:
        name: as it stands in the table.
        expected: likewise.
        tests: files, each with a word that names of its tests have.
    """

    name: str
    expected: str
    tests: tuple[tuple[str, str], ...]


KILLS = (
    Kills(1, 2, 50),
    Kills(2, 1, 25),
    Kills(2, 2, 25),
)
CASES = (
    Cases(
        "SIGKILL inside a save",
        "either this checkpoint or the one before is complete",
        (("tests/train/test_checkpoint_kills.py", "killed"),),
    ),
    Cases(
        "files of a checkpoint damaged",
        "detected, named, renamed; the checkpoint before is used",
        (("tests/train/test_checkpoint_damage.py", ""),),
    ),
    Cases(
        "a full disk while a checkpoint is written",
        "a warning or error names it; earlier checkpoints stay",
        (("tests/train/test_checkpoint_failures.py", ""),),
    ),
    Cases(
        "a full disk while a run writes its log and checkpoints",
        "a warning names it; the state is returned",
        (("tests/train/test_fit_outputs.py", "full or shown"),),
    ),
    Cases(
        "two runs in one place; a file that is not ours",
        "refused; existing files stay",
        (("tests/train/test_fit_outputs.py", "no_log"), ("tests/train/test_checkpoint_failures.py", "another")),
    ),
    Cases(
        "Ctrl-C and SIGTERM while a run trains",
        "saved; it resumes and ends with the same bits",
        (("tests/train/test_fit_kills.py", "told_to_stop"), ("tests/launch/test_launch.py", "signal")),
    ),
    Cases(
        "a loss or gradient that is not finite",
        "an error names the step and its rows; the state before is saved",
        (("tests/train/test_fit_nonfinite.py", ""),),
    ),
    Cases(
        "one of several processes raises, leaves or is killed",
        "all end within seconds; a message names the cause",
        (("tests/launch/test_launch.py", "rank"), ("tests/train/test_fit_processes.py", "")),
    ),
    Cases(
        "one of several processes is stuck",
        "it prints its stacks and exits, and the others end",
        (("tests/launch/test_initialize.py", "stuck"),),
    ),
    Cases(
        "output of a launch that cannot be written",
        "the ranks continue; a message says so",
        (("tests/launch/test_launch.py", "output_cannot"),),
    ),
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a fault.

    Attributes:
        tried: how often.
        wrong: how often it was not as expected.
    """

    tried: int
    wrong: int

    def in_words(self) -> str:
        """As it stands in the table."""
        return "as expected" if not self.wrong else f"**{self.wrong} of {self.tried} not as expected**"


def row(fault: Kills | Cases, outcome: Outcome | None) -> str:
    """A line of the table."""
    words = ("0", NOT_TRIED) if outcome is None else (str(outcome.tried), outcome.in_words())
    return f"| {fault.name} | {fault.expected} | {' | '.join(words)} |"


def table(outcomes: Sequence[tuple[Kills | Cases, Outcome | None]], told: str) -> str:
    """The table, below a line that tells of the run that made it."""
    return "\n".join([told, "", HEAD, *(row(fault, outcome) for fault, outcome in outcomes)])


def read(page: str) -> dict[str, Outcome]:
    """The outcomes that stand in a page, by the names of the faults."""
    found = {}
    for line in _between(page).splitlines():
        if cells := re.fullmatch(
            r"\| (.*) \| .* \| (\d+) \| (?:as expected|\*\*(\d+) of \d+ not as expected\*\*) \|", line
        ):
            found[cells[1]] = Outcome(int(cells[2]), int(cells[3] or 0))
    return found


def written(page: str, text: str) -> str:
    """A page with a new table in the place of the old one."""
    return page.replace(f"{BEGIN}\n{_between(page)}\n{END}", f"{BEGIN}\n{text}\n{END}")


def _between(page: str) -> str:
    _, begin, rest = page.partition(f"{BEGIN}\n")
    text, end, _ = rest.partition(f"\n{END}")
    if not begin or not end:
        raise ValueError(f"the page has no table: it goes between the lines {BEGIN} and {END}")
    return text


def shares(number: int, faults: Iterable[Kills]) -> list[int]:
    """So many kills shared out, each fault at least one."""
    return [max(1, round(number * fault.share / 100)) for fault in faults]
