"""What is built has the files that it must have, and works where it is installed; the rest is ``make dist``."""

import io
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.packaging.__main__ import PackagingError, check_contents
from tests.packaging._project import ROOT


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
