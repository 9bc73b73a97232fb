"""The layers that ``docs/architecture.md`` draws, checked: ``python -m tests.architecture.layers``.

The drawing is the contract. A drawing follows a comment that says of which package it is. Each of its lines holds the
modules of one layer, ``a | b``, then, after two spaces or more, what they are for; a line that begins with spaces goes
on with that. A module may import those in the lines below it, and none beside it. One in brackets need not exist.
Rules that are no layers stand in ``pyproject.toml``.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_DRAWING = re.compile(r"<!-- layers: (?P<package>[\w.]+) -->\n\n?```text\n(?P<lines>.*?)\n```", re.DOTALL)
_LAYER = re.compile(r"(?P<modules>\(?\w+\)?( \| \(?\w+\)?)*)(\s{2,}\S.*)?")


def drawings(page: str) -> dict[str, list[str]]:
    """The layers of each package that a page draws, the highest first.

    Raises:
        ValueError: if there is none, or a line is no layer.
    """
    found: dict[str, list[str]] = {}
    for drawing in _DRAWING.finditer(page):
        layers = found[drawing["package"]] = []
        for line in drawing["lines"].splitlines():
            layer = _LAYER.fullmatch(line)
            if layer is not None:
                layers.append(layer["modules"])
            elif not layers or not line.startswith("  "):
                raise ValueError(f"the drawing of {drawing['package']}: no layer in {line!r}; write 'a | b   what for'")
    if not found:
        raise ValueError("no drawing: a fenced text after <!-- layers: package -->")
    return found


def contracts(found: dict[str, list[str]]) -> str:
    """The same for import-linter, beside what it is told in ``pyproject.toml``."""
    parts: list[str] = []
    for package, layers in found.items():
        known = '["__main__"]' if package == "paraxis" else "[]"
        parts += [
            "[[tool.importlinter.contracts]]",
            f'id = "{package}"',
            f'name = "Layers of {package}"',
            'type = "layers"',
            f'containers = ["{package}"]',
            "exhaustive = true",
            f"exhaustive_ignores = {known}",
            f"layers = {json.dumps(layers)}",
        ]
    return "\n".join(parts)


def check() -> subprocess.CompletedProcess[str]:
    """Run import-linter on all of it."""
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    settings = (ROOT / "pyproject.toml").read_text("utf-8")
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "layers.toml"
        config.write_text(settings + "\n" + contracts(drawings(page)), "utf-8")
        code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
        command = [sys.executable, "-c", code, "--no-logo", "--no-cache", "--config", str(config)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    done = check()
    sys.stdout.write(done.stdout + done.stderr)
    sys.exit(done.returncode)
