"""What the benchmarks printed, kept in `results/`, and the figures of `README.md`, read off it.

`harness.main` calls `save` where ``--save`` is given, as `make bench` does: what one run printed replaces that
part of its benchmark's results, and nothing else. `figures.toml` says which number of which table is shown beside which
target. `python benchmarks/page.py` writes the figures into `README.md`, which is also a page of the documentation.
"""

import ast
import datetime
import html
import importlib.metadata
import json
import os
import platform
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
RESULTS, FIGURES, README = FOLDER / "results", FOLDER / "figures.toml", FOLDER / "README.md"
BEGIN, END = "<!-- figures: written by python benchmarks/page.py -->", "<!-- figures: end -->"
RIVALS = {name: name for name in ("drjax", "jaxopt", "optax", "flax", "grain")} | {"sklearn": "scikit-learn"}
"""Name of a module → of its distribution."""

_WORDS = re.compile(r"\S+(?: \S+)*")  # two spaces separate columns
_NUMBER = re.compile(r"[\d,]*\d(?:\.\d+)?(?:e[+-]?\d+)?")

Table = dict[str, dict[str, str]]
"""Name of a row → title of a column → what is printed there."""


def save(bench: str, part: str, command: str, printed: list[str], folder: Path = RESULTS) -> None:
    """Keep what one run of a benchmark printed, in place of what the last one of the same part did."""
    path = folder / f"{bench}.json"
    parts = json.loads(path.read_text("utf-8")) if path.exists() else {}
    while printed and not printed[0]:
        printed = printed[1:]
    parts[part] = {
        "measured": datetime.date.today().isoformat(),
        "command": command,
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "versions": {"Python": platform.python_version()} | dict(_versions(FOLDER / f"bench_{bench}.py")),
        "printed": printed,
    }
    parts = dict(sorted(parts.items(), key=lambda item: (len(item[0]), item[0])))  # 2, 8, 64 devices; real devices
    path.write_text(json.dumps(parts, indent=1, ensure_ascii=False) + "\n", "utf-8")


def _versions(path: Path) -> Iterator[tuple[str, str]]:
    """Yield JAX's version, and those of the rivals that a benchmark names."""
    text = path.read_text("utf-8") if path.exists() else ""
    for name in ["jax", *(package for module, package in RIVALS.items() if module in text)]:
        yield name, importlib.metadata.version(name)


def tables(printed: list[str]) -> dict[str, Table]:
    """Read tables as the benchmarks print them: a title, the columns beside or below it, rows, a blank line.

    A number belongs to the column that ends where the number does, or nearest to it; or, if a row is full, to that
    in the same place. Of rows with one name, the first counts.
    """
    found: dict[str, Table] = {}
    rows: Table | None = None
    columns: list[tuple[str, int]] = []
    title = ""
    for line in printed:
        words = [(match[0], match.end()) for match in _WORDS.finditer(line)]
        if not words:
            title, rows = "", None
        elif rows is not None:
            (name, _), *cells = words
            full = len(cells) == len(columns)
            row = rows.setdefault(name, {})
            for place, (cell, end) in enumerate(cells):
                near = columns[place] if full else min(columns, key=lambda column: abs(column[1] - end))
                row.setdefault(near[0], cell)
        elif not title and len(words) == 1:
            title = words[0][0]
        else:
            columns = words if title else words[1:]
            rows = found[title or words[0][0]] = {}
    return found


def value(found: dict[str, Table], cell: str) -> str | None:
    """Return what a cell of `figures.toml` names, or nothing where it was not printed.

    ``"beginning of the title > row > column"``, or a ratio to the same column of another row,
    ``"title > row > column over row"``.
    """
    title, row, rest = cell.split(" > ")
    column, _, other = rest.partition(" over ")
    table = next((rows for name, rows in found.items() if name.startswith(title)), {})
    shown, base = (table.get(name, {}).get(column) for name in (row, other or row))
    if shown is None or base is None:
        return None
    if other:
        return f"{_number(shown) / _number(base):.2f}"
    if not _NUMBER.fullmatch(shown) or _number(shown) >= 100 or "e" in shown:
        return shown
    return f"{_number(shown):.2f}" if re.search(r"\.\d{3,}$", shown) else shown


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def missed(target: str, shown: str) -> bool:
    """Return whether one of the numbers of a figure misses its target; targets in words are not judged."""
    sign, _, bound = target.partition(" ")
    if sign not in ("≤", "≥", "="):
        return False
    if sign == "=":
        return shown != bound
    limit = _number(bound.removesuffix("%"))
    numbers = [_number(match) for match in _NUMBER.findall(shown)]
    return any(number > limit if sign == "≤" else number < limit for number in numbers)


def figures(folder: Path = RESULTS) -> str:
    """Return the figures of all benchmarks, and what they printed, as Markdown.

    Raises:
        LookupError: a benchmark has printed a part, but not a cell that is to be shown from it.
    """
    chosen = tomllib.loads(FIGURES.read_text("utf-8"))
    counts, sections = [], []
    for bench, title in chosen["titles"].items():
        path = folder / f"{bench}.json"
        parts = json.loads(path.read_text("utf-8")) if path.exists() else {}
        shown = {name: _figures_of(bench, name, part, chosen[bench]) for name, part in parts.items()}
        judged = [
            missed(target, figure)
            for name in parts
            for choice, figure in zip(chosen[bench], shown[name], strict=True)
            if figure and (target := _of(choice["target"], name))[:1] in {"≤", "≥", "="}
        ]
        met = f"{len(judged) - sum(judged)} | {sum(judged)}" if judged else "no target | "
        counts.append(f"| [{title}](#{_anchor(title)}) | {met} |")
        table = "\n".join(_rows(parts, chosen[bench], shown))
        quoted = ["† Several runs, or one whose output was not kept."] * ("†" in table)
        sections.append("\n\n".join([f"## {title}", _about(bench), table, *quoted, *_printed(parts)]))
    summary = ["| | targets met | missed |", "|---|---|---|", *counts]
    return "\n".join(summary) + "\n\n" + "\n\n".join(sections)


def _figures_of(bench: str, name: str, part: dict[str, Any], choices: list[dict[str, Any]]) -> list[str]:
    """Return each figure of a part as it is quoted, else as it was printed; nothing for those of other parts."""
    read, found = tables(part["printed"]), []
    for choice in choices:
        cell = _of(choice["cell"], name)
        shown = part.get("quoted", {}).get(choice["of"]) or (value(read, cell) if cell else "")
        if shown is None:
            raise LookupError(f"{bench}, {name}: {choice['of']!r}: nothing printed for {cell!r}")
        found.append(shown)
    return found


def _rows(parts: dict[str, Any], choices: list[dict[str, Any]], shown: dict[str, list[str]]) -> Iterator[str]:
    yield "| | target | " + " | ".join(parts) + " |"
    yield "|---|---|" + "---|" * len(parts)
    for number, choice in enumerate(choices):
        cells: list[str] = []
        for name, part in parts.items():
            figure = shown[name][number]
            bold = "**" if figure and missed(_of(choice["target"], name), figure) else ""
            dagger = "\N{NO-BREAK SPACE}†" if choice["of"] in part.get("quoted", {}) else ""
            cells.append(f"{bold}{figure}{bold}{dagger}")
        targets = choice["target"].values() if isinstance(choice["target"], dict) else [choice["target"]]
        target = "; ".join(target.removeprefix("= ") for target in targets)
        if any(cells):
            yield f"| {choice['of']} | {target} | {' | '.join(cells)} |"


def _of(choice: str | dict[str, str], part: str) -> str:
    """Return what holds for a part, which is the text, or that of the part."""
    return choice if isinstance(choice, str) else choice.get(part, "")


def _anchor(title: str) -> str:
    """Return the anchor of a title, by the rule that GitHub and MkDocs have in common for ours."""
    return re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")


def _about(bench: str) -> str:
    docstring = ast.get_docstring(ast.parse((FOLDER / f"bench_{bench}.py").read_text("utf-8"))) or ""
    first = docstring.split("\n\n")[0].replace("\n", " ").replace("``", "`")
    return f"`bench_{bench}.py`. {first}"


def _printed(parts: dict[str, Any]) -> Iterator[str]:
    """Yield where the figures are from, parts measured alike together, and what was printed."""
    alike: dict[str, list[str]] = {}
    for name, part in parts.items():
        versions = ", ".join(f"{package} {version}" for package, version in part["versions"].items())
        note = f" ({part['note']})" if part.get("note") else ""
        about = f"measured {part['measured']} on {part['machine']}, {versions}{note}: `{part['command']}`"
        alike.setdefault(about, []).append(name)
    for about, names in alike.items():
        yield f"{', '.join(names)}: {about}"
    text = "\n\n".join("\n".join(part["printed"]) for part in parts.values() if part["printed"])
    if text:
        text = html.escape(text, quote=False)
        yield f"<details>\n<summary>What was printed</summary>\n\n<pre><code>{text}\n</code></pre>\n\n</details>"


def written(readme: str, new: str) -> str:
    """Return the text of `README.md` with new figures."""
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{new}\n{END}{after}"


def write() -> None:
    """Write the figures into `README.md`."""
    README.write_text(written(README.read_text("utf-8"), figures()), "utf-8")


if __name__ == "__main__":
    write()
