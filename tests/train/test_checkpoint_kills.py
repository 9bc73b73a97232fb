"""A process that is killed inside a save leaves whole checkpoints, and nothing that is in the way."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

import paraxis as px
from tests.train._checkpoint_writer import NUM_SAVED, same, state
from tests.train._processes import started

# Where it dies, and the step that is the last one then.
POINTS = [
    ("while the arrays are written", 3),
    ("before the manifest is written", 4),
    ("while the files of another are removed", 4),
]


def assert_whole(path: Path, step: int) -> None:
    checkpoints = px.Checkpoints(path, keep=NUM_SAVED)
    assert checkpoints.latest == step
    assert same(checkpoints.restore(state(0)).tree, step)
    checkpoints.save(step + 1, state(step + 1))
    assert same(checkpoints.restore(state(0)).tree, step + 1)
    assert sorted(os.listdir(path)) == sorted([*map(str, checkpoints.steps), "paraxis.lock"])
    assert len(checkpoints.steps) <= NUM_SAVED + 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("point", "step"), POINTS)
def test_killed_inside_a_save(tmp_path: Path, point: str, step: int) -> None:
    with started("-m", "tests.train._checkpoint_writer", tmp_path, point) as process:
        process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    assert_whole(tmp_path, step)


def test_what_a_killed_process_left_of_an_old_checkpoint_is_removed(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        with px.Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(step, state(step))
        (tmp_path / "1" / "_CHECKPOINT_METADATA").unlink(missing_ok=True)  # killed as it removed the first
    assert sorted(os.listdir(tmp_path)) == ["2", "3", "paraxis.lock"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_killed_at_any_time(tmp_path: Path, seed: int) -> None:
    with started("-m", "tests.train._checkpoint_writer", tmp_path, "any time") as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        time.sleep(random.Random(seed).uniform(0, 0.8))
        process.kill()
        told = max(map(int, (said + process.stdout.read()).split()))
    latest = px.Checkpoints(tmp_path).latest
    assert latest in {told, told + 1}
    assert_whole(tmp_path, latest)
