"""What type checkers say of users' code: ``python -m tests.types``.

``user/right.py`` has no mistakes, and says by ``assert_type`` what each call gives. ``user/wrong.py`` has a mistake on
each line that ends in ``# wrong``. Both checkers see a project of a user's: the two files, and Paraxis installed.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
USER = Path(__file__).parent / "user"

Lines = dict[tuple[str, int], str]
"""By file and number of a line, a text."""


def marked(sources: dict[str, str]) -> Lines:
    """The lines that are mistakes."""
    return {
        (name, number): line
        for name, source in sources.items()
        for number, line in enumerate(source.splitlines(), 1)
        if line.endswith("# wrong")
    }


def differences(mistakes: Lines, complaints: Lines) -> list[str]:
    """What was not noticed, and what was said of code without mistakes."""
    missed = [f"{name}:{at}: nothing was said of {mistakes[name, at]!r}" for name, at in mistakes.keys() - complaints]
    return sorted([*missed, *(f"{name}:{at}: {complaints[name, at]}" for name, at in complaints.keys() - mistakes)])


def pyright(project: Path) -> Lines:
    """The errors of pyright."""
    settings = {"include": ["."], "extraPaths": [str(ROOT / "src")], "pythonVersion": "3.11"}
    (project / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(project)]
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        found = json.loads(done.stdout)["generalDiagnostics"]
    except (ValueError, KeyError):
        raise RuntimeError(f"pyright did not say what it found: {done.stdout}{done.stderr}") from None
    return {(Path(x["file"]).name, x["range"]["start"]["line"] + 1): x["message"] for x in found}


def mypy(project: Path) -> Lines:
    """The errors of mypy. What it learns of JAX and Flax is kept for the next time."""
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-context", "--follow-imports=silent"]
    command += ["--disable-error-code=import-untyped", f"--cache-dir={ROOT / '.mypy_cache'}", "."]
    environment = {**os.environ, "MYPYPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=project, env=environment)
    if done.returncode not in (0, 1) or not done.stdout:
        raise RuntimeError(f"mypy did not say what it found: {done.stdout}{done.stderr}")
    found = re.findall(r"^(\w+\.py):(\d+): error: (.*)$", done.stdout, re.MULTILINE)
    return {(name, int(number)): message for name, number, message in found}


def main() -> int:
    """Print what is not as it should be.

    Returns:
        The exit status: 1 if there is anything.
    """
    mistakes = marked({path.name: path.read_text("utf-8") for path in USER.glob("*.py")})
    with tempfile.TemporaryDirectory() as place:
        project = Path(shutil.copytree(USER, Path(place) / "user"))
        found = {checker.__name__: differences(mistakes, checker(project)) for checker in (pyright, mypy)}
    for name, lines in found.items():
        for line in lines:
            print(f"{name}: {line}")
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main())
