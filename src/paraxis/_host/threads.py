"""Threads on CPU: XLA's, whose number the last bits of results depend on and is fixed when JAX starts; and LAPACK's."""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping

VARIABLE = "PJRT_NPROC"  # XLA takes the number from it; from NPROC if there is none

# Threads for each simulated device. Programs are started without waiting for those before, and a device holds a thread
# where it waits for others: some may be in the next program already. With fewer threads than this, jax 0.10 may have
# none left for the device that all wait for, where cores are few and busy; it then ends the process after a minute.
PER_DEVICE = 2

# The least number, so that one process with eight devices has as many as eight with one, on small machines too.
FLOOR = 16

SIMULATED, COUNT = "--xla_force_host_platform_device_count", "JAX_NUM_CPU_DEVICES"  # a flag of XLA's, and JAX's own


def advised(num_devices: int = 1) -> int:
    """Return a number that is the same for all processes of a machine, with any of the usual numbers of devices."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(cores, PER_DEVICE * num_devices, FLOOR)


_PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds"


def patient(variables: Mapping[str, str]) -> str:
    """Return ``XLA_FLAGS`` without a number of devices; these wait a day for each other, not 40 s, unless they say."""
    flags = re.sub(rf"{SIMULATED}=\S*\s*", "", variables.get("XLA_FLAGS", "")).strip()
    return flags if _PATIENCE in flags else f"{flags} {_PATIENCE}=86400".strip()


def variables(num_devices: int | None) -> dict[str, str]:
    """Return the variables of another process, with so many simulated CPU devices; ``None``: with the machine's own."""
    env = {} if asked_for(os.environ) is not None else {VARIABLE: f"{advised(num_devices or 1)}"}
    return env if num_devices is None else env | {COUNT: f"{num_devices}", "XLA_FLAGS": patient(os.environ)}


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process within, as for a library that reads them once."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def asked_for(variables: Mapping[str, str]) -> int | None:
    """Return the number in an environment; ``None``: XLA decides, by cores and devices."""
    text = variables.get(VARIABLE) or variables.get("NPROC") or ""
    return int(text) if text.isdecimal() and int(text) > 0 else None
