"""What cannot be written is said at the next opportunity, and what was there stays; one run saves to a directory."""

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px

ROOT = Path(__file__).parents[2]
# Orbax closes its event loop at the first error; what is still being written then says that it is closed.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def state(step: int) -> dict[str, Any]:
    return {"w": jnp.asarray(np.random.default_rng(step).normal(size=(300, 300)), jnp.float32)}


def assert_holds(checkpoints: px.Checkpoints, step: int) -> None:
    restored = checkpoints.restore(state(0))
    assert restored.step == step
    assert np.asarray(restored.tree["w"]).tobytes() == np.asarray(state(step)["w"]).tobytes()


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
    assert checkpoints.steps == (1,)
    assert_holds(checkpoints, 1)
    checkpoints.save(2, state(2))
    assert_holds(checkpoints, 2)


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
    with pytest.raises(px.CheckpointError, match=r"file/runs cannot be written to: .*Not a directory"):
        px.Checkpoints(tmp_path / "file" / "runs").save(2, state(2))
    with pytest.raises(px.CheckpointError, match="cannot be written to"):
        px.Checkpoints(tmp_path / "file").save(2, state(2))


OTHER = """
import sys
import numpy as np
import paraxis as px
with px.Checkpoints(sys.argv[1]) as checkpoints:
    checkpoints.save(1, {"x": np.ones(3)})
    checkpoints.wait()
    print("saved", flush=True)
    input()
"""


def test_another_run_may_read_and_not_save_until_the_first_is_over(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "XLA_FLAGS": ""}
    command = [sys.executable, "-c", OTHER, str(tmp_path)]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "saved\n"
        mine = px.Checkpoints(tmp_path)
        assert mine.restore({"x": np.zeros(3)}).step == 1
        with pytest.raises(px.CheckpointError, match="another run"):
            mine.save(2, {"x": np.zeros(3)})
        other.communicate("\n", timeout=60)
    with mine:
        mine.save(2, {"x": np.zeros(3)})
    assert mine.steps == (1, 2)


PROGRAM = """
import numpy as np
import paraxis as px
px.Checkpoints({path!r}).save(3, {{"w": np.arange(100_000)}})
"""


@pytest.mark.slow
def test_a_program_that_ends_without_waiting_has_saved(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(path=str(tmp_path))], env=env, timeout=120, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert px.Checkpoints(tmp_path).restore({"w": np.zeros(100_000, int)}).tree["w"].sum() == 4999950000
    assert list((tmp_path / "3").glob("*crc32*"))
