"""Each case in a Python of its own: devices are made once per process."""

import os
import subprocess
import sys

import pytest

PRELUDE = "import paraxis as px; from paraxis.testing import simulate_devices; "


def _python(code, flags=None):
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    if flags:
        environment["XLA_FLAGS"] = flags
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + code], env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("flags", [None, "--xla_force_host_platform_device_count=2"])
def test_devices_are_made_whatever_the_flags_said(flags):
    done = _python("simulate_devices(5); import jax; print(len(jax.devices()))", flags)
    assert done.stdout.strip() == "5", done.stderr


def test_other_flags_are_kept():
    code = "import os; simulate_devices(3); print(os.environ['XLA_FLAGS'].strip())"
    done = _python(code, "--xla_cpu_enable_fast_math=false --xla_force_host_platform_device_count=2")
    assert done.stdout.strip() == "--xla_cpu_enable_fast_math=false", done.stderr


def test_too_late_with_fewer_devices_fails_loudly():
    done = _python("import jax; jax.devices(); simulate_devices(4)")
    assert done.returncode == 1
    assert "DeviceError: simulate_devices: 4 devices were asked for" in done.stderr
    assert "already started with 1" in done.stderr
    assert "--xla_force_host_platform_device_count=4" in done.stderr


def test_too_late_with_enough_devices_is_fine():
    code = "import jax; jax.devices(); simulate_devices(4); print(len(jax.devices()))"
    done = _python(code, "--xla_force_host_platform_device_count=8")
    assert done.stdout.strip() == "8", done.stderr


@pytest.mark.sampled(1)
@pytest.mark.parametrize("n", ["0", "-1", "True", "2.0", "'2'"])
def test_a_malformed_number_is_refused(n):
    done = _python(f"simulate_devices({n})")
    assert "DeviceError: simulate_devices: n must be an integer of at least 1, got" in done.stderr


def test_flags_are_kept_if_it_is_too_late() -> None:
    flags = "--xla_force_host_platform_device_count=3"
    code = "import os, jax; jax.devices(); from paraxis.testing import simulate_devices; simulate_devices(2); "
    command = [sys.executable, "-c", code + "print(os.environ['XLA_FLAGS'])"]
    done = subprocess.run(command, env={**os.environ, "XLA_FLAGS": flags}, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == flags, done.stderr
