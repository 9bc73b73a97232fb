"""No public face: threads of XLA and LAPACK. Simulated devices have some to spare, so that none waits for ever."""

import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from paraxis._host import threads

ROOT = Path(__file__).parents[2]
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


def printed(code: str, **variables: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name not in ("PJRT_NPROC", "NPROC", "XLA_FLAGS")}
    env = kept | {"PYTHONPATH": str(ROOT / "src"), "JAX_PLATFORMS": "cpu"} | variables
    done = subprocess.run([sys.executable, "-c", code], env=env, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, f"{max(threads.num_cores(), 80)} None"),
        ({"PJRT_NPROC": "²"}, f"{max(threads.num_cores(), 80)} ²"),
        ({"PJRT_NPROC": "3"}, "3 3"),
        ({"NPROC": "3"}, "None None"),
    ],
)
def test_simulated_devices_have_two_threads_each_unless_something_else_is_said(
    variables: dict[str, str], expected: str
) -> None:
    """While they start; afterwards the environment is as it was."""
    assert printed(SIMULATED, **variables) == expected


IMPORTS = """
import os, jax
before = dict(os.environ), dict(jax.config.values), jax.devices.__module__
import paraxis
assert (dict(os.environ), dict(jax.config.values), jax.devices.__module__) == before
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
"""


def test_importing_the_package_changes_nothing_in_the_process() -> None:
    assert printed(IMPORTS, XLA_FLAGS="--xla_force_host_platform_device_count=4") == ""


def test_small_matrices_are_factored_on_one_thread() -> None:
    threadpoolctl = pytest.importorskip("threadpoolctl")

    def num_threads() -> set[int]:
        return {found["num_threads"] for found in threadpoolctl.threadpool_info() if found["user_api"] == "blas"}

    jnp.linalg.cholesky(jnp.eye(2))  # that SciPy's library is loaded
    with threadpoolctl.threadpool_limits(3, user_api="blas"):
        before = num_threads()
        with threads.lapack_alone(10):
            assert num_threads() == {1}
        with threads.lapack_alone(5_000):
            assert num_threads() == before
        assert num_threads() == before
