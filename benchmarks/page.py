"""What the benchmarks measured, kept in `results/`, and their tables in `README.md`: ``python benchmarks/page.py``."""

import ast
import datetime
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
RESULTS, README = FOLDER / "results", FOLDER / "README.md"
BEGIN, END = "<!-- tables: written by python benchmarks/page.py -->", "<!-- tables: end -->"
RIVALS = {name: name for name in ("drjax", "fedjax", "flax", "grain", "jaxopt", "nemos", "optax", "optimistix")}
RIVALS |= {name: name for name in ("blackjax", "brax", "diffrax", "equinox", "evosax", "flowjax", "lineax", "netket")}
RIVALS |= {name: name for name in ("numpyro", "tinygp")}
RIVALS |= {"haiku": "dm-haiku", "mujoco": "mujoco-mjx", "sklearn": "scikit-learn"}
"""Name of a module → of its distribution."""

Tables = dict[str, dict[str, dict[str, Any]]]
"""Title → name of a row → column → value."""


def shown(value: Any) -> str:
    """Return a value as the tables show it: a float with three digits."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def save(bench: str, part: str, command: str, tables: Tables, folder: Path = RESULTS) -> None:
    """Keep the tables of one run, in place of those of the last run of the same part."""
    path = folder / f"{bench}.json"
    parts = json.loads(path.read_text("utf-8")) if path.exists() else {}
    sources = [FOLDER / f"bench_{bench}.py", FOLDER / f"{bench}.py"]  # a benchmark, and what it measures
    text = "\n".join(source.read_text("utf-8") for source in sources if source.exists())
    versions = {
        name: importlib.metadata.version(name)
        for module, name in RIVALS.items()
        if re.search(rf"(?:import|from) {module}\b", text) and importlib.util.find_spec(module)
    }
    parts[part] = {
        "measured": datetime.date.today().isoformat(),
        "command": command,
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "versions": {"Python": platform.python_version(), "jax": importlib.metadata.version("jax")} | versions,
        "tables": {
            title: {row: {column: shown(value) for column, value in cells.items()} for row, cells in rows.items()}
            for title, rows in tables.items()
        },
    }
    parts = dict(sorted(parts.items(), key=lambda item: (len(item[0]), item[0])))  # 2, 8, 64 devices; real devices
    path.write_text(json.dumps(parts, indent=1, ensure_ascii=False) + "\n", "utf-8")


def sections(folder: Path = RESULTS) -> Iterator[str]:
    """Yield a section for each benchmark: what it measures, and its first table, of runs on most devices.

    A second one is shown if it has rows that the first lacks.
    """
    for path in sorted(folder.glob("*.json")):
        doc = ast.get_docstring(ast.parse((FOLDER / f"bench_{path.stem}.py").read_text("utf-8"))) or ""
        yield f"## {path.stem}\n\n" + doc.split("\n\n")[0].replace("\n", " ")
        parts = json.loads(path.read_text("utf-8"))
        parts_of: dict[str, str] = {}
        for part in reversed(parts):
            parts_of |= {title: part for title in parts[part]["tables"] if title not in parts_of}
        first, *others = parts_of
        rows = parts[parts_of[first]]["tables"][first].keys()
        second = [title for title in others[:1] if parts[parts_of[title]]["tables"][title].keys() - rows]
        for part, titles in itertools.groupby([first, *second], key=parts_of.__getitem__):
            run = parts[part]
            versions = (f"{name} {version}" for name, version in run["versions"].items() if name != "Python")
            yield f"{part}, {', '.join([run['measured'], *versions])}"
            yield from (_table(title, run["tables"][title]) for title in titles)


def _table(title: str, rows: dict[str, dict[str, str]]) -> str:
    columns = list(dict.fromkeys(column for cells in rows.values() for column in cells))
    lines = [[title, *columns], *([row, *(cells.get(name, "") for name in columns)] for row, cells in rows.items())]
    head, *body = (f"|{'|'.join(line)}|" for line in lines)
    return "\n".join([head, "|---" * (len(columns) + 1) + "|", *body])


def write() -> None:
    """Write the tables into `README.md`."""
    before, rest = README.read_text("utf-8").split(BEGIN)
    _, after = rest.split(END)
    README.write_text(f"{before}{BEGIN}\n" + "\n\n".join(sections()) + f"\n{END}{after}", "utf-8")


if __name__ == "__main__":
    write()
