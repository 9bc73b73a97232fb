"""Files and directories are there whole, or as they were."""

import os
import pathlib
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paraxis._core import files


def everything(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): path.read_text() if path.is_file() else "directory"
        for path in directory.rglob("*")
    }


def test_a_file_takes_its_place_when_the_block_is_done(tmp_path: Path) -> None:
    target = tmp_path / "new" / "file"
    with files.replaced(target) as file:
        file.write(b"one")
        assert not target.exists()
    with files.replaced(target) as file:
        file.write(b"two")
        assert target.read_text() == "one"
    assert everything(tmp_path) == {"new": "directory", "new/file": "two"}


def test_a_file_is_on_the_disk_before_it_takes_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    fsync, replace = os.fsync, pathlib.Path.replace

    def synced(handle: int) -> None:
        order.append(f"fsync of {os.fstat(handle).st_size} bytes")
        fsync(handle)

    def placed(self: Path, target: Any) -> Path:
        order.append("replace")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(pathlib.Path, "replace", placed)
    with files.replaced(tmp_path / "file") as file:
        file.write(b"three")
    assert order == ["fsync of 5 bytes", "replace"]


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt("stop")], ids=["OSError", "interrupt"])
@pytest.mark.parametrize("old", [True, False], ids=["old", "new"])
def test_a_failure_in_the_block_leaves_what_was_there(error: BaseException, old: bool, tmp_path: Path) -> None:
    if old:
        (tmp_path / "file").write_text("old")
        (tmp_path / "directory").mkdir()
        (tmp_path / "directory" / "part").write_text("old")
    before = everything(tmp_path)

    def half_a_file() -> None:
        with files.replaced(tmp_path / "file") as file:
            file.write(b"half")
            raise error

    def half_a_directory() -> None:
        with files.replaced_directory(tmp_path / "directory") as directory:
            (directory / "part").write_text("half")
            raise error

    for half in (half_a_file, half_a_directory):
        with pytest.raises(type(error), match=str(error)):
            half()
    assert everything(tmp_path) == before


def test_a_directory_takes_the_place_of_an_old_one_with_all_it_holds(tmp_path: Path) -> None:
    target = tmp_path / "new" / "directory"
    for name in ("one", "two"):
        with files.replaced_directory(target) as directory:
            (directory / name).write_text(name)
    assert everything(tmp_path / "new") == {"directory": "directory", "directory/two": "two"}
    assert target.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("number", [1, 2])
def test_a_failure_of_the_exchange_gives_the_old_directory_back(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, calls, rename = tmp_path / "directory", [], pathlib.Path.rename
    target.mkdir()
    (target / "part").write_text("old")

    def failing(self: Path, place: Any) -> Path:
        calls.append(place)
        if len(calls) == number:
            raise OSError("the disk is gone")
        return rename(self, place)

    monkeypatch.setattr(pathlib.Path, "rename", failing)

    def exchanged() -> None:
        with files.replaced_directory(target) as directory:
            (directory / "part").write_text("new")

    with pytest.raises(OSError, match="the disk is gone"):
        exchanged()
    assert everything(tmp_path) == {"directory": "directory", "directory/part": "old"}


@pytest.mark.parametrize("position", [0, 10, 100, 150, -30, -5])
@pytest.mark.parametrize("cut", [True, False], ids=["cut", "changed"])
def test_reading_a_damaged_archive_raises_what_is_listed(position: int, cut: bool, tmp_path: Path) -> None:
    np.savez(tmp_path / "whole.npz", x=np.arange(20.0), y=np.arange(3))
    whole = (tmp_path / "whole.npz").read_bytes()
    flipped = bytearray(whole)
    flipped[position] ^= 0xFF
    (tmp_path / "damaged.npz").write_bytes(whole[:position] if cut else bytes(flipped))

    def read() -> dict[str, bytes]:
        # Given a path, NumPy leaves a damaged file open.
        with (tmp_path / "damaged.npz").open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            return {name: file[name].tobytes() for name in ("x", "y")}

    try:
        found = read()
    except files.DAMAGED:
        return
    # Some bytes of an archive say nothing, such as the dates of its parts.
    assert found == {"x": np.arange(20.0).tobytes(), "y": np.arange(3).tobytes()}


def test_a_temporary_file_lies_beside_its_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[Any] = []
    mkstemp = tempfile.mkstemp

    def seen(**options: Any) -> Any:
        places.append(options["dir"])
        return mkstemp(**options)

    monkeypatch.setattr(tempfile, "mkstemp", seen)
    with files.replaced(tmp_path / "file") as file:
        file.write(b"whole")
    assert places == [tmp_path]
