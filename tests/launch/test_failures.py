"""When a rank fails, in whatever way, the others end with it, and the right one is named with its last lines."""

from pathlib import Path

import pytest

from tests.launch._support import TRAINING, Launch

# What rank `who` does at step 10, the launch's exit status, and what is said of it.
FAILURES = {
    "raises": ("raise", 1, 70, "rank 1 raised an exception\n"),
    "is-killed": ("SIGKILL", 1, 137, "rank 1 was killed (SIGKILL)"),
    "first-is-killed": ("SIGKILL", 0, 137, "rank 0 was killed (SIGKILL)"),
    "crashes": ("SIGSEGV", 1, 139, "rank 1 crashed in compiled code (SIGSEGV)"),
    "leaves-with-3": ("exit3", 1, 3, "rank 1 exited with status 3\n"),
    "first-leaves-with-3": ("exit3", 0, 3, "rank 0 exited with status 3\n"),
    "leaves-with-0": ("exit0", 1, 1, "rank 1 exited with status 0, and rank 0 still ran 2 s later"),
    "leaves-at-once": ("_exit0", 1, 1, "rank 1 exited with status 0 before the end of its script, as os._exit(0) does"),
    "leaves-with-79": ("exit79", 1, 79, "rank 1 exited with status 79\n"),
    "is-stopped": ("SIGSTOP", 1, 1, "rank 1 was stopped (SIGSTOP) 5 s ago"),
}
FAST = ("raises", "is-killed")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("what", "who", "status", "message"),
    [pytest.param(*case, id=name, marks=[] if name in FAST else pytest.mark.slow) for name, case in FAILURES.items()],
)
def test_a_rank_that_fails_ends_all_and_is_named(
    launched: Launch, what: str, who: int, status: int, message: str
) -> None:
    found, out, error = launched(TRAINING, what, str(who), devices=1, grace=2)
    assert found == status
    assert f"paraxis launch: {message}" in error
    assert f"paraxis launch: the last lines of rank {who}:\n" in error
    last = "Fatal Python error: Segmentation fault" if what == "SIGSEGV" else "step 10: 11"
    assert f"paraxis launch:     {last}\n" in error
    assert "[0] step 10: 11\n" in out
    assert "[1] step 10: 11\n" in out
    assert "left" not in out


def test_the_traceback_is_the_users_own(launched: Launch, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("def f():\n    raise ValueError('a bug')\n\nf()\n")
    status, out, error = launched(str(script), n=1)
    assert (status, out) == (70, "")
    of_rank = [line.removeprefix("[0] ") for line in error.splitlines() if line.startswith("[0] ")]
    lines = [line for line in of_rank if line.strip().strip("~^")]
    assert lines == [
        "Traceback (most recent call last):",
        f'  File "{script}", line 4, in <module>',
        "    f()",
        f'  File "{script}", line 2, in f',
        "    raise ValueError('a bug')",
        "ValueError: a bug",
    ]


LOGS = """
import os, signal, sys
print("an own line", flush=True)
for k in range(40):
    os.write(2, b"E1122 00:49:07.883114   23065 agent.cc:288] Polled an error from coordination service\\n")
{end}
"""


@pytest.mark.parametrize(
    ("end", "shown"),
    [("sys.exit(5)", False), ("os.kill(os.getpid(), signal.SIGABRT)", True)],
    ids=["leaves", "is-aborted-by-xla"],
)
def test_the_log_of_xla_is_shown_where_it_tells_why(launched: Launch, tmp_path: Path, end: str, shown: bool) -> None:
    script = tmp_path / "script.py"
    script.write_text(LOGS.format(end=end))
    _, _, error = launched(str(script), n=1)
    assert error.count("\n[0] E1122 ") + error.startswith("[0] E1122 ") == 40
    assert "\nparaxis launch:     an own line\n" in error
    assert error.count("paraxis launch:     E1122 ") == (30 if shown else 0)


@pytest.mark.slow
def test_one_of_four_that_is_killed_is_named(launched: Launch) -> None:
    status, out, error = launched(TRAINING, "SIGKILL", "2", n=4, devices=1)
    assert status == 137
    assert "paraxis launch: rank 2 was killed (SIGKILL)" in error
    assert out.count("step 10: 16\n") == 4


@pytest.mark.slow
def test_a_rank_that_is_stuck_is_named_with_where_it_is(launched: Launch) -> None:
    status, _, error = launched(TRAINING, "stuck", "1", n=3, devices=1, stuck_after=1.5)
    lines = Path(TRAINING).read_text().splitlines()
    stuck = 1 + next(number for number, line in enumerate(lines) if "time.sleep(1000)" in line)
    waits = 1 + next(number for number, line in enumerate(lines) if "float(total(" in line)
    assert status == 79
    assert f"no progress: rank 1 at {TRAINING}:{stuck}; ranks 0 and 2 at {TRAINING}:{waits}; " in error
    assert "the last lines of rank 1:" in error
    assert f'[1]   File "{TRAINING}", line {stuck} in misbehave' in error
    assert f'[0]   File "{TRAINING}", line {waits} in step' in error


HOLDS_THE_LOCK = """
import ctypes, time
import numpy as np
import paraxis as px
px.initialize()
def step(number, batch):
    if number == 8:  # results of the first steps are there by now, so the loop is under way
        time.sleep(0.3)
        ctypes.PyDLL(None).sleep(60)  # in C, with Python's lock held
    return number + 1, {"loss": 0.0}
px.fit(0, step, [np.zeros(1)] * 20, steps=20, progress=False)
"""


@pytest.mark.slow
def test_a_rank_that_holds_pythons_lock_is_stuck(launched: Launch, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(HOLDS_THE_LOCK)
    status, _, error = launched(str(script), n=1, stuck_after=0.5)
    assert status == 79
    assert "paraxis launch: no progress: rank 0 at an unknown place" in error
    assert f'[0]   File "{script}", line 9 in step' in error


ABSENT = """
import os, sys, time
import paraxis as px
if os.environ["PARAXIS_PROCESS"] == "1":
    print("somewhere else")
    {instead}
else:
    px.initialize(join_timeout=2)
"""


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named(launched: Launch, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ABSENT.format(instead="time.sleep(100)"))
    status, out, error = launched(str(script))
    assert status == 134
    assert "rank 1 did not join: px.initialize() was not called there, and the others waited for it" in error
    assert "paraxis launch:     somewhere else\n" in error
    assert out == "[1] somewhere else\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "instead", ["sys.exit()", pytest.param("sys.stdout.flush(); __import__('os')._exit(0)", marks=pytest.mark.slow)]
)
def test_a_rank_that_leaves_without_coming_is_named_at_once(launched: Launch, tmp_path: Path, instead: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(ABSENT.format(instead=instead).replace("join_timeout=2", ""))
    status, _, error = launched(str(script))
    assert status == 1
    assert "rank 1 exited with status 0 without px.initialize(), where rank 0 waited for it" in error


@pytest.mark.parametrize(
    ("code", "status"),
    [("3", 3), ("70", 70), ("None", 0), ("'in words'", 1), ("256", 1), ("True", 1), ("0", 0)],
)
def test_the_status_is_that_of_the_script(launched: Launch, tmp_path: Path, code: str, status: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import sys\nsys.exit({code})\n")
    found, out, error = launched(str(script), n=1)
    assert (found, out) == (status, "")
    assert ("[0] in words\n" in error) == (code == "'in words'")
    assert (error == "") == (status == 0)
