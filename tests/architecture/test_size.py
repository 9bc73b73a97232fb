"""What the package weighs: each room has a ceiling, which is lowered as the room shrinks, and never raised.

The goal is 20,000 lines, 11,000 statements and 150 files in ``src``, and 18,000 lines of tests. Lines are saved by
fewer things, not by longer lines: their length is ruff's to check.
"""

import ast
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "paraxis"


class Size(NamedTuple):
    """Lines, statements of Python, and files."""

    lines: int
    statements: int
    files: int


CEILINGS = {
    "_core": Size(2_893, 1_686, 13),
    "_host": Size(544, 362, 9),
    "_tables": Size(428, 258, 4),
    "cli": Size(417, 247, 6),
    "ensembles": Size(893, 541, 6),
    "launch": Size(400, 238, 4),
    "reports": Size(2_494, 1_515, 16),
    "solve": Size(3_259, 1_990, 19),
    "streaming": Size(1_685, 1_094, 11),
    "testing": Size(200, 68, 3),
    "train": Size(3_275, 1_904, 18),
    "transforms": Size(1_288, 726, 10),
    "the root": Size(279, 97, 4),
    "all rooms": Size(18_055, 10_726, 123),
}
TESTS = 17_841


def size(paths: Iterable[Path]) -> Size:
    texts = {path: path.read_text("utf-8") for path in paths}
    code = [text for path, text in texts.items() if path.suffix == ".py"]
    found = sum(isinstance(node, ast.stmt) for text in code for node in ast.walk(ast.parse(text)))
    return Size(sum(text.count("\n") for text in texts.values()), found, len(texts))


def rooms() -> dict[str, Size]:
    folders = [path for path in SOURCE.iterdir() if (path / "__init__.py").exists()]
    found = {path.name: size(path.rglob("*.py")) for path in folders}
    return found | {"the root": size(SOURCE.glob("*.py")), "all rooms": size((ROOT / "src").rglob("*.py"))}


def above(found: dict[str, Size], ceilings: dict[str, Size]) -> list[str]:
    """Return what is larger than its ceiling, or has none."""
    rows = {name: ceilings.get(name, Size(0, 0, 0)) for name in found}
    return [
        f"{name}: {size} above {rows[name]}"
        for name, size in found.items()
        if any(a > b for a, b in zip(size, rows[name], strict=True))
    ]


def test_no_room_is_above_its_ceiling():
    assert above(rooms(), CEILINGS) == []


def test_no_ceiling_is_out_of_date():
    """A room that has shrunk by a tenth or more has its ceiling lowered."""
    assert [name for name, found in rooms().items() if found.lines < 0.9 * CEILINGS[name].lines] == []


def test_the_tests_are_below_their_ceiling():
    folder = ROOT / "tests"
    assert size([*folder.rglob("*.py"), *folder.rglob("*.toml")]).lines <= TESTS


def test_what_is_above_is_seen():
    assert above({"a": Size(1, 1, 1)}, {"a": Size(1, 1, 1)}) == []
    assert above({"a": Size(1, 2, 1)}, {"a": Size(1, 1, 1)}) != []
    assert above({"new": Size(1, 1, 1)}, {}) != []
