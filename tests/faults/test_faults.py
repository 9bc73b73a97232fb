"""The table of faults in the documentation is what ``python -m tests.faults`` writes there."""

import re
from pathlib import Path

import pytest

from tests.faults.__main__ import FAULTS, PAGE, ROOT, main


def test_the_table_has_a_row_of_each_fault_and_all_is_as_expected() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert re.search(r"^Last run: \d{4}-\d\d-\d\d, jax [\d.]+, Python [\d.]+, seed \d+\.$", page, re.MULTILINE)
    assert re.findall(r"^\| (.*) \| .* \| \d+ \| as expected \|$", page, re.MULTILINE) == list(FAULTS)


def test_each_fault_names_tests_that_are_there() -> None:
    for test in (test for tests in FAULTS.values() if isinstance(tests, list) for test in tests):
        file, words = test.split(" ", 1)
        names = re.findall(r"def (test_\w+)", (ROOT / file).read_text(encoding="utf-8"))
        assert all(any(word in name for name in names) for word in words.split(" or ")), test


def test_what_comes_of_a_fault_stands_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tests, page = tmp_path / "test_it.py", tmp_path / "page.md"
    tests.write_text(
        "import pytest\n@pytest.mark.parametrize('number', [0, 1])\ndef test_it(number):\n    assert number\n"
    )
    page.write_text("Last run: never\n\n| it | so | 7 | as expected |\n| breaks | so | 0 | not tried yet |\n")
    monkeypatch.setitem(FAULTS, "breaks", [f"{tests} test"])
    assert main(["--only", "breaks", "--page", str(page)]) == 1
    last, _, *rows = page.read_text().splitlines()
    assert rows == ["| it | so | 7 | as expected |", "| breaks | so | 2 | **1 of 2 not as expected** |"]
    assert last.startswith("Last run: 2")
