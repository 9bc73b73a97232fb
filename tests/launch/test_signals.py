"""Signals to the launcher: all ranks leave at one step, or are killed; nothing is left behind. And restarts."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.launch._support import TRAINING, Launch, is_running, running, wait_until


@pytest.mark.slow
@pytest.mark.parametrize(("number", "n"), [(signal.SIGTERM, 2), pytest.param(signal.SIGINT, 4, marks=pytest.mark.slow)])
def test_a_signal_has_all_ranks_leave_after_one_step(tmp_path: Path, number: signal.Signals, n: int) -> None:
    with running(tmp_path, "-n", str(n), "--devices", "1", TRAINING, "train") as run:
        run.wait_for("step 10: ", times=n)
        run.process.send_signal(number)
        assert run.end() == 0, run.error
    steps = re.findall(r"\[\d\] stopped at (\d+)", run.out)
    assert len(steps) == n
    assert len(set(steps)) == 1
    assert f"[0] px.fit: SIGTERM: stopped after step {steps[0]};" in run.error
    assert sorted(re.findall(r"left (\d) of", run.out)) == [str(rank) for rank in range(n)]
    assert f"stopped by {number.name}: all {n} ranks exited with status 0" in run.error


@pytest.mark.slow
def test_a_job_that_was_suspended_goes_on(tmp_path: Path) -> None:
    """As by SLURM: each process by SIGSTOP, the launcher with its ranks."""
    with running(tmp_path, "-n", "2", "--devices", "1", "--stuck-after", "2", TRAINING, "train") as run:
        run.wait_for("step 10: ", times=2)
        started = Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text().split()
        for process in (*map(int, started), run.process.pid):
            os.kill(process, signal.SIGSTOP)
        time.sleep(9)
        for process in (run.process.pid, *map(int, started)):
            os.kill(process, signal.SIGCONT)
        time.sleep(4)
        assert run.process.poll() is None, run.error
        run.process.send_signal(signal.SIGTERM)
        assert run.end() == 0, run.error
    assert "no progress" not in run.error


DEAF = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
print("here", os.getpid(), flush=True)
time.sleep(100)
time.sleep(100)
"""


def test_ranks_that_do_not_leave_in_time_are_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(DEAF)
    with running(tmp_path, "-n", "2", "--grace", "3", "--restarts", "3", str(script)) as run:
        run.wait_for("here", times=2)
        run.process.send_signal(signal.SIGTERM)
        assert run.end() == 143
    assert run.out.count("asked") == 2
    assert "killed rank 0, rank 1 before it exited: 3 s (--grace) have passed" in run.error
    assert "restart" not in run.error


def test_a_second_signal_kills_at_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(DEAF)
    with running(tmp_path, "-n", "2", "--grace", "1000", str(script)) as run:
        run.wait_for("here", times=2)
        run.process.send_signal(signal.SIGINT)
        run.wait_for("asked", times=2)
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 130
    assert "a second SIGINT" in run.error


@pytest.mark.slow
def test_ranks_that_cannot_save_yet_end_at_the_signal(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time\nprint('here', flush=True)\ntime.sleep(100)\n")
    with running(tmp_path, "-n", "2", str(script)) as run:
        run.wait_for("here", times=2)
        run.process.send_signal(signal.SIGTERM)
        assert run.end() == 143
    assert "was ended by SIGTERM before it could save" in run.error


def test_the_ranks_die_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(DEAF)
    with running(tmp_path, "-n", "2", str(script)) as run:
        run.wait_for("here", times=2)
        ranks = [int(pid) for pid in re.findall(r"here (\d+)", run.out)]
        assert all(map(is_running, ranks))
        run.process.kill()
        run.process.wait()
        wait_until(lambda: not any(map(is_running, ranks)), seconds=10)
        assert [pid for pid in ranks if is_running(pid)] == []


STARTS_A_CHILD = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
print("child", child.pid, flush=True)
if os.environ["PARAXIS_PROCESS"] == "1":
    sys.exit(5)
time.sleep(100)
"""


def test_what_ranks_have_started_ends_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(STARTS_A_CHILD.replace("sys.exit(5)", "pass"))
    with running(tmp_path, "-n", "2", str(script)) as run:
        run.wait_for("child", times=2)
        children = [int(pid) for pid in re.findall(r"child (\d+)", run.out)]
        assert all(map(is_running, children))
        run.process.kill()
        run.process.wait()
        wait_until(lambda: not any(map(is_running, children)), seconds=10)
        assert [pid for pid in children if is_running(pid)] == []


def test_what_ranks_have_started_ends_with_them(launched: Launch, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(STARTS_A_CHILD)
    status, out, _ = launched(str(script))
    children = [int(pid) for pid in re.findall(r"child (\d+)", out)]
    assert status == 5
    assert children
    wait_until(lambda: not any(map(is_running, children)), seconds=10)
    assert [pid for pid in children if is_running(pid)] == []


COUNTS = """
import os, pathlib, sys
kept = pathlib.Path(sys.argv[1], os.environ["PARAXIS_PROCESS"])
step = int(kept.read_text()) if kept.exists() else 0
print("attempt", os.environ["PARAXIS_ATTEMPT"], "from", step, "port", os.environ["PARAXIS_COORDINATOR"])
kept.write_text(str(step + 10))
if os.environ["PARAXIS_PROCESS"] == "1" and step < 20:
    sys.exit(4)
"""


def test_all_start_again_from_what_they_have_saved(launched: Launch, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(COUNTS)
    status, out, error = launched(str(script), str(tmp_path), restarts=5)
    assert status == 0
    assert re.findall(r"\[1\] attempt (\d) from (\d+)", out) == [("0", "0"), ("1", "10"), ("2", "20")]
    assert re.findall(r"restart (\d) of (\d)", error) == [("1", "5"), ("2", "5")]
    assert error.count("rank 1 exited with status 4") == 2


def test_there_are_no_more_restarts_than_asked_for(launched: Launch, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(COUNTS)
    status, out, error = launched(str(script), str(tmp_path), restarts=1)
    assert status == 4
    assert out.count("[1] attempt") == 2
    assert error.count("restart") == 1


@pytest.mark.slow
def test_a_training_that_is_killed_goes_on_after_a_restart(launched: Launch, tmp_path: Path) -> None:
    """The second attempt's ranks find each other at a new port."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "import paraxis as px\n"
        "from tests.launch import _training\n"
        "me = px.initialize()\n"
        "print('attempt', me.attempt)\n"
        "_training.main('SIGKILL' if me.attempt == 0 else 'finish', 1)\n"
    )
    root = Path(__file__).parents[2]
    script.write_text(f"import sys\nsys.path.insert(0, {str(root)!r})\n" + script.read_text())
    status, out, _ = launched(str(script), devices=1, restarts=1)
    assert status == 0
    assert sorted(re.findall(r"attempt (\d)", out)) == ["0", "0", "1", "1"]
    assert sorted(re.findall(r"left (\d) of 2", out)) == ["0", "1"]
