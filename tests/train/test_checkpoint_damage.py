"""Damaged files: what is restored is what was saved, or it is said which file is not, and the one before is used."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px


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
    found = px.Checkpoints(tmp_path)
    for step in (1, 2):
        found.save(step, state(step))
    found.wait()
    return found


def files_of(checkpoints: px.Checkpoints, step: int = 2) -> list[Path]:
    return sorted(file for file in (checkpoints.path / str(step)).rglob("*") if file.is_file() and file.stat().st_size)


def data_file(checkpoints: px.Checkpoints, step: int = 2) -> Path:
    return max(files_of(checkpoints, step), key=lambda file: file.stat().st_size)


def flip(file: Path, position: float = 0.5) -> None:
    content = bytearray(file.read_bytes())
    content[int(position * (len(content) - 1))] ^= 4
    file.write_bytes(bytes(content))


def halve(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize("damage", [flip, halve, empty, Path.unlink])
def test_the_one_before_a_damaged_one_is_used(checkpoints: px.Checkpoints, damage: Callable[[Path], None]) -> None:
    damage(data_file(checkpoints))
    with pytest.warns(UserWarning, match=r"step 2 in .* is damaged: .*damaged-2, and the one before it is used"):
        restored = checkpoints.restore(state(0))
    assert restored.step == 1
    assert same(restored.tree, 1)
    assert checkpoints.steps == (1,)
    assert (checkpoints.path / "damaged-2").is_dir()


@pytest.mark.parametrize("position", [0.5, *(pytest.param(x, marks=pytest.mark.slow) for x in np.linspace(0, 1, 12))])
def test_a_flipped_bit_in_any_file_is_found(checkpoints: px.Checkpoints, position: float) -> None:
    for file in files_of(checkpoints):
        whole = file.read_bytes()
        flip(file, position)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            restored = checkpoints.restore(state(0))
        assert (restored.step, len(said)) == (1, 1), file
        assert same(restored.tree, 1)
        (checkpoints.path / "damaged-2").rename(checkpoints.path / "2")
        file.write_bytes(whole)
    assert same(checkpoints.restore(state(0)).tree, 2)


def test_a_damaged_one_that_was_asked_for_is_an_error_and_stays(checkpoints: px.Checkpoints) -> None:
    flip(data_file(checkpoints))
    with pytest.raises(px.CheckpointError, match=r"is damaged:\n  2: state/"):
        checkpoints.restore(state(0), 2)
    assert checkpoints.steps == (1, 2)


def test_when_none_is_left_each_is_listed(checkpoints: px.Checkpoints) -> None:
    for step in (1, 2):
        flip(data_file(checkpoints, step))
    message = r"every checkpoint in .* is damaged:\n  2: .*\n  1: "
    with pytest.warns(UserWarning, match="is damaged"), pytest.raises(px.CheckpointError, match=message):
        checkpoints.restore(state(0))


def test_one_whose_process_was_killed_before_the_manifest_is_read(checkpoints: px.Checkpoints) -> None:
    (manifest,) = (checkpoints.path / "2").glob("*crc32*")
    manifest.unlink()
    assert same(checkpoints.restore(state(0)).tree, 2)
