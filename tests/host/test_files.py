"""No public face: what writes files does more besides. A file is there whole, or as it was."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paraxis._host import files


def save(path: Path, number: int = 0) -> None:
    with files.replaced(path) as file:
        np.savez(file, x=np.full(20, number))


def everything(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() if path.is_file() else b"directory" for path in directory.rglob("*")}


def holds(path: Path, number: int) -> bool:
    with np.load(path) as file:
        return bool((file["x"] == number).all())


def watched(monkeypatch: pytest.MonkeyPatch, during: Callable[[Any], None]) -> None:
    """Each file that is written is shown to a function when all is in it."""
    save = np.savez

    def saved(file: Any, **arrays: Any) -> None:
        save(file, **arrays)
        during(file)

    monkeypatch.setattr(np, "savez", saved)


def test_a_file_takes_its_place_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "new" / "file"
    seen: list[bool | None] = []
    watched(monkeypatch, lambda file: seen.append(holds(target, 1) if target.exists() else None))
    save(target, 1)
    save(target, 2)
    assert seen == [None, True]
    assert holds(target, 2)
    assert everything(tmp_path).keys() == {"new", "file"}


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt("stop")], ids=["OSError", "interrupt"])
@pytest.mark.parametrize("old", [True, False], ids=["old", "new"])
def test_a_failure_leaves_what_was_there(
    error: BaseException, old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if old:
        (tmp_path / "file").write_text("old")
    before = everything(tmp_path)

    def half(file: Any, **arrays: Any) -> None:
        file.write(b"half")
        raise error

    monkeypatch.setattr(np, "savez", half)
    with pytest.raises(type(error), match=str(error)):
        save(tmp_path / "file")
    assert everything(tmp_path) == before


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_modes_are_those_that_the_umask_allows_and_old_ones_are_kept(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        save(tmp_path / "new" / "file")
    finally:
        os.umask(before)
    assert (mode_of(tmp_path / "new" / "file"), mode_of(tmp_path / "new")) == (0o666 & ~umask, 0o777 & ~umask)
    (tmp_path / "new" / "file").chmod(0o640)
    save(tmp_path / "new" / "file")
    assert mode_of(tmp_path / "new" / "file") == 0o640


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o7777
