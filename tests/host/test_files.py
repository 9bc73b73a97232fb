"""No public face: what writes files does more besides. A file is there whole, or as it was."""

import os
from pathlib import Path

import pytest

from paraxis._host import files


def save(path: Path, content: bytes) -> None:
    with files.replaced(path) as file:
        file.write(content)


def everything(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() if path.is_file() else b"directory" for path in directory.rglob("*")}


def test_a_file_takes_its_place_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "new" / "file"
    save(target, b"old")
    with files.replaced(target) as file:
        file.write(b"new")
        assert target.read_bytes() == b"old"
    assert everything(tmp_path) == {"new": b"directory", "file": b"new"}


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt("stop")], ids=["OSError", "interrupt"])
@pytest.mark.parametrize("old", [True, False], ids=["old", "new"])
def test_a_failure_leaves_what_was_there(error: BaseException, old: bool, tmp_path: Path) -> None:
    if old:
        (tmp_path / "file").write_text("old")
    before = everything(tmp_path)

    def half() -> None:
        with files.replaced(tmp_path / "file") as file:
            file.write(b"half")
            raise error

    with pytest.raises(type(error), match=str(error)):
        half()
    assert everything(tmp_path) == before


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_modes_are_those_that_the_umask_allows_and_old_ones_are_kept(umask: int, tmp_path: Path) -> None:
    target, before = tmp_path / "new" / "file", os.umask(umask)
    try:
        save(target, b"")
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o7777 for path in (target, target.parent)] == [0o666 & ~umask, 0o777 & ~umask]
    target.chmod(0o640)
    save(target, b"")
    assert target.stat().st_mode & 0o7777 == 0o640
