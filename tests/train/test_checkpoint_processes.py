"""Several processes save together; one restores what they saved."""

import os
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest

import paraxis as px
from tests.launch._support import COMMAND, plain_environment
from tests.train._checkpoint_processes import NUM_PROCESSES, values
from tests.train._processes import ROOT, outputs_of


def launched_pair(script: str, *arguments: Path | str) -> "subprocess.CompletedProcess[str]":
    """Two processes of a module beside this one, by the launcher."""
    command = [*COMMAND, "launch", "-n", "2", "--devices", "1", "-m", f"tests.train.{script}", *arguments]
    env = {**plain_environment(), "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    return subprocess.run(command, cwd=ROOT, env=env, timeout=200, capture_output=True, text=True)


@pytest.mark.slow
def test_several_processes_save_and_one_restores(tmp_path: Path) -> None:
    outputs_of(NUM_PROCESSES, "-m", "tests.train._checkpoint_processes", tmp_path, devices=1)
    target = {"rows": jax.ShapeDtypeStruct((8, 3000), "float32"), "all": np.zeros((2, 3000), "float32")}
    restored = px.Checkpoints(tmp_path).restore(
        {**target, "own": np.zeros((), "float32"), "n": np.zeros(3, int), "k": 0}
    )
    np.testing.assert_array_equal(restored.tree["rows"], values())
    np.testing.assert_array_equal(restored.tree["all"], values()[:2])
    assert (restored.tree["own"], restored.tree["n"].tolist(), restored.tree["k"]) == (2.5, [0, 1, 2], 7)
    assert f"number of processes: {NUM_PROCESSES} when it was saved, 1 now" in restored.changed


@pytest.mark.slow
@pytest.mark.parametrize(("where", "number"), [("begin", 1), ("write", 0)])
def test_one_that_cannot_write_ends_all_and_leaves_what_was_there(tmp_path: Path, where: str, number: int) -> None:
    # Without it, they would wait inside Orbax for five minutes.
    done = launched_pair("_checkpoint_full_disk", tmp_path, where, str(number))
    assert done.returncode not in (0, None)
    assert "the checkpoint of step 2 could not be written to" in done.stderr
    assert "No space left on device; the others, of steps 1, are there as before" in done.stderr
    assert f"process {number} " in done.stderr.split("step 2 could not be written to", 1)[1].splitlines()[0]
    assert "then start all processes again, to go on from step 1" in done.stderr
    checkpoints = px.Checkpoints(tmp_path)
    assert checkpoints.steps == (1,)
    assert sorted(os.listdir(tmp_path)) == [".paraxis", "1"]
    assert checkpoints.restore({"x": np.zeros((8, 30), "float32")}).tree["x"].all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "reason"),
    [("damage", "its files cannot be read"), ("record", "its record paraxis.json is not what was written")],
)
def test_what_one_process_cannot_read_is_set_aside_by_all(tmp_path: Path, what: str, reason: str) -> None:
    done = launched_pair("_checkpoint_ranks", tmp_path, what)
    assert done.returncode == 0, done.stderr
    assert "the checkpoint of step 2" in done.stderr
    assert f"process 1 found: {reason}" in done.stderr
    assert sorted(os.listdir(tmp_path)) == [".paraxis", "1", "5", "damaged-2"]


@pytest.mark.slow
def test_what_was_removed_while_one_process_read_is_given_up_by_all(tmp_path: Path) -> None:
    done = launched_pair("_checkpoint_ranks", tmp_path, "removed")
    assert done.returncode == 0, done.stderr
    assert "damaged" not in done.stderr
    assert sorted(os.listdir(tmp_path)) == [".paraxis", "1", "4", "5"]


@pytest.mark.slow
def test_what_one_process_cannot_read_is_an_error_of_all_where_the_step_was_asked_for(tmp_path: Path) -> None:
    done = launched_pair("_checkpoint_ranks", tmp_path, "asked for")
    assert done.returncode not in (0, None)
    assert "2: process 1 found: its record paraxis.json is not what was written" in done.stderr
    assert px.Checkpoints(tmp_path).steps == (1, 2)


@pytest.mark.slow
def test_what_another_process_may_not_read_is_an_error_and_no_damage(tmp_path: Path) -> None:
    done = launched_pair("_checkpoint_ranks", tmp_path, "denied")
    assert done.returncode not in (0, None)
    assert "process 1 could not read its part of the checkpoint: PermissionError" in done.stderr
    assert px.Checkpoints(tmp_path).steps == (1, 2)


@pytest.mark.slow
def test_processes_that_do_not_share_the_directory_are_told(tmp_path: Path) -> None:
    done = launched_pair("_checkpoint_ranks", tmp_path / "run", "elsewhere")
    assert done.returncode not in (0, None)
    assert "the processes see different checkpoints" in done.stderr
    assert "process 0: (1, 2)" in done.stderr
    assert "process 1: ()" in done.stderr
