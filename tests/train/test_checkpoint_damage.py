"""Damaged files: what is restored is what was saved, or it is said which leaf is not, and the one before is used."""

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px

# Orbax closes its event loop at the first error; what is still being read then says that it is closed.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def state(step: int) -> dict[str, Any]:
    """Values that do not compress, so that their bytes are the most of the file."""
    rng = np.random.default_rng(step)
    return {"w": jnp.asarray(rng.normal(size=(64, 64)), jnp.float32), "key": jax.random.key(step), "n": step}


def same(actual: dict[str, Any], step: int) -> bool:
    expected = state(step)
    return (
        np.asarray(actual["w"]).tobytes() == np.asarray(expected["w"]).tobytes()
        and bool((jax.random.key_data(actual["key"]) == jax.random.key_data(expected["key"])).all())
        and actual["n"] == expected["n"]
    )


@pytest.fixture
def checkpoints(tmp_path: Path) -> px.Checkpoints:
    found = px.Checkpoints(tmp_path, asynchronous=False)
    found.save(1, state(1))
    found.save(2, state(2))
    return found


def data_file(checkpoints: px.Checkpoints, step: int = 2) -> Path:
    return max(
        (file for file in (checkpoints.path / str(step)).rglob("*") if file.is_file()), key=lambda f: f.stat().st_size
    )


def flip(file: Path, position: float) -> None:
    content = bytearray(file.read_bytes())
    content[int(position * (len(content) - 1))] ^= 4
    file.write_bytes(bytes(content))


def halve(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def test_a_flipped_bit_of_a_leaf_is_found_by_its_checksum(checkpoints: px.Checkpoints) -> None:
    flip(data_file(checkpoints), 0.5)
    with pytest.warns(
        UserWarning, match=r"step 2 in .* is damaged: the leaf \['w'\] does not have the checksum .*damaged-2, and"
    ):
        restored = checkpoints.restore(state(0))
    assert restored.step == 1
    assert same(restored.tree, 1)
    assert checkpoints.steps == (1,)
    assert (checkpoints.path / "damaged-2").is_dir()


def test_one_that_is_damaged_again_gets_another_name(checkpoints: px.Checkpoints) -> None:
    for name in ("damaged-2", "damaged-2-2"):
        data_file(checkpoints).unlink()
        with pytest.warns(UserWarning, match=rf"{name}, and the one before it is used"):
            assert checkpoints.restore(state(0)).step == 1
        checkpoints.save(2, state(2))


@pytest.mark.parametrize("damage", [halve, empty, Path.unlink])
def test_a_file_that_ends_too_early_is_found(checkpoints: px.Checkpoints, damage: Callable[[Path], None]) -> None:
    damage(data_file(checkpoints))
    with pytest.warns(UserWarning, match=r"step 2 in .* is damaged: .*damaged-2, and the one before"):
        restored = checkpoints.restore(state(0))
    assert restored.step == 1
    assert same(restored.tree, 1)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes")
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(checkpoints: px.Checkpoints) -> None:
    names = [file.relative_to(checkpoints.path) for file in (checkpoints.path / "2").rglob("*") if file.is_file()]
    for name in names:
        if name.name == "paraxis.txt":  # nothing of it is needed
            continue
        file = checkpoints.path / name
        content = file.read_bytes()
        file.unlink()
        os.mkfifo(file)
        with pytest.raises(px.CheckpointError, match="is not an ordinary file"):
            checkpoints.restore(state(0), step=2)
        file.unlink()
        file.write_bytes(content)
    assert same(checkpoints.restore(state(0), step=2).tree, 2)


def test_a_record_that_was_changed_is_found(checkpoints: px.Checkpoints) -> None:
    record = checkpoints.path / "2" / "paraxis.json"
    record.write_text(record.read_text().replace('value\\": 2', 'value\\": 3'))
    with pytest.warns(
        UserWarning, match=r"its record paraxis.json is not what was written: .*its checksum does not match; it is now"
    ):
        assert checkpoints.restore(state(0)).step == 1


def kinds_of_files(checkpoints: px.Checkpoints) -> list[Path]:
    return sorted(file for file in (checkpoints.path / "2").rglob("*") if file.is_file() and file.stat().st_size)


def never_wrong(checkpoints: px.Checkpoints, file: Path, position: float) -> bool:
    """Whether damage was found. If not, what was restored is what was saved."""
    whole = file.read_bytes()
    flip(file, position)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        restored = checkpoints.restore(state(0))
    assert same(restored.tree, restored.step), (file, position)
    assert bool(said) == (restored.step == 1)
    if said:
        (checkpoints.path / "damaged-2").rename(checkpoints.path / "2")
    file.write_bytes(whole)
    return bool(said)


def test_a_flipped_bit_in_any_file_is_found_or_harmless(checkpoints: px.Checkpoints) -> None:
    found = {file.name for file in kinds_of_files(checkpoints) if never_wrong(checkpoints, file, 0.5)}
    assert {"paraxis.json", "_METADATA", "manifest.ocdbt"} <= found
    assert checkpoints.restore(state(0)).step == 2


@pytest.mark.slow
@pytest.mark.parametrize("position", np.linspace(0, 1, 24))
def test_a_flipped_bit_anywhere_in_any_file_is_found_or_harmless(checkpoints: px.Checkpoints, position: float) -> None:
    for file in kinds_of_files(checkpoints):
        never_wrong(checkpoints, file, position)


def test_a_damaged_one_that_was_asked_for_is_an_error_and_stays(checkpoints: px.Checkpoints) -> None:
    flip(data_file(checkpoints), 0.5)
    with pytest.raises(
        px.CheckpointError, match=r"of step 2 in .* is damaged:\n  2: the leaf \['w'\].*\n.*\(1,\); write"
    ):
        checkpoints.restore(state(0), 2)
    assert checkpoints.steps == (1, 2)


def test_when_none_is_left_each_is_listed(checkpoints: px.Checkpoints) -> None:
    for step in (1, 2):
        flip(data_file(checkpoints, step), 0.5)
    message = r"every checkpoint in .* was set aside:\n  2: the leaf .*\n  1: the leaf \['w'\]"
    with pytest.warns(UserWarning, match="is damaged"), pytest.raises(px.CheckpointError, match=message):
        checkpoints.restore(state(0))


def test_lack_of_permission_or_memory_is_not_damage(
    checkpoints: px.Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr("orbax.checkpoint.v1.load_checkpointables", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        checkpoints.restore(state(0))
    assert checkpoints.steps == (1, 2)


def beside_a_writer(checkpoints: px.Checkpoints, monkeypatch: pytest.MonkeyPatch, when: str, write: Any) -> None:
    """Have another one write once, before or after a reader has read a record and not yet the arrays."""
    writing, original = [write], os.open

    def opened(file: Any, *args: Any, **kwargs: Any) -> int:
        is_record = (Path(file).name, Path(file).parent.parent) == ("paraxis.json", checkpoints.path)
        if is_record and when == "before" and writing:
            writing.pop()()
        found = original(file, *args, **kwargs)
        if is_record and writing:
            writing.pop()()
        return found

    monkeypatch.setattr(os, "open", opened)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("saved", [2, 3])
def test_beside_a_writer_that_keeps_one_the_new_one_is_read(
    saved: int, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = px.Checkpoints(tmp_path, keep=1, asynchronous=False)
    writer.save(2, state(1))
    reader = px.Checkpoints(tmp_path)
    beside_a_writer(reader, monkeypatch, when, lambda: writer.save(saved, state(5)))
    restored = reader.restore(state(0))
    assert restored.step == saved
    assert same(restored.tree, 5)
    assert sorted(os.listdir(tmp_path)) == [".paraxis", str(saved)]


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_was_removed_is_not_called_damaged(
    when: str, checkpoints: px.Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove(*steps: int) -> None:
        for step in steps:
            shutil.rmtree(checkpoints.path / str(step))

    with monkeypatch.context() as patch:
        beside_a_writer(checkpoints, patch, when, lambda: remove(2))
        with pytest.raises(
            px.CheckpointError, match=r"there is no checkpoint of step 2 in .*; there are \(1,\); write"
        ):
            checkpoints.restore(state(0), 2)
    beside_a_writer(checkpoints, monkeypatch, when, lambda: remove(1))
    words = r"restore: the checkpoints of steps 1 in .* were removed by another process while they were read, and there"
    with pytest.raises(px.CheckpointError, match=f"^{words} is no other; look before"):
        checkpoints.restore(state(0))


def test_a_flipped_bit_of_a_large_leaf_is_found(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    trees = [{"w": rng.normal(size=(200, 200)).astype("float32")} for _ in range(2)]
    checkpoints = px.Checkpoints(tmp_path, asynchronous=False)
    for step, tree in enumerate(trees):
        checkpoints.save(step, tree)
    file = max((f for f in (tmp_path / "1").rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(bytes(content))
    with pytest.warns(UserWarning, match=r"the leaf \['w'\] does not have the checksum"):
        restored = checkpoints.restore(trees[0])
    np.testing.assert_array_equal(restored.tree["w"], trees[0]["w"])


def test_one_that_was_moved_away_for_another_comes_back(tmp_path: Path) -> None:
    px.Checkpoints(tmp_path, asynchronous=False).save(3, {"x": 7})
    (tmp_path / "3").rename(tmp_path / ".paraxis" / "replaced-3")
    checkpoints = px.Checkpoints(tmp_path)
    assert checkpoints.steps == (3,)
    assert checkpoints.restore({"x": 0}).tree == {"x": 7}


def test_what_has_no_record_is_not_put_in_place(tmp_path: Path) -> None:
    px.Checkpoints(tmp_path, asynchronous=False).save(3, {"x": 7})
    (tmp_path / "3").rename(tmp_path / ".paraxis" / "saving-3")
    (tmp_path / ".paraxis" / "saving-3" / "paraxis.json").unlink()
    assert px.Checkpoints(tmp_path).steps == ()
    assert not (tmp_path / "3").exists()
    px.Checkpoints(tmp_path, asynchronous=False).save(3, {"x": 8})
