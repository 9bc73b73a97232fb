"""What lies at the root of the repository: what tools and readers look for there, and nothing left over."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
READ_BY_PEOPLE = {"CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "README.md"}
READ_BY_TOOLS = {".gitignore", "Makefile", "hatch_build.py", "mkdocs.yml", "pyproject.toml"}
READ_BY_THE_MAKEFILE = {"constraints-tools.txt", "constraints.txt"}
FOLDERS = {".ci", "benchmarks", "docs", "examples", "src", "tests"}


def left_over(tracked: list[str]) -> set[str]:
    known = READ_BY_PEOPLE | READ_BY_TOOLS | READ_BY_THE_MAKEFILE
    return {name for name in tracked if name not in known and name.partition("/")[0] not in FOLDERS}


def test_nothing_is_left_over_at_the_root() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("an unpacked archive does not say what is tracked")
    found = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tracked = [name for name in found.split("\0") if name]
    assert "README.md" in tracked
    assert left_over(tracked) == set()


def test_what_a_comparison_left_behind_is_seen() -> None:
    assert left_over(["README.md", "src/paraxis/__init__.py", "old.npz", "runs/old.npz"]) == {"old.npz", "runs/old.npz"}
