"""What cannot be written is said at the next opportunity, and what was there stays; several may use one directory."""

import contextlib
import os
import resource
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px

ROOT = Path(__file__).parents[2]


def state(step: int) -> dict[str, Any]:
    return {"w": jnp.asarray(np.random.default_rng(step).normal(size=(300, 300)), jnp.float32)}


def assert_holds(checkpoints: px.Checkpoints, step: int) -> None:
    restored = checkpoints.restore(state(0))
    assert restored.step == step
    assert np.asarray(restored.tree["w"]).tobytes() == np.asarray(state(step)["w"]).tobytes()


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_file_that_cannot_be_written_to_its_end(tmp_path: Path) -> None:
    checkpoints = px.Checkpoints(tmp_path)
    checkpoints.save(1, state(1))
    checkpoints.wait()
    with files_of_at_most(100_000):
        checkpoints.save(2, state(2))
        with pytest.raises(
            px.CheckpointError, match=r"step 2 could not be written to .*large.*; the others, of steps 1, are"
        ):
            checkpoints.wait()
    checkpoints.wait()
    assert sorted(os.listdir(tmp_path)) == [".paraxis", "1"]
    assert_holds(checkpoints, 1)
    checkpoints.save(2, state(2))
    assert_holds(checkpoints, 2)


class FullDisk:
    """Orbax's writer, for which there is no room, once it is allowed to go on."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.started = 0

    def start(self, directory: str, arrays: Mapping[str, Any]) -> "FullDisk":
        self.started += 1
        return self

    def result(self) -> None:
        self.go_on.wait()
        raise OSError(28, "No space left on device")


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[FullDisk]:
    disk = FullDisk()
    monkeypatch.setattr("orbax.checkpoint.v1.save_checkpointables_async", disk.start)
    yield disk
    disk.go_on.set()


def test_an_error_in_the_background_is_raised_by_the_next_save(tmp_path: Path, full_disk: FullDisk) -> None:
    checkpoints = px.Checkpoints(tmp_path)
    checkpoints.save(5, state(5))
    full_disk.go_on.set()
    with pytest.raises(
        px.CheckpointError,
        match=r"step 5 could not .*No space left.*there is no other. To save, make room, .*or give another place: px",
    ):
        checkpoints.save(6, state(6))
    assert full_disk.started == 1
    checkpoints.wait()
    assert checkpoints.steps == ()


def test_an_error_in_the_background_is_raised_at_the_end_of_with(tmp_path: Path, full_disk: FullDisk) -> None:
    full_disk.go_on.set()
    with pytest.raises(px.CheckpointError, match="step 5"), px.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, state(5))


def test_an_error_in_the_background_does_not_hide_another(tmp_path: Path, full_disk: FullDisk) -> None:
    full_disk.go_on.set()
    checkpoints = px.Checkpoints(tmp_path)

    def run() -> None:
        with checkpoints:
            checkpoints.save(5, state(5))
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        run()
    assert "step 5 could not be written" in caught.value.__notes__[0]


def test_without_a_background_the_error_is_raised_at_once(tmp_path: Path, full_disk: FullDisk) -> None:
    full_disk.go_on.set()
    with pytest.raises(px.CheckpointError, match="step 5"):
        px.Checkpoints(tmp_path, asynchronous=False).save(5, state(5))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_is_read_only(tmp_path: Path) -> None:
    px.Checkpoints(tmp_path, asynchronous=False).save(1, state(1))
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        checkpoints = px.Checkpoints(tmp_path)
        assert_holds(checkpoints, 1)
        with pytest.raises(px.CheckpointError, match=r"step 2 could not .*Permission denied.*, change permissions"):
            checkpoints.save(2, state(2))
    finally:
        tmp_path.chmod(stat.S_IRWXU)


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(px.CheckpointError, match=r"step 2 could not be written to .*file/runs: .*Not a directory"):
        px.Checkpoints(tmp_path / "file" / "runs").save(2, state(2))


def test_two_objects_save_to_one_directory(tmp_path: Path) -> None:
    first, second = px.Checkpoints(tmp_path), px.Checkpoints(tmp_path)
    first.save(1, state(1))
    second.save(2, state(2))
    first.save(2, state(3))
    second.wait()
    first.wait()
    assert first.steps == second.steps == (1, 2)
    restored = second.restore(state(0))
    assert np.asarray(restored.tree["w"]).tobytes() == np.asarray(state(3)["w"]).tobytes()


def test_a_directory_that_cannot_be_made_in_the_background_keeps_no_thread_waiting(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with px.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": np.ones(3)})
        checkpoints.wait()
        known = {*before, *threading.enumerate()}
        with pytest.raises(px.CheckpointError, match="could not be written"):  # its name is too long for a file system
            checkpoints.save(10**400, {"w": np.ones(3)})
        assert set(threading.enumerate()) <= known  # Orbax's would wait, and the end of the process with them
        assert checkpoints.steps == (1,)


def test_what_is_being_written_is_not_tidied_up_by_another(tmp_path: Path, full_disk: FullDisk) -> None:
    checkpoints = px.Checkpoints(tmp_path)
    checkpoints.save(1, state(1))
    (tmp_path / ".paraxis" / "saving-1").mkdir()
    assert px.Checkpoints(tmp_path).steps == ()
    assert (tmp_path / ".paraxis" / "saving-1").is_dir()
    full_disk.go_on.set()
    with pytest.raises(px.CheckpointError, match="step 1"):
        checkpoints.wait()
    assert sorted(os.listdir(tmp_path)) == [".paraxis"]


def test_one_that_another_process_removes_meanwhile_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is there whenever somebody looks what there is, and gone right afterwards."""
    checkpoints = px.Checkpoints(tmp_path / "run", asynchronous=False)
    for step in (1, 2):
        checkpoints.save(step, state(step))
    there, gone = checkpoints.path / "2", tmp_path / "gone"
    original, beginning, removed = Path.iterdir, os.open, []

    def iterdir(directory: Path) -> Iterator[Path]:
        if gone.exists():
            gone.rename(there)
        return original(directory)

    def opened_once(file: Any, *args: Any, **kwargs: Any) -> int:
        handle = beginning(file, *args, **kwargs)
        if Path(file).parent == there:
            removed.append(there.rename(gone))
        return handle

    monkeypatch.setattr(Path, "iterdir", iterdir)
    monkeypatch.setattr(os, "open", opened_once)
    assert_holds(checkpoints, 1)
    assert len(removed) > 1


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
