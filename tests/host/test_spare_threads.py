"""No public face: one rule reads flags for all. XLA has threads to spare for simulated devices, so none waits for ever.

Programs that are started in a row hold threads where devices wait for each other.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLAG = "--xla_force_host_platform_device_count"
ENDS_SOON = (
    "--xla_cpu_collective_call_terminate_timeout_seconds=20 --xla_cpu_collective_call_warn_stuck_timeout_seconds=10"
)
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
SIMULATED = """
import os
from unittest import mock
import jax
from paraxis.testing import simulate_devices
devices = jax.devices
seen = []
with mock.patch.object(jax, "devices", lambda: seen.append(os.environ.get("PJRT_NPROC")) or devices()):
    simulate_devices(40)
print(seen[0], os.environ.get("PJRT_NPROC"))
"""


def started(code: str, **variables: str) -> subprocess.Popen[str]:
    taken = ("PJRT_NPROC", "NPROC", "XLA_FLAGS")
    kept = {name: value for name, value in os.environ.items() if name not in taken}
    env = kept | {"PYTHONPATH": str(ROOT / "src"), "JAX_PLATFORMS": "cpu"} | variables
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], env=env, text=True, stdout=pipe, stderr=subprocess.STDOUT)


def printed(code: str, **variables: str) -> str:
    child = started(code, **variables)
    out, _ = child.communicate(timeout=120)
    assert child.returncode == 0, out
    return out.strip()


@pytest.mark.parametrize(
    ("variables", "threads"),
    [
        ({}, f"{max(CORES, 80)} None"),
        pytest.param({"PJRT_NPROC": "²"}, f"{max(CORES, 80)} ²", marks=pytest.mark.slow),
        pytest.param({"PJRT_NPROC": "3"}, "3 3", marks=pytest.mark.slow),
        pytest.param({"NPROC": "3"}, "None None", marks=pytest.mark.slow),
    ],
)
def test_simulated_devices_have_two_threads_each_unless_something_else_is_said(variables, threads):
    """While they start; afterwards the environment is as it was."""
    assert printed(SIMULATED, **variables) == threads


def test_importing_the_package_changes_nothing_in_the_process():
    code = """
import os, jax
before = dict(os.environ), dict(jax.config.values), jax.devices.__module__
import paraxis
assert (dict(os.environ), dict(jax.config.values), jax.devices.__module__) == before
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
"""
    assert printed(code, XLA_FLAGS=f"{FLAG}=4") == ""
    assert printed(code, JAX_NUM_CPU_DEVICES="4") == ""


LOOP = """
from paraxis.testing import simulate_devices
simulate_devices(8)
import jax, jax.numpy as jnp, numpy as np
import paraxis as px

@jax.jit
@px.program(clients=8)
def mean(w, data):
    return px.reduce_mean(px.map_fn(lambda w, x: w - 0.1 * x.mean(0), (px.broadcast(w), data)))

w, data = jnp.zeros(3), np.random.default_rng(0).normal(size=(40, 30, 3)).astype("float32")
for _ in range(120):
    for number in range(60):
        w = mean(w, data[np.random.default_rng(number).choice(40, 8, replace=False)])
    w.block_until_ready()
"""


@pytest.mark.slow
def test_programs_started_in_a_row_on_a_busy_machine_end():
    """With a thread for each device (``PJRT_NPROC=8``), most of these processes hang, on jax 0.10 and two cores."""
    children = [started(LOOP, XLA_FLAGS=ENDS_SOON) for _ in range(3 * CORES)]
    said = [child.communicate(timeout=500)[0] for child in children]
    assert [child.returncode for child in children] == [0] * len(children), said
