"""What lies in the directory beside checkpoints stays, and one process at a time saves to it."""

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import paraxis as px
from tests._damage import KINDS, hostile, photograph

ROOT = Path(__file__).parents[2]


NAMES = (
    *(
        "removing-3",
        "saving-7",
        "replaced-5",
        "run.lock",
        "writer.lock",
        "2",
        "damaged-11",
        "paraxis.json",
        "paraxis.txt",
    ),
    *("saving-7.orbax-checkpoint-tmp", "3/paper", "007", "-1", "4.0", ".paraxis-2", "damaged-12-2", "removing-10"),
    *("saving-11", "replaced-10", "１２", "latest", "11.orbax-checkpoint-tmp", "saving-money/plan", "log.jsonl"),
)


@pytest.mark.parametrize("turn", range(len(KINDS)))
def test_a_users_own_things_stay_as_they_are(turn: int, tmp_path: Path) -> None:
    place = tmp_path / "run"
    elsewhere = hostile(place, NAMES, turn)
    before = photograph(place, elsewhere)
    with px.Checkpoints(place, keep=1, asynchronous=False) as checkpoints:
        assert checkpoints.latest is None
        for step in (10, 11, 12):
            checkpoints.save(step, {"x": step})
        (place / "12" / "paraxis.json").write_text("{")
        checkpoints.save(13, {"x": 13})
        assert checkpoints.restore({"x": 0}).tree == {"x": 13}
        (place / "13" / "paraxis.json").unlink()
        with pytest.warns(UserWarning, match="13 in .* is damaged"), pytest.raises(px.CheckpointError, match="every"):
            checkpoints.restore({"x": 0})
        for step in (2, 3):
            with pytest.raises(
                px.CheckpointError, match=rf"/{step} is there and is not a checkpoint, .*, move what is"
            ):
                checkpoints.save(step, {"x": step})
    assert px.Checkpoints(place).steps == ()
    after = photograph(place, elsewhere)
    assert {name: after.get(name) for name in before} == before


def leftovers(place: Path, step: int) -> None:
    """What a killed process leaves, of each kind."""
    for name in (f"saving-{step}", f"replaced-{step}", f"removing-{step}", f"saving-{step}.orbax-checkpoint-tmp-1"):
        shutil.copytree(place / str(step), place / ".paraxis" / name)


@pytest.mark.parametrize("turn", range(len(KINDS)))
def test_a_users_own_in_the_place_of_our_directory_stays(turn: int, tmp_path: Path) -> None:
    place = tmp_path / "run"
    elsewhere = hostile(place, (".paraxis",), turn)
    if KINDS[turn] == "folder":
        (place / ".paraxis" / "saving-7").mkdir()
        (place / ".paraxis" / "run.lock").symlink_to(elsewhere / "work")
    before = photograph(place, elsewhere)
    checkpoints = px.Checkpoints(place)
    if KINDS[turn] == "empty folder":
        checkpoints.save(1, {"x": 1})
        assert checkpoints.restore({"x": 0}).step == 1
        return
    with pytest.raises(px.CheckpointError, match=r"\.paraxis is there and is not (of Paraxis|an ordin)|File exists"):
        checkpoints.save(1, {"x": 1})
    with pytest.raises(px.CheckpointError, match="cannot be written to"):
        checkpoints.claim()
    assert photograph(place, elsewhere) == before


@pytest.mark.parametrize("lock", ["run.lock", "writer.lock"])
@pytest.mark.parametrize("turn", range(len(KINDS)))
def test_a_users_own_in_the_place_of_a_lock_stays(turn: int, lock: str, tmp_path: Path) -> None:
    place = tmp_path / "run"
    with px.Checkpoints(place, asynchronous=False) as checkpoints:
        checkpoints.save(1, {"x": 1})
    (place / ".paraxis" / lock).unlink()
    elsewhere = hostile(place / ".paraxis", (lock,), turn)
    before = photograph(place, elsewhere)
    if (place / ".paraxis" / lock).is_file() and not (place / ".paraxis" / lock).is_symlink():
        return
    with pytest.raises(px.CheckpointError, match="it is there and is not an ordinary file"):
        px.Checkpoints(place, asynchronous=False).save(2, {"x": 2})
    assert photograph(place, elsewhere) == before


@pytest.mark.parametrize("content", [b"my notes\n", b"process 7 on my list\n", b"x" * 400, b"process 7".ljust(900)])
def test_a_users_own_file_under_the_name_of_a_lock_is_not_written_to(content: bytes, tmp_path: Path) -> None:
    place = tmp_path / "run"
    with px.Checkpoints(place, asynchronous=False) as checkpoints:
        checkpoints.save(1, {"a": np.zeros(3)})
    locks = [place / ".paraxis" / name for name in ("run.lock", "writer.lock")]
    signed = locks[0].read_bytes()
    assert signed.startswith(f"process {os.getpid()} on ".encode())
    for lock in locks:
        lock.unlink()
        lock.write_bytes(content)
    with px.Checkpoints(place, asynchronous=False) as checkpoints:
        checkpoints.save(2, {"a": np.ones(3)})
    assert [lock.read_bytes() for lock in locks] == [content] * 2
    assert px.Checkpoints(place).steps == (1, 2)
    for lock in locks:  # one that was signed before is signed again
        lock.write_bytes(b"process 7 on another".ljust(400))
    with px.Checkpoints(place, asynchronous=False) as checkpoints:
        checkpoints.save(3, {"a": np.ones(3)})
    assert locks[0].read_bytes() == signed


def test_a_link_to_the_directory_of_another_run_is_not_followed(tmp_path: Path) -> None:
    with px.Checkpoints(tmp_path / "other", asynchronous=False) as other:
        other.save(1, {"x": 1})
    leftovers(tmp_path / "other", 1)
    before = photograph(tmp_path / "other")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".paraxis").symlink_to(tmp_path / "other" / ".paraxis")
    with pytest.raises(px.CheckpointError, match=r"\.paraxis is there and is not of Paraxis, so it stays"):
        px.Checkpoints(tmp_path / "run", asynchronous=False).save(1, {"x": 2})
    assert photograph(tmp_path / "other") == before


def test_what_a_killed_process_leaves_goes_and_nothing_else(tmp_path: Path) -> None:
    own = {"removing-3": "mine", "saving-1": "mine"}
    with px.Checkpoints(tmp_path, asynchronous=False) as checkpoints:
        checkpoints.save(1, {"x": 1})
    leftovers(tmp_path, 1)
    for name in own:
        shutil.copytree(tmp_path / "1", tmp_path / name)
    before = photograph(*(tmp_path / name for name in own))
    assert px.Checkpoints(tmp_path).restore({"x": 0}).tree == {"x": 1}
    assert sorted(os.listdir(tmp_path)) == sorted([".paraxis", "1", *own])
    assert sorted(os.listdir(tmp_path / ".paraxis")) == ["paraxis.txt", "run.lock", "writer.lock"]
    assert photograph(*(tmp_path / name for name in own)) == before


@pytest.mark.parametrize("turn", range(len(KINDS)))
def test_a_checkpoint_with_somebodys_own_in_it_is_neither_removed_nor_replaced(turn: int, tmp_path: Path) -> None:
    place = tmp_path / "run"
    checkpoints = px.Checkpoints(place, keep=1, asynchronous=False)
    checkpoints.save(1, {"x": 1})
    elsewhere = hostile(place / "1", ("notes.txt", "state/d/mine", "more"), turn)
    before = photograph(place / "1", elsewhere)
    for step in (2, 3):
        checkpoints.save(step, {"x": step})
    assert checkpoints.steps == (1, 3)
    with pytest.raises(px.CheckpointError, match=r"not of the checkpoint that it is in, so both stay.*, move what is"):
        checkpoints.save(1, {"x": 5})
    assert photograph(place / "1", elsewhere) == before
    assert checkpoints.restore({"x": 0}, 1).tree == {"x": 1}


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_modes_are_those_that_the_umask_allows(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        px.Checkpoints(tmp_path / "run", asynchronous=False).save(1, {"x": np.arange(3.0), "large": np.ones(20_000)})
    finally:
        os.umask(before)
    for name, (mode, _) in photograph(tmp_path).items():
        allowed = 0o777 if stat.S_ISDIR(mode) else 0o666
        assert stat.S_IMODE(mode) == allowed & ~umask, name


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


@pytest.mark.slow
def test_at_the_end_of_with_another_process_may_save(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TAKER, str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "XLA_FLAGS": ""}
    with px.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(4, {"x": 4})
    subprocess.run(command, env=env, timeout=120, check=True)
    assert checkpoints.steps == (4, 5)
