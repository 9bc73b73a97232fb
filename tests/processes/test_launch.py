"""``launch``: what the ranks are given, what becomes of their output, and how all of them end."""

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.processes._support import COMMAND, TRAINING, Launch, is_running, plain_environment, running, wait_until


def written(directory: Path, text: str) -> str:
    """The path of a script of this text."""
    script = directory / "script.py"
    script.write_text(text)
    return str(script)


SHOWS = """
import json, os, sys
print(json.dumps([sys.argv[1:], sys.path[0], __name__, sys.stdin.read(), "jax" in sys.modules, dict(os.environ)]))
"""


def shown(out: str, rank: int) -> list[Any]:
    line = next(line for line in out.splitlines() if line.startswith(f"[{rank}] "))
    return json.loads(line.removeprefix(f"[{rank}] "))


@pytest.mark.parametrize("module", [False, True])
def test_launch_runs_the_script_in_a_rank_as_python_would(
    launched: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: bool
) -> None:
    (tmp_path / "package").mkdir()
    script = written(tmp_path / "package", SHOWS)
    monkeypatch.chdir(tmp_path)
    status, out, error = launched("package.script" if module else script, "-n", "--grace", "a b", n=2, module=module)
    assert (status, error) == (0, "")
    for rank in (0, 1):
        arguments, directory, name, read, has_jax, variables = shown(out, rank)
        assert arguments == ["-n", "--grace", "a b"]
        assert directory == str(tmp_path if module else tmp_path / "package")
        assert (name, read, has_jax) == ("__main__", "", False)
        assert (variables["PARAXIS_PROCESS"], variables["PARAXIS_NUM_PROCESSES"]) == (str(rank), "2")


@pytest.mark.parametrize(
    ("visible", "n", "devices", "expected"),
    [
        ("0,1,2,3,4,5,6,7", 2, None, ["0,1,2,3", "4,5,6,7"]),  # none of the eight is left idle
        ("2,5", 2, None, ["0", "1"]),  # numbers among the visible ones
        ("0,1,2,3", 2, 1, ["0", "1"]),
        ("0,1,2,3", 1, None, [None]),  # a lone rank takes all
        ("", 2, None, [None, None]),
    ],
)
def test_launch_divides_the_gpus_among_the_ranks(
    launched: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str, n: int, devices: Any, expected: Any
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    _, out, _ = launched(written(tmp_path, SHOWS), n=n, devices=devices)
    assert [shown(out, rank)[-1].get("JAX_LOCAL_DEVICE_IDS") for rank in range(n)] == expected


OUTPUT = r"""
import os, sys, time
if os.environ["PARAXIS_PROCESS"] == "0":
    for piece in (b"one\ntw", b"o\r", b"\nthree\rfo", b"ur\n\n", b"five\n"):
        os.write(1, piece)
        time.sleep(0.01)
    print("x" * 200_000)
    os.write(1, b"\xff\x00 garbage\n")
    print("to stderr", file=sys.stderr)
    print("no end of line", end="")
"""


def test_launch_marks_output_by_rank_line_by_line(launched: Launch, tmp_path: Path) -> None:
    status, out, error = launched(written(tmp_path, OUTPUT), n=11)
    assert (status, error) == (0, "[ 0] to stderr\n")
    lines = ["one", "two", "three", "four", "", "five", "x" * 200_000, "\ufffd\0 garbage", "no end of line"]
    assert out == "".join(f"[ 0] {line}\n" for line in lines)


@pytest.mark.parametrize("asked", [False, True])
def test_launch_shows_what_gloo_says_to_who_asks(launched: Launch, tmp_path: Path, monkeypatch, asked: bool) -> None:
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0" if asked else "2")
    status, out, _ = launched(written(tmp_path, "print('[Gloo] Rank 0 is connected to 1 peer ranks.')"), n=1)
    assert (status, "[Gloo]" in out) == (0, asked)


MANY_LINES = "import pathlib, sys\nfor _ in range(30_000): print('a line')\npathlib.Path(sys.argv[1]).touch()\n"


@pytest.mark.parametrize(
    ("redirection", "said"),
    [
        pytest.param(">/dev/full", "the output of the ranks cannot be written and is lost: ", marks=pytest.mark.slow),
        ("| head -1; exit ${PIPESTATUS[0]}", ""),
    ],
)
def test_launch_lets_ranks_go_on_if_their_output_cannot_be_written(redirection: str, said: str, tmp_path: Path) -> None:
    words = [*COMMAND, "launch", "-n", "1", written(tmp_path, MANY_LINES), str(tmp_path / "ended")]
    command = ["bash", "-c", f'"$@" {redirection}', "bash", *words]
    done = subprocess.run(command, env=plain_environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ended").exists()
    assert said in done.stderr
    assert done.stderr.count("\n") == bool(said), done.stderr


# What one rank does at step 10, which one, the launch's exit status, and how its end is named.
FAILURES = [
    ("raise", 1, 1, "rank 1 ended with status 1;"),
    ("SIGSEGV", 0, 139, "rank 0 ended with SIGSEGV;"),
    ("exit3", 0, 3, "rank 0 ended with status 3;"),
    ("SIGKILL", 1, 137, "rank 1 ended with SIGKILL;"),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("what", "who", "status", "message"), FAILURES)
def test_launch_names_a_rank_that_fails_first(launched: Launch, what: str, who: int, status: int, message: str) -> None:
    found, out, error = launched(TRAINING, what, str(who), n=3, devices=1)
    assert found == status
    assert re.findall(r"^paraxis launch: (.*?;)", error, re.MULTILINE) == [message]
    assert f"[{who}] step 10: 13\n" in out
    assert "left" not in out


STAYS = "import os, time\nif os.environ['PARAXIS_PROCESS'] == '1': time.sleep(100)\n"


def test_launch_ends_a_rank_that_stays_after_another_has_finished(launched: Launch, tmp_path: Path) -> None:
    status, _, error = launched(written(tmp_path, STAYS), grace=1)
    assert status == 1
    assert "paraxis launch: killed rank 1 before it exited: 1 s (--grace) have passed" in error


DEAF = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
print("here", os.getpid(), flush=True)
time.sleep(100)
time.sleep(100)
"""


@pytest.mark.parametrize(
    ("numbers", "grace", "status"), [([signal.SIGTERM], "1", 143), ([signal.SIGINT, signal.SIGINT], "1000", 130)]
)
def test_launch_kills_ranks_that_do_not_leave_in_time_or_at_a_second_signal(
    tmp_path: Path, numbers: list[signal.Signals], grace: str, status: int
) -> None:
    with running(tmp_path, "-n", "2", "--grace", grace, "--restarts", "3", written(tmp_path, DEAF)) as run:
        for number, awaited in zip(numbers, ("here", "asked"), strict=False):
            run.wait_for(awaited, times=2)
            run.process.send_signal(number)
        assert run.end() == status
    assert "killed rank 0, rank 1 before it exited" in run.error
    assert "restart" not in run.error


STARTS_A_CHILD = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
print("here", os.getpid(), "and", child.pid, flush=True)
if os.environ["PARAXIS_PROCESS"] == sys.argv[1]:
    sys.exit(5)
time.sleep(100)
"""


@pytest.mark.parametrize("killed", [False, True])
def test_launch_ends_ranks_and_their_children_with_one_that_fails_or_with_itself(tmp_path: Path, killed: bool) -> None:
    with running(tmp_path, "-n", "2", written(tmp_path, STARTS_A_CHILD), "none" if killed else "1") as run:
        run.wait_for("here", times=2 if killed else 1)
        if killed:
            run.process.kill()
        assert run.end() == (-signal.SIGKILL if killed else 5)
        started = [int(pid) for pair in re.findall(r"here (\d+) and (\d+)", run.out) for pid in pair]
        wait_until(lambda: not any(map(is_running, started)), seconds=10)
        assert [pid for pid in started if is_running(pid)] == []


COUNTS = """
import os, pathlib, sys
kept = pathlib.Path(sys.argv[1], os.environ["PARAXIS_PROCESS"])
step = int(kept.read_text()) if kept.exists() else 0
print("attempt", os.environ["PARAXIS_ATTEMPT"], "from", step)
kept.write_text(str(step + 10))
if os.environ["PARAXIS_PROCESS"] == "1" and step < 20:
    sys.exit(4)
"""


@pytest.mark.parametrize(("restarts", "status", "attempts"), [(5, 0, 3), (1, 4, 2)])
def test_launch_restarts_all_ranks(launched: Launch, tmp_path: Path, restarts: int, status: int, attempts: int) -> None:
    found, out, error = launched(written(tmp_path, COUNTS), str(tmp_path), restarts=restarts)
    assert found == status
    expected = [("0", "0"), ("1", "10"), ("2", "20")][:attempts]
    assert re.findall(r"\[1\] attempt (\d) from (\d+)", out) == expected
    assert error.count(f"of {restarts}\n") == attempts - 1
