"""How a process finds its place: alone, by variables, by a scheduler's; and what it says when it cannot take it."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import jax
import pytest

import paraxis as px
from paraxis.launch import Processes, _initialize
from paraxis.launch._variables import Place
from tests.launch._support import TRAINING, plain_environment

THERE = {"PARAXIS_COORDINATOR": "127.0.0.1:5000", "PARAXIS_NUM_PROCESSES": "4", "PARAXIS_PROCESS": "2"}


@pytest.fixture(autouse=True)
def _nothing_is_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_initialize, "_initialized", None)


def test_alone_nothing_is_done() -> None:
    hook = sys.excepthook
    assert px.initialize() == Processes(process=0, num_processes=1, attempt=0)
    assert px.initialize() is px.initialize()
    assert not jax.distributed.is_initialized()
    assert sys.excepthook is hook


def test_the_place_is_read_as_it_was_written() -> None:
    for place in (Place("127.0.0.1:5000", 4, 2, 3, 2.5, 60.0), Place("host:1", 1, 0)):
        assert Place.read(place.written()) == place
    assert Place.read({}) is None
    assert Place.read(THERE) == Place("127.0.0.1:5000", 4, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"PARAXIS_PROCESS": "4"}, "PARAXIS_PROCESS=4 must be from 0 to PARAXIS_NUM_PROCESSES - 1, which is 3"),
        ({"PARAXIS_PROCESS": "-1"}, "PARAXIS_PROCESS='-1' must be a number"),
        ({"PARAXIS_PROCESS": None}, "PARAXIS_PROCESS='' must be a number; write, say, PARAXIS_PROCESS=1"),
        ({"PARAXIS_NUM_PROCESSES": "two"}, "PARAXIS_NUM_PROCESSES='two' must be a number"),
        ({"PARAXIS_COORDINATOR": "here"}, "PARAXIS_COORDINATOR='here' must be the host and port of process 0"),
    ],
)
def test_variables_that_cannot_be_read_are_named(change: Mapping[str, str | None], message: str) -> None:
    variables = {name: value for name, value in {**THERE, **change}.items() if value is not None}
    with pytest.raises(px.ProcessError, match=f"^{message}"):
        Place.read(variables)


def test_variables_for_the_parent_process_are_not_for_this_one() -> None:
    assert Place.read(THERE | {"PARAXIS_LAUNCHER": str(os.getpid())}) is None
    assert Place.read(THERE | {"PARAXIS_LAUNCHER": str(os.getppid())}) is not None


@pytest.mark.parametrize(
    ("coordinator", "local"),
    [("127.0.0.1:1", True), ("localhost:1", True), ("[::1]:1", True), ("10.0.0.1:1", False), ("node001:1", False)],
)
def test_only_loopback_is_local(coordinator: str, local: bool) -> None:
    assert Place(coordinator, 2, 0).is_local == local


SLURM = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, None),
        (SLURM, "slurm"),
        (SLURM | {"SLURM_NTASKS": "1"}, None),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, None),  # a batch script of a job of two tasks
        ({name: value for name, value in SLURM.items() if name != "SLURM_PROCID"}, None),  # a shell on the login node
        (OPEN_MPI, "ompi"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),  # a notebook in a cluster
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}, "k8s"),
        ({"TPU_WORKER_HOSTNAMES": "one,other"}, "tpu"),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, None),
    ],
)
def test_a_scheduler_is_known_by_what_a_lone_process_has_not(variables: dict[str, str], found: str | None) -> None:
    assert _initialize.scheduler(variables) == found


def set_all(monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_after_the_devices_it_is_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, THERE)
    jax.devices()
    with pytest.raises(px.ProcessError, match=r"JAX has its devices already.* right after the imports"):
        px.initialize()
    assert not jax.distributed.is_initialized()


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        coordinator = "127.0.0.1:%d" % taken.getsockname()[1]  # noqa: UP031
        set_all(monkeypatch, THERE | {"PARAXIS_COORDINATOR": coordinator, "PARAXIS_PROCESS": "0"})
        with pytest.raises(px.ProcessError, match=r"port \d+, .* is taken; write another one in PARAXIS_COORDINATOR="):
            px.initialize()


def test_a_scheduler_whose_processes_jax_cannot_find_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def found_nothing(**arguments: object) -> None:
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", found_nothing)
    set_all(monkeypatch, {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"})
    with pytest.raises(px.ProcessError, match=r"by way of k8s: .* PARAXIS_COORDINATOR, PARAXIS_NUM_PROCESSES"):
        px.initialize()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def by_hand(variables: list[dict[str, str]], *arguments: str) -> list[subprocess.Popen[str]]:
    """A process for each of these environments, without a launcher."""
    return [
        subprocess.Popen(
            [sys.executable, TRAINING, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**plain_environment(), "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **own},
            process_group=0,
        )
        for own in variables
    ]


def ends(started: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    try:
        outputs = [process.communicate(timeout=150) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(started, outputs, strict=True)]


def test_without_a_launcher_an_exception_ends_all_at_once() -> None:
    """JAX alone would have each wait for the other until its shutdown times out, after 300 s."""
    coordinator = f"127.0.0.1:{free_port()}"
    place = {"PARAXIS_COORDINATOR": coordinator, "PARAXIS_NUM_PROCESSES": "2"}
    found = ends(by_hand([place | {"PARAXIS_PROCESS": str(number)} for number in (0, 1)], "raise"))
    assert [status for status, _, _ in found] == [70, 70]
    assert "ValueError: a bug of the user" in found[1][2]
    assert all("step 10: 11" in out for _, out, _ in found)


@pytest.mark.slow
def test_the_tasks_of_a_slurm_step_find_each_other() -> None:
    step = SLURM | {"JAX_COORDINATOR_PORT": str(free_port())}
    own = [{"SLURM_PROCID": str(number), "SLURM_LOCALID": str(number)} for number in (0, 1)]
    found = ends(by_hand([step | variables for variables in own], "finish"))
    assert [status for status, _, _ in found] == [0, 0], found
    for number, (_, out, _) in enumerate(found):
        assert f"left {number} of 2" in out


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_process_that_is_asked_to_stop_has_all_stop(number: signal.Signals) -> None:
    place = {"PARAXIS_COORDINATOR": f"127.0.0.1:{free_port()}", "PARAXIS_NUM_PROCESSES": "2"}
    started = by_hand([place | {"PARAXIS_PROCESS": str(number)} for number in (0, 1)], "train")
    for process in started:
        assert process.stdout is not None
        while "step 10" not in process.stdout.readline():
            pass
    started[1].send_signal(number)
    found = ends(started)
    stops = [line for _, out, _ in found for line in out.splitlines() if "stopped" in line]
    assert [status for status, _, _ in found] == [0, 0]
    assert len(stops) == 2
    assert stops[0] == stops[1]


HOLDS_THE_LOCK = """
import ctypes, time
import paraxis.launch._watchdog as watchdog
from paraxis._core import processes
watchdog.watch(0.5)
processes.note_progress()
time.sleep(0.3)
ctypes.PyDLL(None).sleep(60)  # in C, with Python's lock held
"""


@pytest.mark.slow
def test_even_a_process_that_holds_pythons_lock_is_ended(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(HOLDS_THE_LOCK)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 1
    assert f'File "{script}", line 8 in <module>' in done.stderr


SLOW_AT_FIRST = """
import time
import jax.numpy as jnp, numpy as np
import paraxis as px
from paraxis.launch import _watchdog
from paraxis.train.runs import _loop
_watchdog._FIRST_STEP = {first_step}
_watchdog.watch(2)
fetched, seconds = _loop.fetched, [8]
def wait(metrics):  # as on a device that waits for one of a process that still compiles
    time.sleep(seconds.pop() if seconds else 0)
    return fetched(metrics)
_loop.fetched = wait
def step(w, batch):
    return w, {{"loss": w}}
px.fit(jnp.zeros(()), step, [np.ones(2)] * 8, steps=8, progress=False)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("first_step", "status"), [(3, 79), (60, 0)])
def test_the_first_step_is_waited_for_longer_until_its_results_are_there(
    tmp_path: Path, first_step: int, status: int
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SLOW_AT_FIRST.format(first_step=first_step))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == status, done.stderr
    said = f"paraxis: no first step for 3 s; the main thread is at {script}:11; all stacks:"
    assert (said in done.stderr) == (status == 79)


@pytest.mark.parametrize(
    ("then", "status"),
    [
        ("time.sleep(100)", 79),
        pytest.param("processes.end_progress(); time.sleep(2)", 0, marks=pytest.mark.slow),
        pytest.param("", 0, marks=pytest.mark.slow),
    ],
)
def test_the_watchdog_counts_from_the_last_step_until_the_loop_has_ended(
    tmp_path: Path, then: str, status: int
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import time\nimport paraxis.launch._watchdog as watchdog\nfrom paraxis._core import processes\n"
        "watchdog.watch(1.5)\ntime.sleep(2)\n"
        f"for _ in range(10):\n    processes.note_progress()\n    time.sleep(0.05)\n{then}\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == status
    if status:
        assert f"paraxis: no progress for 1.5 s; the main thread is at {script}:9; all stacks:" in done.stderr
    else:
        assert done.stderr == ""
