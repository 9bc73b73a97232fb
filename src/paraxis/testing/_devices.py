"""Several devices where there is one."""

import contextlib
import os

import jax

from paraxis._core import check
from paraxis._host import threads
from paraxis.errors import DeviceError


def simulate_devices(n: int) -> None:
    """Start JAX on ``n`` simulated CPU devices. Call this before anything else uses JAX.

    They have two of XLA's threads each, unless ``PJRT_NPROC`` says a number, and wait a day for each other, not 40 s.

    Args:
        n: number of devices, at least 1.

    Raises:
        DeviceError: if JAX has already started with fewer devices. If it has as many or more, nothing happens.

    Example:
        >>> import paraxis as px
        >>> px.simulate_devices(1)
    """
    n = check.count("simulate_devices", "n", n, most=4096, write="simulate_devices(8)", error=DeviceError)
    with contextlib.suppress(RuntimeError):  # JAX has started
        jax.config.update("jax_num_cpu_devices", n)
        jax.config.update("jax_platforms", "cpu")
        os.environ["XLA_FLAGS"] = threads.patient()
    with threads.environment(threads.variables(n)):
        there = len(jax.devices())
    if there < n:
        raise DeviceError(
            f"simulate_devices: {n} devices were asked for, but JAX has already started with {there}. Call "
            f"simulate_devices({n}) before anything uses JAX, as importing blackjax does, or start Python with "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={n}"
        )
