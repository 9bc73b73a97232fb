"""Files and directories are there whole, or as they were: those of an ensemble, written as all others are."""

import ctypes
import os
import pathlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px


def make(key: jax.Array) -> dict[str, jax.Array]:
    return {"x": jax.random.uniform(key, (20,)), "y": jnp.arange(3)}


@pytest.fixture(scope="module")
def ens() -> px.Ensemble:
    return px.ensemble(make, 2, 0)


def everything(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else b"directory"
        for path in directory.rglob("*")
    }


def is_member(path: Path, member: Any) -> bool:
    found = px.ensembles.load_member(make, path)
    return all(np.array_equal(found[name], member[name]) for name in ("x", "y"))


def watched(monkeypatch: pytest.MonkeyPatch, during: Callable[[Any], None]) -> None:
    """Each file that is written is shown to a function when all is in it."""
    save = np.savez

    def saved(file: Any, **arrays: Any) -> None:
        save(file, **arrays)
        during(file)

    monkeypatch.setattr(np, "savez", saved)


def test_a_file_takes_its_place_when_the_block_is_done(
    ens: px.Ensemble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "new" / "file"
    seen: list[bool | None] = []
    watched(monkeypatch, lambda file: seen.append(is_member(target, ens[0]) if target.exists() else None))
    ens.save_member(0, target)
    ens.save_member(1, target)
    assert seen == [None, True]
    assert is_member(target, ens[1])
    assert everything(tmp_path).keys() == {"new", "new/file"}


def test_a_file_is_on_the_disk_before_it_takes_its_place(
    ens: px.Ensemble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    ens.save_member(0, tmp_path / "file")
    assert order == [f"fsync of {(tmp_path / 'file').stat().st_size} bytes", "replace"]


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt("stop")], ids=["OSError", "interrupt"])
@pytest.mark.parametrize("old", [True, False], ids=["old", "new"])
def test_a_failure_in_the_block_leaves_what_was_there(
    error: BaseException, old: bool, ens: px.Ensemble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if old:
        (tmp_path / "file").write_text("old")
        ens.save(tmp_path / "directory")
    before, written = everything(tmp_path), []

    def half(file: Any, **arrays: Any) -> None:
        file.write(b"half")
        written.append(file)
        raise error

    monkeypatch.setattr(np, "savez", half)
    for save in (lambda: ens.save_member(0, tmp_path / "file"), lambda: ens.save(tmp_path / "directory")):
        with pytest.raises(type(error), match=str(error)):
            save()
    assert len(written) == 2
    assert everything(tmp_path) == before


def test_a_directory_takes_the_place_of_an_old_one_with_all_it_holds(ens: px.Ensemble, tmp_path: Path) -> None:
    target = tmp_path / "new" / "directory"
    ens.save(target)
    ens.drop(0).save(target)
    assert everything(tmp_path / "new").keys() == {
        "directory",
        "directory/member-000.npz",
        "directory/paraxis.json",
    }
    assert is_member(target / "member-000.npz", ens[1])
    assert target.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("number", [1, 2])
def test_a_failure_of_the_exchange_gives_the_old_directory_back(
    number: int, ens: px.Ensemble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, calls, rename = tmp_path / "directory", [], pathlib.Path.rename
    monkeypatch.delattr(ctypes, "CDLL")  # as on systems where two names cannot change places at once
    ens.drop(0).save(target)
    before = everything(tmp_path)

    def failing(self: Path, place: Any) -> Path:
        calls.append(place)
        if len(calls) == number:
            raise OSError("the disk is gone")
        return rename(self, place)

    monkeypatch.setattr(pathlib.Path, "rename", failing)
    with pytest.raises(OSError, match="the disk is gone"):
        ens.save(target)
    assert everything(tmp_path) == before


@pytest.mark.parametrize("position", [0, 10, 100, 150, -30, -5])
@pytest.mark.parametrize("cut", [True, False], ids=["cut", "changed"])
def test_reading_a_damaged_archive_says_so(position: int, cut: bool, ens: px.Ensemble, tmp_path: Path) -> None:
    ens.save_member(0, tmp_path / "whole.npz")
    whole = (tmp_path / "whole.npz").read_bytes()
    flipped = bytearray(whole)
    flipped[position] ^= 0xFF
    (tmp_path / "damaged.npz").write_bytes(whole[:position] if cut else bytes(flipped))
    try:
        found = is_member(tmp_path / "damaged.npz", ens[0])
    except px.DataError as error:
        message = str(error)
    else:
        # Some bytes of an archive say nothing, such as the dates of its parts.
        assert found
        assert not cut
        return
    assert "damaged.npz is damaged" in message


def test_a_temporary_file_lies_beside_its_target(
    ens: px.Ensemble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[set[str]] = []
    watched(monkeypatch, lambda file: names.append(set(os.listdir(tmp_path))))
    ens.save_member(0, tmp_path / ("long" * 60))
    assert [len(found) for found in names] == [1]
    assert names[0].pop().startswith(".longlong")


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o027, 0o077])
def test_modes_are_those_that_the_umask_allows_and_old_ones_are_kept(
    umask: int, ens: px.Ensemble, tmp_path: Path
) -> None:
    before = os.umask(umask)
    try:
        ens.save_member(0, tmp_path / "new" / "file")
        ens.save(tmp_path / "new" / "directory")
    finally:
        os.umask(before)
    files, directories = mode_of(tmp_path / "new" / "file"), mode_of(tmp_path / "new")
    assert (files, directories) == (0o666 & ~umask, 0o777 & ~umask)
    assert mode_of(tmp_path / "new" / "directory") == directories
    assert {mode_of(file) for file in (tmp_path / "new" / "directory").iterdir()} == {files}
    (tmp_path / "new" / "file").chmod(0o640)
    (tmp_path / "new" / "directory").chmod(0o711)
    ens.save_member(1, tmp_path / "new" / "file")
    ens.save(tmp_path / "new" / "directory")
    assert (mode_of(tmp_path / "new" / "file"), mode_of(tmp_path / "new" / "directory")) == (0o640, 0o711)


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def test_a_link_stays_and_what_it_leads_to_is_written(ens: px.Ensemble, tmp_path: Path) -> None:
    for name in ("file", "directory"):
        (tmp_path / f"link to {name}").symlink_to(tmp_path / "there" / name)
    for member in (0, 1):
        ens.save_member(member, tmp_path / "link to file")
        assert is_member(tmp_path / "there" / "file", ens[member])
        ens.save(tmp_path / "link to directory")
        assert len(px.load_ensemble(make, tmp_path / "there" / "directory")) == 2
    assert all((tmp_path / f"link to {name}").is_symlink() for name in ("file", "directory"))


def test_what_is_no_ordinary_file_is_not_replaced(ens: px.Ensemble, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        mode = (tmp_path / name).stat().st_mode
        with pytest.raises(FileExistsError, match=f"it is there and is not an ordinary file.*{name}"):
            ens.save_member(0, tmp_path / name)
        assert (tmp_path / name).stat().st_mode == mode
    assert sorted(os.listdir(tmp_path)) == ["folder", "pipe"]
