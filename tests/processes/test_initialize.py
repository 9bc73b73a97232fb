"""``initialize``: alone, by variables, by a scheduler; and how a process ends that has joined others."""

import contextlib
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest
from jax._src import xla_bridge

import paraxis as px
import paraxis.launch
from paraxis.launch import Processes
from tests.processes._support import TRAINING, held_port, started

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


def test_initialize_does_nothing_alone(initialize: Initialize) -> None:
    hook = sys.excepthook
    first = initialize()
    assert repr(first) == repr(Processes(process=0, num_processes=1, attempt=0))
    assert initialize() is first
    assert not jax.distributed.is_initialized()
    assert sys.excepthook is hook


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
def test_initialize_leaves_no_process_alone_in_silence(
    initialize: Initialize, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], is_found: bool
) -> None:
    jax.devices()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if is_found:
        with pytest.raises(RuntimeError, match=r"must be called before any JAX calls"):
            initialize()
    else:
        assert initialize().num_processes == 1
    assert not jax.distributed.is_initialized()


IDLE = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (SLURM | IDLE | {"SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURM_NODEID": "3"}, "4 GPUs and 1 of the processes"),
        (SLURM | IDLE | {"SLURM_STEP_TASKS_PER_NODE": "4,2(x2)", "SLURM_NODEID": "1"}, "4 GPUs and 2 of the processes"),
        (SLURM | IDLE | {"SLURM_STEP_TASKS_PER_NODE": "4"}, None),
        (SLURM | IDLE | {"SLURM_STEP_TASKS_PER_NODE": "1", "JAX_LOCAL_DEVICE_IDS": "0"}, None),
        (OPEN_MPI | IDLE | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "set JAX_LOCAL_DEVICE_IDS=0,1,2,3"),
        (OPEN_MPI | IDLE | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, None),
        ({"RANK": "1", "WORLD_SIZE": "2"}, r"RANK=1 and WORLD_SIZE=2 .* int\(os.environ\[\"WORLD_SIZE\"\]\)"),
        ({"PMI_RANK": "0", "PMI_SIZE": "3"}, r"PMI_RANK=0 and PMI_SIZE=3 "),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
    ],
)
def test_initialize_leaves_no_device_and_no_process_out_in_silence(
    initialize: Initialize, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], words: str | None
) -> None:
    joined: list[bool] = []
    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: False)
    monkeypatch.setattr(jax.distributed, "initialize", lambda: joined.append(True))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    before = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_platforms", None)  # as on a machine with GPUs
    try:
        with contextlib.nullcontext() if words is None else pytest.raises(px.DeviceError, match=words):
            assert initialize().num_processes == 1
    finally:
        jax.config.update("jax_platforms", before)
    assert joined == [True] * (words is None and "RANK" not in variables)


def ends(*processes: subprocess.Popen[str]) -> list[tuple[int, str, str]]:
    try:
        outputs = [process.communicate(timeout=150) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


@pytest.fixture
def two() -> Iterator[list[dict[str, str]]]:
    """The variables of two processes."""
    with held_port() as port:
        common = {"PARAXIS_COORDINATOR": f"127.0.0.1:{port}", "PARAXIS_NUM_PROCESSES": "2"}
        yield [common | {"PARAXIS_PROCESS": str(number)} for number in (0, 1)]


@pytest.mark.slow
def test_initialize_ends_all_processes_at_an_exception_without_a_launcher(two: list[dict[str, str]]) -> None:
    """JAX alone would have each wait for the other until its shutdown times out, after 300 s."""
    found = ends(*(started(TRAINING, "raise", **own) for own in two))
    assert all(status for status, _, _ in found)
    assert "ValueError: a bug of the user" in found[1][2]
    assert all("step 10: 11" in out for _, out, _ in found)


@pytest.mark.slow
def test_initialize_stops_all_processes_after_one_step_when_one_is_asked_to(two: list[dict[str, str]]) -> None:
    both = [started(TRAINING, "train", **own) for own in two]
    for process in both:
        assert process.stdout is not None
        while "step 10" not in process.stdout.readline():
            pass
    both[1].send_signal(signal.SIGINT)
    found = ends(*both)
    stops = [line for _, out, _ in found for line in out.splitlines() if "stopped" in line]
    assert [status for status, _, _ in found] == [0, 0]
    assert len(stops) == 2
    assert stops[0] == stops[1]


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
time.sleep(2)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("last", "status"), [(100, 1), (0, 0)])
def test_initialize_finds_a_process_stuck_until_the_loop_has_ended(tmp_path: Path, last: int, status: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(LOOPS.format(last=last))
    ((found, _, error),) = ends(started(script))
    assert found == status
    assert (f'File "{script}", line 8 in step' in error) == (status == 1)
