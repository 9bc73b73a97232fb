"""``initialize``: alone, by variables, by a scheduler; and how a process ends that has joined others."""

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import pytest

import paraxis as px
import paraxis.launch
from paraxis.launch import Processes
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


def set_all(monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_alone_nothing_is_done(initialize: Initialize) -> None:
    hook = sys.excepthook
    first = initialize()
    assert repr(first) == repr(Processes(process=0, num_processes=1, attempt=0))
    assert initialize() is first
    assert not jax.distributed.is_initialized()
    assert sys.excepthook is hook


@pytest.mark.parametrize(
    "change",
    [
        {"PARAXIS_NUM_PROCESSES": "two"},
        {"PARAXIS_NUM_PROCESSES": None},
        {"PARAXIS_COORDINATOR": "here"},
        {"PARAXIS_COORDINATOR": None},
    ],
)
def test_variables_that_cannot_be_read_are_refused(change: Mapping[str, str | None], tmp_path: Path) -> None:
    own = {name: value for name, value in {**THERE, **change}.items() if value is not None}
    done = run_alone(tmp_path / "script.py", "import paraxis as px\npx.initialize()\n", own)
    assert done.returncode == 1
    assert "write PARAXIS_COORDINATOR=host:5000 PARAXIS_NUM_PROCESSES=2 PARAXIS_PROCESS=0" in done.stderr


SLURM = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_MCA_orte_hnp_uri": "1;tcp://10.0.0.1:1",
}


@pytest.mark.parametrize(
    ("variables", "is_found"),
    [
        (THERE, True),
        (THERE | {"PARAXIS_LAUNCHER": str(os.getppid())}, True),
        (THERE | {"PARAXIS_LAUNCHER": str(os.getpid())}, False),  # they are for the parent of this process
        (SLURM, True),
        ({name: value for name, value in SLURM.items() if name != "SLURM_PROCID"}, False),  # a shell on the login node
        (OPEN_MPI, True),
    ],
)
def test_a_process_among_others_is_never_alone_in_silence(
    initialize: Initialize, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], is_found: bool
) -> None:
    jax.devices()
    set_all(monkeypatch, variables)
    if is_found:
        with pytest.raises(px.DeviceError, match=r"JAX has already started, .* right after the imports"):
            initialize()
    else:
        assert initialize().num_processes == 1
    assert not jax.distributed.is_initialized()


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


def two(port: int) -> list[dict[str, str]]:
    common = {"PARAXIS_COORDINATOR": f"127.0.0.1:{port}", "PARAXIS_NUM_PROCESSES": "2"}
    return [common | {"PARAXIS_PROCESS": str(number)} for number in (0, 1)]


@pytest.mark.slow
def test_without_a_launcher_an_exception_ends_all_at_once(port: int) -> None:
    """JAX alone would have each wait for the other until its shutdown times out, after 300 s."""
    found = ends(by_hand(two(port), "raise"))
    assert all(status for status, _, _ in found)
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
    started = by_hand(two(port), "train")
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


def run_alone(script: Path, text: str, own: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    script.write_text(text)
    environment: dict[str, Any] = {**plain_environment(), **own}
    command = [sys.executable, script]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, check=False, env=environment)


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
@pytest.mark.parametrize(("last", "then", "status"), [(100, "", 1), (0, "time.sleep(2)", 0)])
def test_a_process_is_stuck_from_the_last_step_until_the_loop_has_ended(
    tmp_path: Path, last: int, then: str, status: int
) -> None:
    script = tmp_path / "script.py"
    done = run_alone(script, LOOPS.format(last=last, then=then), {})
    assert done.returncode == status
    assert (f'File "{script}", line 8 in step' in done.stderr) == (status == 1)
