"""The table of faults in the documentation is what ``python -m tests.faults`` writes there."""

import re
from pathlib import Path

import pytest

from tests.faults.__main__ import FAULTS, HEAD, PAGE, ROOT, TABLE, Fault, main, row


def test_the_table_has_a_row_of_each_fault_and_all_is_as_expected() -> None:
    told, _, *table = TABLE.findall(PAGE.read_text(encoding="utf-8"))[0].splitlines()
    assert re.fullmatch(r"Last run: \d{4}-\d\d-\d\d, jax [\d.]+, Python [\d.]+, seed \d+\.", told)
    numbers = [int(line.split(" | ")[2]) for line in table[2:]]
    assert "\n".join(table) == "\n".join([HEAD, *map(row, FAULTS, numbers, [0] * len(numbers))])


def test_each_fault_names_tests_that_are_there() -> None:
    for test in (test for fault in FAULTS for test in fault.tests):
        file, words = test.split(" ", 1)
        names = re.findall(r"def (test_\w+)", (ROOT / file).read_text(encoding="utf-8"))
        assert all(any(word in name for name in names) for word in words.split(" or ")), test


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("assert number", "2 | **1 of 2 not as expected** |"),
        ("pass", "2 | as expected |"),
        ("assert number, (", "1 | **1 of 1 not as expected** |"),
    ],
)
def test_what_comes_of_a_fault_stands_in_the_table(body: str, told: str, tmp_path: Path) -> None:
    tests, page = tmp_path / "test_it.py", tmp_path / "page.md"
    tests.write_text(f"import pytest\n@pytest.mark.parametrize('number', [0, 1])\ndef test_it(number):\n    {body}\n")
    page.write_text(TABLE.sub("| it | so | 7 | as expected |", PAGE.read_text(encoding="utf-8")))
    faults = Fault("it", "so"), Fault("breaks", "so", (f"{tests} test",)), Fault("another", "so")
    assert main(["--only", "breaks", "--page", str(page)], faults) == ("**" in told)
    table = TABLE.findall(page.read_text())[0]
    rows = ["| it | so | 7 | as expected |", f"| breaks | so | {told}", "| another | so | 0 | not tried yet |"]
    assert table.splitlines()[-3:] == rows
