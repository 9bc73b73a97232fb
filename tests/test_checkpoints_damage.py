"""Damaged files, full disks, killed processes, two runs at once: what was saved before is restored, and it is said."""

import contextlib
import os
import resource
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import paraxis as px
from tests.processes._support import started
from tests.processes._writer import NUM_SAVED, POINTS, same, state

# Orbax closes its event loop at the first error; what is still being written then says that it is closed.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


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


@pytest.mark.parametrize("damage", [flip, lambda f: f.write_bytes(f.read_bytes()[::2]), Path.unlink])
def test_checkpoints_uses_one_before_a_damaged_one(checkpoints: px.Checkpoints, damage: Callable[[Path], None]) -> None:
    damage(files_of(checkpoints)[0])
    with pytest.raises(px.CheckpointError, match=r"is damaged:\n  2: state/"):  # asked for, it stays
        checkpoints.restore(state(0), 2)
    with pytest.warns(UserWarning, match=r"step 2 in .* is damaged: .*damaged-2, and the one before it is used"):
        restored = checkpoints.restore(state(0))
    assert (restored.step, same(restored.tree, 1), checkpoints.steps) == (1, True, (1,))
    assert (checkpoints.path / "damaged-2").is_dir()
    flip(files_of(checkpoints, 1)[0])
    with pytest.warns(UserWarning, match="is damaged"), pytest.raises(px.CheckpointError, match="every checkpoint"):
        checkpoints.restore(state(0))


@pytest.mark.parametrize("position", [0.5, *(pytest.param(x, marks=pytest.mark.slow) for x in np.linspace(0, 1, 12))])
def test_checkpoints_finds_a_flipped_bit_in_any_file(checkpoints: px.Checkpoints, position: float) -> None:
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
    (manifest,) = (checkpoints.path / "2").glob("*crc32*")
    manifest.unlink()  # the process was killed before it wrote that
    assert same(checkpoints.restore(state(0)).tree, 2)


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """No file can grow beyond a part of the state."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_checkpoints_on_a_full_disk_keeps_earlier_ones_and_saves_later_ones(tmp_path: Path) -> None:
    checkpoints = px.Checkpoints(tmp_path)
    checkpoints.save(1, state(1))
    checkpoints.wait()
    with full_disk():
        checkpoints.save(2, state(2))
        with pytest.raises(px.CheckpointError, match=r"step 2 could not be written .*large.*those of steps \(1,\) are"):
            checkpoints.wait()
        checkpoints.save(5, state(5))
        with pytest.raises(px.CheckpointError, match="step 5"):  # at the next opportunity
            checkpoints.save(6, state(6))
        with pytest.raises(px.CheckpointError, match="step 7"), checkpoints:
            checkpoints.save(7, state(7))
    assert same(checkpoints.restore(state(0)).tree, 1)
    checkpoints.save(2, state(2))
    assert same(checkpoints.restore(state(0)).tree, 2)


def test_checkpoints_names_a_directory_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file" / "runs", tmp_path / "file"):
        with pytest.raises(px.CheckpointError, match=f"{path} cannot be written to: "):
            px.Checkpoints(path).save(2, state(2))


def test_checkpoints_lets_another_run_only_read_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, mine = px.Checkpoints(tmp_path), px.Checkpoints(tmp_path)
    with first:
        first.save(1, state(1))
        first.wait()
        assert mine.restore(state(0)).step == 1
        with monkeypatch.context() as patch:
            patch.setattr("time.sleep", lambda _: None)  # it waits some seconds for the other
            with pytest.raises(px.CheckpointError, match="another run"):
                mine.save(2, state(2))
    with mine:
        mine.save(2, state(2))
    assert mine.steps == (1, 2)


@pytest.mark.slow
def test_checkpoints_of_a_program_that_ends_without_waiting_are_saved(tmp_path: Path) -> None:
    with started("-m", "tests.processes._writer", tmp_path, "once") as other:
        _, error = other.communicate(timeout=120)
    assert (other.returncode, error) == (0, "")
    assert same(px.Checkpoints(tmp_path).restore(state(0)).tree, 1)
    assert list((tmp_path / "1").glob("*crc32*"))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("point", POINTS)
def test_checkpoints_stays_whole_where_a_process_is_killed_inside_a_save(tmp_path: Path, point: str) -> None:
    with started("-m", "tests.processes._writer", tmp_path, point) as process:
        process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    checkpoints, step = px.Checkpoints(tmp_path, keep=NUM_SAVED), NUM_SAVED + (point != "the arrays are written")
    assert checkpoints.latest == step
    assert same(checkpoints.restore(state(0)).tree, step)
    checkpoints.save(step + 1, state(step + 1))
    assert same(checkpoints.restore(state(0)).tree, step + 1)
    assert sorted(os.listdir(tmp_path)) == sorted([*map(str, checkpoints.steps), "paraxis.lock"])
    assert len(checkpoints.steps) <= NUM_SAVED + 1
