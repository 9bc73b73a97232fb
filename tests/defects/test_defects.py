"""The list of defects is alive, and the command that applies them tells caught from not caught."""

import collections
import functools
import shutil
from pathlib import Path
from types import CodeType

import pytest

from tests.defects.__main__ import CAUGHT, main, outcome
from tests.defects._defect import ROOT, Defect, copy_tree, read_lists

DEFECTS = read_lists()


@functools.lru_cache(100)
def compiled(source: str) -> CodeType:
    """What runs: two texts that differ in comments alone have the same."""
    return without_lines(compile(source, "", "exec"))


def without_lines(code: CodeType) -> CodeType:
    inner = tuple(without_lines(x) if isinstance(x, CodeType) else x for x in code.co_consts)
    return code.replace(co_consts=inner, co_firstlineno=1, co_linetable=b"")


def test_there_are_defects_in_every_room() -> None:
    found = collections.Counter(defect.file.partition("/")[0] for defect in DEFECTS)
    rooms = {path.name for path in (ROOT / "src" / "paraxis").iterdir() if (path / "__init__.py").exists()}
    assert found.total() >= 60
    assert rooms - set(found) == set()


def test_every_defect_can_be_applied_and_names_tests_that_are_there(tmp_path: Path) -> None:
    assert len({defect.name for defect in DEFECTS}) == len(DEFECTS)
    stale = []
    shutil.copytree(ROOT / "src", tmp_path / "src")
    for defect in DEFECTS:
        try:
            path = defect.find(tmp_path)
            before = path.read_text("utf-8")
            defect.apply(tmp_path)
            if compiled(path.read_text("utf-8")) == compiled(before):
                stale.append(f"{defect.name}: changes nothing that runs")
            path.write_text(before, "utf-8")
        except (ValueError, SyntaxError) as error:
            stale.append(f"{defect.name}: {error}")
        stale += [f"{defect.name}: no {test}" for test in defect.tests if not (ROOT / test.partition("::")[0]).exists()]
    assert not stale, "\n".join(stale)


def test_a_change_of_comments_alone_is_no_defect() -> None:
    before = "@f\ndef g(x):\n    return x  # one\n\n\ny = 1\n"
    assert compiled(before) == compiled(before.replace("# one", "# two\n    # lines"))
    for old, new in (("@f", "@h"), ("return x", "return -x"), ("y = 1", "y = 1.0"), ("y = 1", ""), ("y", "x = y")):
        assert compiled(before) != compiled(before.replace(old, new))


def test_a_text_that_has_moved_to_another_file_is_found_there(tmp_path: Path) -> None:
    package = tmp_path / "src" / "paraxis"
    package.mkdir(parents=True)
    (package / "old.py").write_text("x = 1\n")
    (package / "new.py").write_text("y = 1\n")
    Defect("moved", "old.py", "y = 1", "y = 2", ()).apply(tmp_path)
    assert (package / "new.py").read_text() == "y = 2\n"
    (package / "twice.py").write_text("y = 2\n")
    with pytest.raises(ValueError, match=r"'double': its text is found 2 times, in old\.py or elsewhere"):
        Defect("double", "old.py", "y = 2", "y = 3", ()).apply(tmp_path)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project, with a test that looks at the version, and one of the night."""
    copy = tmp_path_factory.mktemp("copy")
    copy_tree(copy)
    (copy / "tests" / "test_here.py").write_text(
        "import pytest\n\n\ndef test_version():\n    import paraxis\n    assert paraxis.__version__[0] == '0'\n\n\n"
        "@pytest.mark.slow\ndef test_at_night():\n    assert False\n"
    )
    return copy


VERSION = '__version__ = "0.'


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("text", "becomes", "tests", "expected"),
    [
        (VERSION, '__version__ = "1.', "tests/test_here.py", CAUGHT),
        (VERSION, '__version__ = "0.1', "tests/test_here.py", "NOT CAUGHT: its tests pass"),
        (VERSION, '__version__ = "1.', "tests/test_here.py::test_at_night", "NOT CAUGHT: no test was run"),
        (VERSION, "]", "tests/laws/test_padding.py", "NOT CAUGHT: the package cannot even be imported"),
        ("no such text", "", "tests/test_here.py", "STALE"),
    ],
)
def test_what_becomes_of_a_defect_is_told(copy: Path, text: str, becomes: str, tests: str, expected: str) -> None:
    file = copy / "src" / "paraxis" / "__init__.py"
    before = file.read_bytes()
    told, printed = outcome(Defect("one", "__init__.py", text, becomes, (tests,)), copy)
    assert told.startswith(expected), printed
    assert file.read_bytes() == before


def test_a_word_that_no_defect_has_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no defect has this"]) == 2
    assert "no defect has this" in capsys.readouterr().err
