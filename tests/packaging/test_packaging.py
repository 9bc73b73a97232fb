"""What is built has the files that it must have, works where it is installed, and says what it is: ``make dist``."""

import io
import re
import subprocess
import sys
import tarfile
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest

import paraxis as px
from tests._support import module_at
from tests.packaging.__main__ import PackagingError, check_contents
from tests.packaging._programs import EXTRAS, FOR_USERS, PROGRAMS, PROJECT, ROOT


def built(folder: Path, in_wheel: set[str], in_sdist: set[str]) -> tuple[Path, Path]:
    wheel, sdist = folder / "p-1-py3-none-any.whl", folder / "p-1.tar.gz"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in sorted(in_wheel):
            archive.writestr(name, "")
    with tarfile.open(sdist, "w:gz") as archive:
        for name in sorted(in_sdist):
            archive.addfile(tarfile.TarInfo(f"p-1/{name}"), io.BytesIO())
    return wheel, sdist


def test_files_that_are_missing_or_too_many_are_named(tmp_path: Path) -> None:
    kept = {"README.md", "src/p/__init__.py", "src/p/py.typed", "tests/test_p.py", "examples/e.py"}
    package = {"p/__init__.py", "p/py.typed", "p-1.dist-info/METADATA", "paraxis/examples/e.py"}
    all_files = kept | {"PKG-INFO"}
    check_contents(*built(tmp_path, package, all_files), kept)
    for wheel, sdist, said in [
        (package - {"p/py.typed"}, all_files, r"the wheel lacks \['p/py.typed'\]"),
        (package | {"tests/test_p.py"}, all_files, r"the wheel .* should not have \['tests/test_p.py'\]"),
        (package, all_files | {"scratch.txt"}, r"the sdist .* should not have \['scratch.txt'\]"),
    ]:
        with pytest.raises(PackagingError, match=said):
            check_contents(*built(tmp_path, wheel, sdist), kept)


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="what is built is what git keeps")
def test_a_wheel_is_built_and_works_where_nothing_else_is_installed() -> None:
    command = [sys.executable, "-m", "tests.packaging", "--only", "bare"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bare" in done.stdout.splitlines()[-1]


def cited(key: str) -> str:
    """Return what ``CITATION.cff`` has under a key."""
    match = re.search(rf"^[ -]*{key}: (.*)$", (ROOT / "CITATION.cff").read_text("utf-8"), re.MULTILINE)
    assert match, key
    return match[1].strip('"')


def test_the_citation_says_what_the_project_says() -> None:
    assert cited("version") == px.__version__
    assert cited("license") == PROJECT["license"]
    assert [cited("name")] == [author["name"] for author in PROJECT["authors"]]


def test_the_change_log_ends_with_this_version() -> None:
    log = (ROOT / "CHANGELOG.md").read_text("utf-8")
    released = re.findall(r"^## \[?(\d[^] ]*)", log, re.MULTILINE)
    assert released[0] == px.__version__


def test_each_extra_has_a_program_that_is_run_with_it() -> None:
    assert {*PROGRAMS} == {"bare", *EXTRAS}


def test_each_extra_for_users_is_on_the_page_about_installing() -> None:
    page = (ROOT / "docs" / "install.md").read_text("utf-8")
    assert sorted(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == sorted([*FOR_USERS, "examples"])


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the build's own module, whose base classes are only there while something is built."""
    interface = types.ModuleType("hatchling")
    interface.__dict__.update(MetadataHookInterface=object, BuildHookInterface=object)
    for place in ("metadata.plugin.interface", "builders.hooks.plugin.interface"):
        parts = ["hatchling", *place.split(".")]
        for end in range(len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[: end + 1]), interface)
    return module_at(ROOT / "hatch_build.py")


def test_on_an_index_no_link_of_the_readme_is_dead(hook: Any) -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    targets = re.findall(r"\]\(([^)]*)\)", text)
    files = [target.partition("#")[0] for target in targets if "://" not in target]
    assert files
    assert [file for file in files if not (ROOT / file).is_file()] == []
    shown = hook.readme(text, "")
    assert [target for target in re.findall(r"\]\(([^)]*)\)", shown) if "://" not in target] == []
    assert [file for file in files if f"`{file}`" not in shown] == []
    led = re.findall(r"\]\(([^)]*)\)", hook.readme(text, "https://somewhere.test/"))
    assert led == [target if "://" in target else f"https://somewhere.test/{target}" for target in targets]


def test_a_wheel_has_the_examples_unless_it_leads_into_a_clone(hook: Any) -> None:
    for version, expected in (("standard", {"examples": "paraxis/examples"}), ("editable", {})):
        data: dict[str, dict[str, str]] = {"force_include": {}}
        hook.Examples().initialize(version, data)
        assert data["force_include"] == expected
