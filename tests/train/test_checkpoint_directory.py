"""What lies in the directory beside checkpoints stays, and one process at a time saves to it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import paraxis as px

ROOT = Path(__file__).parents[2]


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_what_is_somebodys_own_stays(tmp_path: Path) -> None:
    own = [
        "1/image.png",
        "2/paper/paraxis.txt",
        "saving",
        "saving-money/plan",
        "saving-7",
        "removing-stains",
        "log.txt",
    ]
    own += ["replaced-parts/list", "3", "damaged-goods/list"]
    for name in own:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("mine")
    (tmp_path / "removing-8").symlink_to(tmp_path / "1")
    before = contents(tmp_path)
    checkpoints = px.Checkpoints(tmp_path, keep=1, asynchronous=False)
    assert checkpoints.latest is None
    for step in (10, 11):
        checkpoints.save(step, {"x": step})
    assert checkpoints.restore({"x": 0}).tree == {"x": 11}
    assert checkpoints.steps == (11,)
    for step in (2, 3):
        with pytest.raises(px.CheckpointError, match=rf"/{step} is there and is not a checkpoint, .*, move what is"):
            checkpoints.save(step, {"x": step})
    after = contents(tmp_path)
    assert {name: after.get(name) for name in before} == before
    assert (tmp_path / "removing-8").is_symlink()


def test_a_path_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(px.DataError, match=r"path must be that of a directory, got 'gs://bucket/run'; mount"):
        px.Checkpoints("gs://bucket/run")


def test_one_whose_notes_cannot_be_read_is_not_removed(tmp_path: Path) -> None:
    checkpoints = px.Checkpoints(tmp_path, keep=1, best=("loss", "min"), asynchronous=False)
    for step, loss in enumerate([0.1, 0.5, 0.3]):
        checkpoints.save(step, {}, {"loss": loss})
        (tmp_path / "0" / "paraxis.json").write_text("{")
    assert checkpoints.steps == (0, 2)


HOLDER = """
import os, sys, time
import paraxis as px
checkpoints = px.Checkpoints(sys.argv[1], asynchronous=False)
checkpoints.save(1, {"x": 1})
child = os.fork()  # like a loader's worker; it does not keep the directory when its parent is gone
if child:
    print(child, flush=True)
time.sleep(600)
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has saved, and goes on."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            yield process
        finally:
            process.kill()
            os.kill(child, signal.SIGKILL)


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds for which something is waited for pass thirty times as fast."""
    clock = time.monotonic
    start = clock()
    monkeypatch.setattr(time, "monotonic", lambda: start + 30 * (clock() - start))


@pytest.mark.usefixtures("hurry")
def test_another_process_is_refused_until_the_first_is_gone(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    checkpoints = px.Checkpoints(tmp_path, asynchronous=False)
    assert checkpoints.restore({"x": 0}).tree == {"x": 1}
    message = (
        rf"step 2 could .*: another process writes there \(process {other.pid} on .*for one run at a time; the oth.*"
        rf"as before. To save, wait for the other process or end it, or give another place: .*{tmp_path}-2"
    )
    with pytest.raises(px.CheckpointError, match=message):
        checkpoints.save(2, {"x": 2})
    assert checkpoints.steps == (1,)
    other.kill()
    other.wait()
    checkpoints.save(2, {"x": 2})
    assert checkpoints.steps == (1, 2)


@pytest.mark.usefixtures("hurry")
def test_a_run_is_refused_before_it_touches_the_log_of_the_other(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text("the other's\n")
    with pytest.raises(
        px.CheckpointError, match=rf"{tmp_path} cannot .*\(process {other.pid} on.*; wait for the other"
    ):
        px.fit({"x": 0}, lambda state, batch: (state, {}), [[1]], steps=1, checkpoint=tmp_path, log=log, progress=False)
    assert log.read_text() == "the other's\n"


TAKER = """
import sys
import paraxis as px
px.Checkpoints(sys.argv[1], asynchronous=False).save(5, {"x": 5})
"""


def test_at_the_end_of_with_another_process_may_save(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TAKER, str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "XLA_FLAGS": ""}
    with px.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(4, {"x": 4})
    subprocess.run(command, env=env, timeout=120, check=True)
    assert checkpoints.steps == (4, 5)
