"""Devices are made once per process: what comes before that is tested in another one, what comes too late in this."""

import os
import subprocess
import sys

import jax
import pytest

import paraxis as px
from paraxis.testing import simulate_devices

OTHER_FLAG = "--xla_cpu_enable_fast_math=false"
CODE = """
import os
from paraxis.testing import simulate_devices
simulate_devices(5)
import jax
print(len(jax.devices()), os.environ["XLA_FLAGS"].strip())
"""


def test_simulate_devices_makes_devices_and_keeps_other_flags() -> None:
    flags = f"{OTHER_FLAG} --xla_force_host_platform_device_count=2"
    command, environment = [sys.executable, "-c", CODE], {**os.environ, "XLA_FLAGS": flags}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    patience = "--xla_cpu_collective_call_terminate_timeout_seconds=86400"
    assert done.stdout.split() == ["5", OTHER_FLAG, patience], done.stderr


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch) -> str:
    """Some that are not those of the devices that there are."""
    jax.devices()
    monkeypatch.setenv("XLA_FLAGS", f"{OTHER_FLAG} --xla_force_host_platform_device_count=3")
    return os.environ["XLA_FLAGS"]


def test_simulate_devices_fails_too_late_with_fewer_devices_and_passes_with_enough(flags: str) -> None:
    simulate_devices(2)
    assert len(jax.devices()) == 8
    with pytest.raises(px.DeviceError, match=r"64 devices were asked for.*already started with 8.*_device_count=64"):
        simulate_devices(64)
    assert os.environ["XLA_FLAGS"] == flags
