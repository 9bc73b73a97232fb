"""What cannot be written is said at the next opportunity, and what was there stays; one run saves to a directory."""

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import paraxis as px
from tests.train._checkpoint_writer import same, state
from tests.train._processes import started

# Orbax closes its event loop at the first error; what is still being written then says that it is closed.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """No file can grow beyond a part of the state."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def saved(path: Path) -> px.Checkpoints:
    checkpoints = px.Checkpoints(path)
    checkpoints.save(1, state(1))
    checkpoints.wait()
    return checkpoints


def test_on_a_full_disk_the_others_stay_and_later_ones_are_saved(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path)
    with full_disk():
        checkpoints.save(2, state(2))
        with pytest.raises(px.CheckpointError, match=r"step 2 could not be written .*large.*those of steps \(1,\) are"):
            checkpoints.wait()
    checkpoints.wait()
    assert same(checkpoints.restore(state(0)).tree, 1)
    checkpoints.save(2, state(2))
    assert same(checkpoints.restore(state(0)).tree, 2)


def test_an_error_in_the_background_is_raised_by_the_next_save_and_at_the_end_of_with(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path)
    with full_disk():
        checkpoints.save(5, state(5))
        with pytest.raises(px.CheckpointError, match="step 5"):
            checkpoints.save(6, state(6))
        with pytest.raises(px.CheckpointError, match="step 7"), checkpoints:
            checkpoints.save(7, state(7))


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file" / "runs", tmp_path / "file"):
        with pytest.raises(px.CheckpointError, match=f"{path} cannot be written to: "):
            px.Checkpoints(path).save(2, state(2))


OTHER = """
import sys
import numpy as np
import paraxis as px
checkpoints = px.Checkpoints(sys.argv[1])
checkpoints.save(1, {"x": np.arange(100_000)})
if len(sys.argv) > 2:
    with checkpoints:
        checkpoints.wait()
        print("saved", flush=True)
        input()
"""


def test_another_run_may_read_and_not_save_until_the_first_is_over(tmp_path: Path) -> None:
    target = {"x": np.zeros(100_000, int)}
    with started("-c", OTHER, tmp_path, "waits") as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "saved\n"
        mine = px.Checkpoints(tmp_path)
        assert mine.restore(target).step == 1
        with pytest.raises(px.CheckpointError, match="another run"):
            mine.save(2, target)
        other.communicate("\n", timeout=60)
    with mine:
        mine.save(2, target)
    assert mine.steps == (1, 2)


@pytest.mark.slow
def test_a_program_that_ends_without_waiting_has_saved(tmp_path: Path) -> None:
    with started("-c", OTHER, tmp_path) as other:
        _, error = other.communicate(timeout=120)
    assert (other.returncode, error) == (0, "")
    assert px.Checkpoints(tmp_path).restore({"x": np.zeros(100_000, int)}).tree["x"].sum() == 4999950000
    assert list((tmp_path / "1").glob("*crc32*"))
