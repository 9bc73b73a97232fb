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
from unittest import mock
import jax
from paraxis.testing import simulate_devices
devices, seen = jax.devices, []
with mock.patch.object(jax, "devices", lambda: seen.append(os.environ.get("PJRT_NPROC")) or devices()):
    simulate_devices(40)
print(len(jax.devices()), seen[0], os.environ.get("PJRT_NPROC"), os.environ["XLA_FLAGS"].strip())
"""


def test_simulate_devices_makes_devices_of_two_threads_and_keeps_other_flags() -> None:
    """Two threads each while they start, so that none waits for ever; afterwards the environment is as it was."""
    others = {name: value for name, value in os.environ.items() if name not in ("PJRT_NPROC", "NPROC")}
    environment = others | {"XLA_FLAGS": f"{OTHER_FLAG} --xla_force_host_platform_device_count=2"}
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    patience = "--xla_cpu_collective_call_terminate_timeout_seconds=86400"
    assert done.returncode == 0, done.stderr
    number, threads, afterwards, *left = done.stdout.split()
    assert (number, afterwards, left) == ("40", "None", [OTHER_FLAG, patience])
    assert int(threads) >= 80


def test_simulate_devices_fails_too_late_and_passes_with_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(jax.devices()) == 8
    flags = f"{OTHER_FLAG} --xla_force_host_platform_device_count=3"  # and not those of the devices that there are
    monkeypatch.setenv("XLA_FLAGS", flags)
    simulate_devices(2)
    with pytest.raises(px.DeviceError, match=r"64 devices were asked for.*already started with 8.*_device_count=64"):
        simulate_devices(64)
    assert os.environ["XLA_FLAGS"] == flags
