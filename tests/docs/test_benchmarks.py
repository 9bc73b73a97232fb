"""The benchmarks' page shows what was measured, and other pages quote its figures; nothing here runs a benchmark."""

import json
import re
from pathlib import Path

from tests._support import module_at

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks"
page = module_at(FOLDER / "page.py")


def numbers(text: str) -> list[str]:
    return [match.replace(",", "") for match in re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w.]*\d)", text)]


def is_measured(number: str, text: str) -> bool:
    """Return whether a number, or one that is rounded to it, is in a text."""
    digits = len(number.partition(".")[2])
    return any(f"{float(other):.{digits}f}" == number for other in numbers(text))


def test_the_page_has_the_tables_of_the_results_and_at_most_15_kb():
    text = page.README.read_text("utf-8")
    assert text.split(f"{page.BEGIN}\n")[1].split(f"\n{page.END}")[0] == "\n\n".join(page.sections())
    assert len(text.encode()) <= 15_000


def test_at_most_17_benchmarks_have_at_most_120_lines_each():
    lines = [len(path.read_text("utf-8").splitlines()) for path in FOLDER.glob("bench_*.py")]
    assert len(lines) <= 17
    assert max(lines) <= 120


def test_each_result_has_a_benchmark():
    benches = {path.stem.removeprefix("bench_") for path in FOLDER.glob("bench_*.py")}
    assert {path.stem for path in page.RESULTS.glob("*.json")} <= benches


def test_a_run_replaces_its_part_and_nothing_else(tmp_path: Path):
    for part, ms in (("8 devices", 1.0), ("64 devices", 2.0), ("2 devices", 3.0), ("8 devices", 4.0)):
        page.save("calls", part, "python benchmarks/bench_calls.py", {"calls": {"ours": {"ms": ms}}}, folder=tmp_path)
    parts = json.loads((tmp_path / "calls.json").read_text("utf-8"))
    found = {part: run["tables"]["calls"]["ours"]["ms"] for part, run in parts.items()}
    assert found == {"2 devices": "3", "8 devices": "4", "64 devices": "2"}
    assert list(parts) == ["2 devices", "8 devices", "64 devices"]
    assert "|ours|2|" in "\n".join(page.sections(tmp_path))


MEASURED = "\n".join(path.read_text("utf-8") for path in page.RESULTS.glob("*.json"))


def test_the_front_page_quotes_what_was_measured():
    front = (ROOT / "docs" / "index.md").read_text("utf-8")
    figures = re.findall(r"^\*\*([\d.]+)(?: ×)?\*\*", front, re.MULTILINE)
    assert len(figures) == 3
    assert [figure for figure in figures if not is_measured(figure, MEASURED)] == []


def test_the_readme_quotes_what_was_measured():
    _, section = (ROOT / "README.md").read_text("utf-8").split("\n## Speed\n")
    table = [row.split("|", 2)[2] for row in section.split("\n## ")[0].splitlines() if row.startswith("| ")][1:]
    assert len(table) > 5
    assert [figure for row in table for figure in numbers(row) if not is_measured(figure, MEASURED)] == []


def test_a_figure_that_nobody_measured_is_seen():
    assert is_measured("7.8", '"7.82"')
    assert not is_measured("7.9", '"7.82"')
