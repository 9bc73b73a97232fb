"""The list of defects is alive, and the command that applies them tells caught from not caught."""

import ast
import shutil
from pathlib import Path

import pytest

from tests.defects.__main__ import CAUGHT, ROOT, Defect, copy_tree, main, outcome, read_lists

DEFECTS = read_lists()


def test_there_are_defects_in_every_room() -> None:
    rooms = {path.name for path in (ROOT / "src" / "paraxis").iterdir() if (path / "__init__.py").exists()}
    assert len({defect.name for defect in DEFECTS}) == len(DEFECTS) >= 60
    assert rooms - {defect.file.partition("/")[0] for defect in DEFECTS} == set()


def test_every_defect_can_be_applied_and_names_tests_that_are_there(tmp_path: Path) -> None:
    stale: list[str] = []
    shutil.copytree(ROOT / "src", tmp_path / "src")
    for defect in DEFECTS:
        try:
            path = defect.apply(tmp_path)
            defective, healthy = path.read_text("utf-8"), (ROOT / path.relative_to(tmp_path)).read_text("utf-8")
            path.write_text(healthy, "utf-8")
            if ast.dump(ast.parse(defective)) == ast.dump(ast.parse(healthy)):
                stale.append(f"{defect.name}: changes nothing that runs")
        except (ValueError, SyntaxError) as error:
            stale.append(f"{defect.name}: {error}")
        for test in defect.tests:
            file, _, name = test.partition("[")[0].partition("::")
            stale += [] if f"def {name}" in (ROOT / file).read_text("utf-8") else [f"{defect.name}: no {test}"]
    assert not stale, "\n".join(stale)


def test_a_text_that_has_moved_to_another_file_is_found_there(tmp_path: Path) -> None:
    package = tmp_path / "src" / "paraxis"
    package.mkdir(parents=True)
    (package / "old.py").write_text("x = 1\n")
    (package / "new.py").write_text("y = 1\n")
    Defect("moved", "old.py", "y = 1", "y = 2", []).apply(tmp_path)
    assert (package / "new.py").read_text() == "y = 2\n"


VERSION = '__version__ = "0.'
TOLD = [(VERSION, '__version__ = "1.', CAUGHT), (VERSION, '__version__ = "0.1', "NOT CAUGHT: its tests pass")]


@pytest.mark.parametrize(("text", "becomes", "expected"), [*TOLD, ("no such text", "", "STALE")])
def test_what_becomes_of_a_defect_is_told(tmp_path: Path, text: str, becomes: str, expected: str) -> None:
    copy_tree(tmp_path)
    found = "Path(find_spec('paraxis').origin).read_text()"  # not imported, and JAX with it
    (tmp_path / "tests" / "test_here.py").write_text(
        "from importlib.util import find_spec\nfrom pathlib import Path\n\n"
        f"def test_version():\n    assert {VERSION!r} in {found}\n"
    )
    told, printed = outcome(Defect("one", "__init__.py", text, becomes, ["tests/test_here.py"]), tmp_path)
    assert told.startswith(expected), printed
    assert VERSION in (tmp_path / "src" / "paraxis" / "__init__.py").read_text("utf-8")


def test_a_word_that_no_defect_has_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no defect has this"]) == 2
    assert "no defect has this" in capsys.readouterr().err
