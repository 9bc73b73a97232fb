"""How a process finds its place: alone, by variables, by a scheduler's; and what it says when it cannot take it."""

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import pytest

import paraxis as px
import paraxis.launch
from paraxis.launch import Options, Processes, launch
from tests.launch._support import TRAINING, held_port, plain_environment

THERE = {"PARAXIS_COORDINATOR": "127.0.0.1:5000", "PARAXIS_NUM_PROCESSES": "4", "PARAXIS_PROCESS": "2"}

Initialize = Callable[..., Processes]


@pytest.fixture
def initialize(monkeypatch: pytest.MonkeyPatch) -> Initialize:
    """``px.initialize`` of a process that has not called it yet, as only the first call does anything."""
    monkeypatch.setattr(px, "launch", paraxis.launch)  # put back afterwards
    for name in [name for name in sys.modules if name.startswith("paraxis.launch")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    return importlib.import_module("paraxis.launch").initialize


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What JAX is asked for, in place of starting anything."""
    seen: dict[str, Any] = {}

    def start(**arguments: Any) -> None:
        seen.clear()
        seen.update(arguments)

    monkeypatch.setattr(jax.distributed, "initialize", start)
    return seen


def set_all(monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def numbers(found: Processes) -> tuple[int, int, int]:
    return found.process, found.num_processes, found.attempt


def test_alone_nothing_is_done(initialize: Initialize) -> None:
    hook = sys.excepthook
    first = initialize()
    assert repr(first) == repr(Processes(process=0, num_processes=1, attempt=0))
    assert initialize() is first
    assert not jax.distributed.is_initialized()
    assert sys.excepthook is hook


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        *(({"stuck_after": x}, "stuck_after must be a finite number of seconds") for x in ("abc", -1, float("inf"))),
        *(({"join_timeout": x}, "join_timeout must be a finite number of seconds") for x in ("abc", 0, float("nan"))),
        *(({"cluster": x}, "cluster must be the name of a way to find processes") for x in ("", 5)),
    ],
)
def test_a_malformed_argument_is_named_alone_and_in_a_second_call_too(
    initialize: Initialize, argument: dict[str, Any], message: str
) -> None:
    for _ in range(2):
        with pytest.raises(px.ProcessError, match=f"px.initialize: {message}.*, got {next(iter(argument.values()))!r}"):
            initialize(**argument)
        initialize()


TELLS = """
import json, os, pathlib, sys
told = {name: value for name, value in os.environ.items() if name.startswith("PARAXIS_")}
pathlib.Path(sys.argv[1], told["PARAXIS_PROCESS"] + told["PARAXIS_ATTEMPT"]).write_text(json.dumps(told))
sys.exit(told["PARAXIS_ATTEMPT"] == "0")
"""


@pytest.mark.slow
def test_the_place_is_read_as_it_was_written(
    initialize: Initialize, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(TELLS)
    assert launch(Options(2, str(script), [str(tmp_path)], restarts=1, grace=2.5, stuck_after=60)) == 0
    told = json.loads((tmp_path / "11").read_text())
    set_all(monkeypatch, told | {"PARAXIS_LAUNCHER": str(os.getppid())})
    monkeypatch.delenv("PARAXIS_TELL", raising=False)
    assert numbers(initialize(stuck_after=0)) == (1, 2, 1)
    assert asked["coordinator_address"] == told["PARAXIS_COORDINATOR"]
    assert (asked["process_id"], asked["num_processes"]) == (1, 2)
    assert 2.5 < asked["shutdown_timeout_seconds"] < 60


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        (THERE, (2, 4, 0)),
        (THERE | {"PARAXIS_COORDINATOR": "host:1", "PARAXIS_PROCESS": "3"}, (3, 4, 0)),
        ({}, (0, 1, 0)),
    ],
)
def test_a_place_that_was_written_by_hand_is_read(
    initialize: Initialize,
    asked: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    found: tuple[int, int, int],
) -> None:
    set_all(monkeypatch, variables)
    assert numbers(initialize()) == found
    assert asked.get("coordinator_address") == variables.get("PARAXIS_COORDINATOR")
    assert asked.get("process_id", 0) == found[0]
    assert asked.get("shutdown_timeout_seconds", 300) == 300  # JAX's own


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"PARAXIS_PROCESS": "4"}, "PARAXIS_PROCESS=4 must be from 0 to PARAXIS_NUM_PROCESSES - 1, which is 3"),
        ({"PARAXIS_PROCESS": "-1"}, "PARAXIS_PROCESS='-1' must be a number"),
        ({"PARAXIS_PROCESS": None}, "PARAXIS_PROCESS='' must be a number; write, say, PARAXIS_PROCESS=1"),
        ({"PARAXIS_NUM_PROCESSES": "two"}, "PARAXIS_NUM_PROCESSES='two' must be a number"),
        ({"PARAXIS_COORDINATOR": "here"}, "PARAXIS_COORDINATOR='here' must be the host and port of process 0"),
        ({"PARAXIS_ATTEMPT": "once"}, "PARAXIS_ATTEMPT='once' must be a number"),
        *(({"PARAXIS_GRACE": x}, f"PARAXIS_GRACE={x!r} must be a finite number of seconds") for x in ("long", "inf")),
        *(({"PARAXIS_STUCK_AFTER": x}, f"PARAXIS_STUCK_AFTER={x!r} must be a finite") for x in ("", "-1", "nan")),
    ],
)
def test_variables_that_cannot_be_read_are_named(
    initialize: Initialize, monkeypatch: pytest.MonkeyPatch, change: Mapping[str, str | None], message: str
) -> None:
    set_all(monkeypatch, {name: value for name, value in {**THERE, **change}.items() if value is not None})
    with pytest.raises(px.ProcessError, match=f"^{message}"):
        initialize()


@pytest.mark.parametrize(("whose", "found"), [(os.getpid, (0, 1, 0)), (os.getppid, (2, 4, 0))])
def test_variables_for_the_parent_process_are_not_for_this_one(
    initialize: Initialize,
    asked: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    whose: Callable[[], int],
    found: tuple[int, int, int],
) -> None:
    set_all(monkeypatch, THERE | {"PARAXIS_LAUNCHER": str(whose())})
    assert numbers(initialize()) == found
    assert bool(asked) == (found[1] > 1)


@pytest.mark.parametrize(
    ("coordinator", "local"),
    [("127.0.0.1:1", True), ("localhost:1", True), ("[::1]:1", True), ("10.0.0.1:1", False), ("node001:1", False)],
)
def test_only_loopback_is_local(
    initialize: Initialize, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, coordinator: str, local: bool
) -> None:
    """And listens there only, with devices shared out among the processes of this host."""
    set_all(monkeypatch, THERE | {"PARAXIS_COORDINATOR": coordinator})
    initialize()
    assert asked["coordinator_bind_address"] == (coordinator if local else None)
    assert asked["local_device_ids"] == ([2] if local else None)


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
def test_a_scheduler_is_known_by_what_a_lone_process_has_not(
    initialize: Initialize, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], found: str | None
) -> None:
    set_all(monkeypatch, variables)
    monkeypatch.setattr(jax.distributed, "initialize", found_nothing)
    if found is None:
        assert numbers(initialize()) == (0, 1, 0)
    else:
        with pytest.raises(px.ProcessError, match=f"cannot find the other processes by way of {found}: "):
            initialize()


def found_nothing(**arguments: object) -> None:
    raise ValueError("coordinator_address should be defined.")


def test_after_the_devices_it_is_too_late(initialize: Initialize, monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, THERE)
    jax.devices()
    with pytest.raises(px.ProcessError, match=r"JAX has its devices already.* right after the imports"):
        initialize()
    assert not jax.distributed.is_initialized()


def test_a_port_that_is_taken_is_named(initialize: Initialize, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        coordinator = "127.0.0.1:%d" % taken.getsockname()[1]  # noqa: UP031
        set_all(monkeypatch, THERE | {"PARAXIS_COORDINATOR": coordinator, "PARAXIS_PROCESS": "0"})
        with pytest.raises(px.ProcessError, match=r"port \d+, .* is taken; write another one in PARAXIS_COORDINATOR="):
            initialize()


def test_a_scheduler_whose_processes_jax_cannot_find_is_named(
    initialize: Initialize, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax.distributed, "initialize", found_nothing)
    set_all(monkeypatch, {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"})
    with pytest.raises(px.ProcessError, match=r"by way of k8s: .* PARAXIS_COORDINATOR, PARAXIS_NUM_PROCESSES"):
        initialize()


@pytest.fixture
def port() -> Iterator[int]:
    with held_port() as port:
        yield port


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


@pytest.mark.slow
def test_without_a_launcher_an_exception_ends_all_at_once(port: int) -> None:
    """JAX alone would have each wait for the other until its shutdown times out, after 300 s."""
    coordinator = f"127.0.0.1:{port}"
    place = {"PARAXIS_COORDINATOR": coordinator, "PARAXIS_NUM_PROCESSES": "2"}
    found = ends(by_hand([place | {"PARAXIS_PROCESS": str(number)} for number in (0, 1)], "raise"))
    assert [status for status, _, _ in found] == [70, 70]
    assert "ValueError: a bug of the user" in found[1][2]
    assert all("step 10: 11" in out for _, out, _ in found)


@pytest.mark.slow
def test_the_tasks_of_a_slurm_step_find_each_other(port: int) -> None:
    step = SLURM | {"JAX_COORDINATOR_PORT": str(port)}
    own = [{"SLURM_PROCID": str(number), "SLURM_LOCALID": str(number)} for number in (0, 1)]
    found = ends(by_hand([step | variables for variables in own], "finish"))
    assert [status for status, _, _ in found] == [0, 0], found
    for number, (_, out, _) in enumerate(found):
        assert f"left {number} of 2" in out


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_process_that_is_asked_to_stop_has_all_stop(number: signal.Signals, port: int) -> None:
    place = {"PARAXIS_COORDINATOR": f"127.0.0.1:{port}", "PARAXIS_NUM_PROCESSES": "2"}
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


ALONE = {"PARAXIS_COORDINATOR": "127.0.0.1:0", "PARAXIS_NUM_PROCESSES": "1", "PARAXIS_PROCESS": "0"}


def done_alone(script: Path, text: str) -> subprocess.CompletedProcess[str]:
    """A script that is the only process of a computation, run without a launcher."""
    script.write_text(text)
    with held_port() as port:
        place = ALONE | {"PARAXIS_COORDINATOR": f"127.0.0.1:{port}"}
        return subprocess.run(
            [sys.executable, script],
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
            env={**plain_environment(), **place},
        )


HOLDS_THE_LOCK = """
import ctypes, time
import numpy as np
import paraxis as px
px.initialize(stuck_after=0.5)
def step(number, batch):
    if number == 8:  # results of the first steps are there by now, so the loop is under way
        time.sleep(0.3)
        ctypes.PyDLL(None).sleep(60)  # in C, with Python's lock held
    return number + 1, {"loss": 0.0}
px.fit(0, step, [np.zeros(1)] * 20, steps=20, progress=False)
"""


@pytest.mark.slow
def test_even_a_process_that_holds_pythons_lock_is_ended(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    done = done_alone(script, HOLDS_THE_LOCK)
    assert done.returncode == 1
    assert f'File "{script}", line 9 in step' in done.stderr


LOOPS = """
import time
import numpy as np
import paraxis as px
px.initialize(stuck_after=1.5)
time.sleep(2)
def step(number, batch):
    time.sleep(0.05 if number < 10 else {last})
    return number + 1, {{"loss": 0.0}}
px.fit(0, step, [np.zeros(1)] * 11, steps=11, progress=False)
{then}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("last", "then", "status"),
    [
        (100, "", 79),
        pytest.param(0, "time.sleep(2)", 0, marks=pytest.mark.slow),
        pytest.param(0, "", 0, marks=pytest.mark.slow),
    ],
)
def test_the_watchdog_counts_from_the_last_step_until_the_loop_has_ended(
    tmp_path: Path, last: int, then: str, status: int
) -> None:
    script = tmp_path / "script.py"
    done = done_alone(script, LOOPS.format(last=last, then=then))
    assert done.returncode == status
    if status:
        assert f"paraxis: no progress for 1.5 s; the main thread is at {script}:8; all stacks:" in done.stderr
    else:
        assert done.stderr == ""
