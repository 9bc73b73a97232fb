"""The table of faults in the documentation is what ``python -m tests.faults`` writes there."""

import re
from pathlib import Path

import pytest

from tests.faults import _faults as faults
from tests.faults.__main__ import main
from tests.faults._faults import Fault, Outcome


def test_the_pages_table_has_the_form_that_is_written() -> None:
    page = faults.PAGE.read_text(encoding="utf-8")
    found = faults.read(page)
    told = re.search(r"^Last run: \d{4}-\d\d-\d\d, jax [\d.]+, Python [\d.]+, seed \d+\.$", page, re.MULTILINE)
    assert told is not None
    assert faults.written(page, faults.table(faults.FAULTS, found, told[0])) == page
    assert not any(outcome.wrong for outcome in found.values())


def test_each_fault_names_tests_that_are_there() -> None:
    for fault in faults.FAULTS:
        for file, words in fault.tests:
            names = re.findall(r"def (test_\w+)", (faults.ROOT / file).read_text(encoding="utf-8"))
            assert all(any(word in name for name in names) for word in words.split(" or ")), (fault.name, words)


@pytest.mark.parametrize(("number", "expected"), [(200, [100, 50, 50]), (1, [1] * 3)])
def test_kills_are_shared_out(number: int, expected: list[int]) -> None:
    assert list(faults.kills(number, faults.FAULTS).values()) == expected


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("body", "wrong", "tried"), [("pass", 0, 2), ("assert number", 1, 2), ("assert number, (", 1, 1)]
)
def test_what_comes_of_a_fault_stands_in_the_table(
    body: str, wrong: int, tried: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests, page = tmp_path / "test_it.py", tmp_path / "page.md"
    tests.write_text(f"import pytest\n@pytest.mark.parametrize('number', [0, 1])\ndef test_it(number):\n    {body}\n")
    page.write_text(f"Before.\n\n{faults.BEGIN}\n\n{faults.END}\n\nAfter.\n")
    monkeypatch.setattr(faults, "FAULTS", (Fault("it breaks", "so", ((str(tests), ""),)), Fault("another", "so")))
    assert main(["--only", "it breaks", "--page", str(page)]) == wrong
    text = page.read_text()
    assert (text.startswith("Before.\n"), text.endswith("After.\n")) == (True, True)
    assert "| another | so | 0 | not tried yet |" in text
    assert faults.read(text) == {"it breaks": Outcome(tried, wrong)}
