"""The devices that a command runs on."""

import contextlib
import os
from typing import Any

import jax

from paraxis._host import threads
from paraxis.cli._errors import CommandError

_SIMULATED = 2


def find_devices(number: int | None) -> list[Any]:
    """Return the devices to run on; to be called before anything else uses JAX.

    The CPU is divided into as many simulated devices as are asked for, or two, unless ``XLA_FLAGS`` or
    ``JAX_NUM_CPU_DEVICES`` already says how many. That changes nothing where there is an accelerator.

    Raises:
        CommandError: if there are fewer than asked for.
    """
    if not _is_user_decided():
        with contextlib.suppress(RuntimeError):  # JAX has started: its devices are what there is
            jax.config.update("jax_num_cpu_devices", number or _SIMULATED)
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError):  # JAX asserts that a platform asked for by name is installed
        platforms = os.environ.get("JAX_PLATFORMS", "")
        raise CommandError(f"JAX finds no devices; JAX_PLATFORMS is {platforms!r}") from None
    if number is not None and number > len(devices):
        kind = devices[0].platform
        hint = (
            "XLA_FLAGS or JAX_NUM_CPU_DEVICES limits them"
            if kind == "cpu"
            else "for simulated ones set JAX_PLATFORMS=cpu"
        )
        raise CommandError(f"--devices {number} is more than the {len(devices)} there are ({kind}); {hint}")
    return devices[:number]


def describe(devices: list[Any]) -> str:
    """Return a text for people: ``2 × cpu (simulated)``."""
    simulated = " (simulated)" if devices[0].platform == "cpu" and len(devices) > 1 else ""
    kind = "cpu" if devices[0].platform == "cpu" else devices[0].device_kind
    return f"{len(devices)} × {kind}{simulated}"


def _is_user_decided() -> bool:
    return threads.simulated(os.environ) is not None or "JAX_NUM_CPU_DEVICES" in os.environ
