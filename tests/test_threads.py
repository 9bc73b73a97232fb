"""No public face: threads of XLA; and programs run from many threads at once."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import paraxis as px
from paraxis._host import threads

pytestmark = pytest.mark.floor

ROOT = Path(__file__).parents[1]
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


def test_simulate_devices_has_two_threads_each() -> None:
    """While they start, so that none waits for ever; afterwards the environment is as it was."""
    env = {name: value for name, value in os.environ.items() if name not in ("PJRT_NPROC", "NPROC", "XLA_FLAGS")}
    env |= {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", SIMULATED], env=env, text=True, capture_output=True, timeout=120)
    assert done.stdout.strip() == f"{max(threads.num_cores(), 80)} None", done.stderr


def test_programs_of_different_sizes_run_in_many_threads_at_once() -> None:
    def work(thread: int) -> tuple[float, float, float]:
        name, x = f"axis{thread % 3}", np.linspace(0.0, 1.0, thread + 2)

        @px.program({name: thread + 2})
        def loss(w: Any, x: Any) -> jax.Array:
            copies = px.broadcast(w)
            time.sleep(0.01)  # lets the other threads trace in between
            return px.reduce_mean(px.map_fn(lambda w, x: (w * x - px.pmean(x, name)) ** 2, (copies, x)))

        w = float(thread)
        return float(jax.grad(loss)(w, x)), float(loss(w, x)), (2 * (w * x - x.mean()) * x).mean()

    with ThreadPoolExecutor(8) as pool:
        for number, (slope, value, expected) in enumerate(pool.map(work, range(8))):
            x = np.linspace(0.0, 1.0, number + 2)
            np.testing.assert_allclose((slope, value), (expected, ((number * x - x.mean()) ** 2).mean()), rtol=1e-4)
