"""Files and directories are there whole, or as they were: those of an ensemble, written as all others are."""

import os
import pathlib
import tempfile
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
    found = px.load_member(make, path)
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
    assert everything(tmp_path / "new").keys() == {"directory", "directory/member-000.npz"}
    assert is_member(target / "member-000.npz", ens[1])
    assert target.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("number", [1, 2])
def test_a_failure_of_the_exchange_gives_the_old_directory_back(
    number: int, ens: px.Ensemble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, calls, rename = tmp_path / "directory", [], pathlib.Path.rename
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
    places: list[Any] = []
    mkstemp = tempfile.mkstemp

    def seen(**options: Any) -> Any:
        places.append(options["dir"])
        return mkstemp(**options)

    monkeypatch.setattr(tempfile, "mkstemp", seen)
    ens.save_member(0, tmp_path / "file")
    assert places == [tmp_path]
