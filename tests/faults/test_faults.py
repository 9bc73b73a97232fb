"""The table of faults in the documentation is what ``python -m tests.faults`` writes there."""

import re
from pathlib import Path

import pytest

from tests.faults import _faults as faults
from tests.faults.__main__ import main
from tests.faults._faults import Cases, Outcome


def test_the_pages_table_has_the_form_that_is_written() -> None:
    page = faults.PAGE.read_text(encoding="utf-8")
    found = faults.read(page)
    outcomes = [(fault, found.get(fault.name)) for fault in (*faults.KILLS, *faults.CASES)]
    told = re.search(r"^Last run: \d{4}-\d\d-\d\d, jax [\d.]+, Python [\d.]+, seed \d+\.$", page, re.MULTILINE)
    assert told is not None
    assert faults.table(outcomes, told[0]) in page
    assert faults.written(page, faults.table(outcomes, told[0])) == page
    assert not any(outcome.wrong for outcome in found.values())


def test_each_fault_names_tests_that_are_there() -> None:
    for fault in faults.CASES:
        for file, words in fault.tests:
            text = (faults.ROOT / file).read_text(encoding="utf-8")
            names = re.findall(r"def (test_\w+)", text)
            assert names
            assert all(any(word in name for name in names) for word in words.split(" or ")), (fault.name, words)


@pytest.mark.parametrize(("number", "expected"), [(200, [100, 50, 50]), (1, [1] * 3)])
def test_kills_are_shared_out(number: int, expected: list[int]) -> None:
    assert sum(fault.share for fault in faults.KILLS) == 100
    assert faults.shares(number, faults.KILLS) == expected


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("body", "status", "tried", "outcome"),
    [
        ("pass", 0, 2, "as expected"),
        ("assert number", 1, 2, r"\*\*1 of 2 not as expected\*\*"),
        ("assert number, (", 1, 1, r"\*\*1 of 1 not as expected\*\*"),
    ],
)
def test_what_comes_of_a_fault_stands_in_the_table(
    body: str, status: int, tried: int, outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests, page = tmp_path / "test_it.py", tmp_path / "page.md"
    tests.write_text(f"import pytest\n@pytest.mark.parametrize('number', [0, 1])\ndef test_it(number):\n    {body}\n")
    page.write_text(f"Before.\n\n{faults.BEGIN}\n\n{faults.END}\n\nAfter.\n")
    case, other = Cases("it breaks", "it holds", ((str(tests), ""),)), Cases("another", "it holds", ())
    monkeypatch.setattr(faults, "CASES", (case, other))
    assert main(["--only", "it breaks", "--page", str(page)]) == status
    text = page.read_text()
    assert text.startswith("Before.\n")
    assert text.endswith("After.\n")
    assert re.search(rf"^\| it breaks \| it holds \| {tried} \| {outcome} \|$", text, re.MULTILINE), text
    assert "| another | it holds | 0 | not tried yet |" in text
    assert faults.read(text)["it breaks"] == Outcome(tried, tried if "(" in body else int(status))
