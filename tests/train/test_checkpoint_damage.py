"""Damaged files: what is restored is what was saved, or it is said which file is not, and the one before is used."""

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import paraxis as px
from tests.train._checkpoint_writer import same, state


@pytest.fixture
def checkpoints(tmp_path: Path) -> px.Checkpoints:
    with px.Checkpoints(tmp_path) as found:
        for step in (1, 2):
            found.save(step, state(step))
    return found


def files_of(checkpoints: px.Checkpoints, step: int = 2) -> list[Path]:
    """The files that are not empty, the largest first."""
    found = [file for file in (checkpoints.path / str(step)).rglob("*") if file.is_file() and file.stat().st_size]
    return sorted(found, key=lambda file: -file.stat().st_size)


def flip(file: Path, position: float = 0.5) -> None:
    content = bytearray(file.read_bytes())
    content[int(position * (len(content) - 1))] ^= 4
    file.write_bytes(bytes(content))


@pytest.mark.parametrize(
    "damage", [flip, lambda f: f.write_bytes(f.read_bytes()[::2]), lambda f: f.write_bytes(b""), Path.unlink]
)
def test_the_one_before_a_damaged_one_is_used(checkpoints: px.Checkpoints, damage: Callable[[Path], None]) -> None:
    damage(files_of(checkpoints)[0])
    with pytest.raises(px.CheckpointError, match=r"is damaged:\n  2: state/"):  # asked for, it stays
        checkpoints.restore(state(0), 2)
    with pytest.warns(UserWarning, match=r"step 2 in .* is damaged: .*damaged-2, and the one before it is used"):
        restored = checkpoints.restore(state(0))
    assert (restored.step, same(restored.tree, 1), checkpoints.steps) == (1, True, (1,))
    assert (checkpoints.path / "damaged-2").is_dir()


@pytest.mark.parametrize("position", [0.5, *(pytest.param(x, marks=pytest.mark.slow) for x in np.linspace(0, 1, 12))])
def test_a_flipped_bit_in_any_file_is_found(checkpoints: px.Checkpoints, position: float) -> None:
    for file in files_of(checkpoints):
        whole = file.read_bytes()
        flip(file, position)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            restored = checkpoints.restore(state(0))
        assert (restored.step, same(restored.tree, 1), len(said)) == (1, True, 1), file
        (checkpoints.path / "damaged-2").rename(checkpoints.path / "2")
        file.write_bytes(whole)
    assert same(checkpoints.restore(state(0)).tree, 2)


def test_when_none_is_left_each_is_listed(checkpoints: px.Checkpoints) -> None:
    for step in (1, 2):
        flip(files_of(checkpoints, step)[0])
    message = r"every checkpoint in .* is damaged:\n  2: .*\n  1: "
    with pytest.warns(UserWarning, match="is damaged"), pytest.raises(px.CheckpointError, match=message):
        checkpoints.restore(state(0))


def test_one_whose_process_was_killed_before_the_manifest_is_read(checkpoints: px.Checkpoints) -> None:
    (manifest,) = (checkpoints.path / "2").glob("*crc32*")
    manifest.unlink()
    assert same(checkpoints.restore(state(0)).tree, 2)
