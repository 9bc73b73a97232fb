"""The figures of the benchmarks' page are those that the benchmarks printed; nothing here runs a benchmark."""

import importlib.util
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks"


def _page() -> Any:
    spec = importlib.util.spec_from_file_location("page", FOLDER / "page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


page = _page()
CHOSEN = tomllib.loads(page.FIGURES.read_text("utf-8"))
TITLES = CHOSEN.pop("titles")
RESULTS = {path.stem: json.loads(path.read_text("utf-8")) for path in page.RESULTS.glob("*.json")}


def rows(text: str, word: str) -> list[str]:
    """Return a page's table rows with a word in them."""
    return [line for line in text.splitlines() if line.startswith("|") and word in line]


def numbers(text: str) -> list[str]:
    return [match.replace(",", "") for match in re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w.]*\d)", text)]


def is_shown(number: str, text: str) -> bool:
    """Return whether a number, or one that is rounded to it, is in a text."""
    digits = len(number.partition(".")[2])
    return any(f"{float(other):.{digits}f}" == number for other in numbers(text))


def test_the_page_has_the_figures_of_the_results() -> None:
    text = page.README.read_text("utf-8")
    assert text == page.written(text, page.figures()), "run: python benchmarks/page.py"


def test_each_benchmark_has_results_and_figures() -> None:
    benches = {path.stem.removeprefix("bench_") for path in FOLDER.glob("bench_*.py")}
    assert benches == set(TITLES) == set(CHOSEN) == set(RESULTS)


@pytest.mark.parametrize("bench", CHOSEN)
def test_what_is_quoted_is_a_figure(bench: str) -> None:
    names = [figure["of"] for figure in CHOSEN[bench]]
    assert len(names) == len(set(names))
    for part in RESULTS[bench].values():
        assert part.get("quoted", {}).keys() <= set(names)
        assert {"measured", "command", "machine", "versions", "printed"} <= part.keys()


# Read here by the line's beginning and its last word, whatever the page thinks is a table.
@pytest.mark.parametrize(
    ("bench", "begins", "of"),
    [
        ("fedavg", "  DrJAX ", "DrJAX's time over ours"),
        ("memory", "  mean of losses, gradient ", "mean of losses, gradient"),
        ("pmap", "  one call, 40 small leaves, µs ", "one call with 40 small leaves: time over `jax.pmap`'s"),
    ],
)
def test_what_a_line_ends_with_is_shown(bench: str, begins: str, of: str) -> None:
    lines = [line for part in RESULTS[bench].values() for line in part["printed"] if line.startswith(begins)]
    section = page.README.read_text("utf-8").split(f"\n`bench_{bench}.py`. ")[1].split("\n## ")[0]
    (row,) = rows(section, f"| {of} |")
    assert [cell.strip(" *†\N{NO-BREAK SPACE}") for cell in row.split("|")[3:-1]] == [
        line.split()[-1] for line in lines
    ]


TWO_LINES = """\
Title, 2 devices
             ms  setup s   AR
  ours     1.50     0.44    1
  theirs   3.00     1,000  12
  alone    2.00
  a remark that is no row

  and one after a blank line""".splitlines()
ONE_LINE = """\
Title, µs                 median   ours / it
  px.f(x)                   36.9        1.00
  a name, longer by much      21.7        1.70
  px.f(x)                   1 all_reduce""".splitlines()


def test_tables_are_read_as_they_are_printed() -> None:
    assert page.tables(TWO_LINES) == {
        "Title, 2 devices": {
            "ours": {"ms": "1.50", "setup s": "0.44", "AR": "1"},
            "theirs": {"ms": "3.00", "setup s": "1,000", "AR": "12"},
            "alone": {"ms": "2.00"},
            "a remark that is no row": {},
        }
    }
    assert page.tables(ONE_LINE)["Title, µs"] == {
        "px.f(x)": {"median": "36.9", "ours / it": "1.00"},
        "a name, longer by much": {"median": "21.7", "ours / it": "1.70"},
    }


@pytest.mark.parametrize(
    ("cell", "shown"),
    [
        ("Title > ours > ms", "1.50"),
        ("Title > ours > ms over theirs", "0.50"),
        ("Title > theirs > setup s over ours", "2272.73"),
        ("Title > theirs > setup s", "1,000"),
        ("Title > theirs > AR", "12"),
        ("Title > nobody > ms", None),
        ("Title > alone > AR", None),
        ("Title > ours > ms over nobody", None),
        ("Other > ours > ms", None),
    ],
)
def test_a_cell_is_found(cell: str, shown: str | None) -> None:
    assert page.value(page.tables(TWO_LINES), cell) == shown


@pytest.mark.parametrize(
    ("target", "met", "not_met"),
    [
        ("≤ 1.05", ["1.05", "0.98–1.05"], ["1.06", "0.97–1.11", "1,000"]),
        ("≥ 4", ["4", "18.59"], ["3.99", "3.9–4.6"]),
        ("≥ 95%", ["95.0%"], ["94.9%"]),
        ("= 1", ["1"], ["2", "1.0"]),
        ("reported", ["0", "anything"], []),
    ],
)
def test_a_target_is_missed_by_any_of_its_numbers(target: str, met: list[str], not_met: list[str]) -> None:
    assert not any(page.missed(target, shown) for shown in met)
    assert all(page.missed(target, shown) for shown in not_met)


def test_a_run_replaces_its_part_and_nothing_else(tmp_path: Path) -> None:
    for part, line in (("8 devices", "a"), ("64 devices", "b"), ("2 devices", "c"), ("8 devices", "d")):
        page.save("some", part, f"python benchmarks/bench_some.py {line}", ["", line], folder=tmp_path)
    parts = json.loads((tmp_path / "some.json").read_text("utf-8"))
    assert {part: found["printed"] for part, found in parts.items()} == {
        "2 devices": ["c"],
        "8 devices": ["d"],
        "64 devices": ["b"],
    }
    assert parts["8 devices"]["command"].endswith("bench_some.py d")
    assert "jax" in parts["8 devices"]["versions"]


def test_a_figure_that_was_not_printed_is_an_error(tmp_path: Path) -> None:
    page.save("pmap", "2 devices", "python benchmarks/bench_pmap.py", ["nothing of use"], folder=tmp_path)
    with pytest.raises(
        LookupError, match=r"pmap, 2 devices: .* nothing printed for 'pmap > train step, MLP, ms > ratio'"
    ):
        page.figures(tmp_path)


def test_the_front_page_quotes_the_figures() -> None:
    text = page.README.read_text("utf-8")
    front = (ROOT / "docs" / "index.md").read_text("utf-8")
    shown = re.findall(r"^\*\*([\d.]+).*\b(DrJAX|JAXopt|hand)\b", front, re.MULTILINE)
    assert [rival for _, rival in shown] == ["DrJAX", "JAXopt", "hand"]
    for figure, rival in shown:
        assert any(is_shown(figure, row) for row in rows(text, rival)), figure


def test_the_readme_quotes_the_figures() -> None:
    _, section = (ROOT / "README.md").read_text("utf-8").split("\n## Speed\n")
    table = [row.split("|", 2)[2] for row in section.split("\n## ")[0].splitlines() if row.startswith("| ")][1:]
    assert len(table) > 5
    text = "\n".join(rows(page.README.read_text("utf-8"), "|"))
    assert [figure for row in table for figure in numbers(row) if not is_shown(figure, text)] == []
