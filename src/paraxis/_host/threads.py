"""Threads on CPU: XLA's, whose number the last bits of results depend on and is fixed when JAX starts; and LAPACK's."""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping

# Threads for each simulated device. Programs are started without waiting for those before, and a device holds a thread
# where it waits for others: some may be in the next program already. With fewer threads than this, jax 0.10 may have
# none left for the device that all wait for, where cores are few and busy; it then ends the process after a minute.
_PER_DEVICE = 2

# The least number, so that one process with eight devices has as many as eight with one, on small machines too.
_FLOOR = 16

SIMULATED, COUNT = "--xla_force_host_platform_device_count", "JAX_NUM_CPU_DEVICES"  # a flag of XLA's, and JAX's own


_PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds"


def patient() -> str:
    """Return ``XLA_FLAGS`` without a number of devices; these wait a day for each other, not 40 s, unless they say."""
    flags = re.sub(rf"{SIMULATED}=\S*\s*", "", os.environ.get("XLA_FLAGS", "")).strip()
    return flags if _PATIENCE in flags else f"{flags} {_PATIENCE}=86400".strip()


def variables(num_devices: int | None) -> dict[str, str]:
    """Return the variables of another process, with so many simulated CPU devices; ``None``: with the machine's own."""
    asked = os.environ.get("PJRT_NPROC") or os.environ.get("NPROC") or ""  # in which order XLA reads them
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    advised = max(cores, _PER_DEVICE * (num_devices or 1), _FLOOR)  # as all processes of a machine have it
    env = {} if asked.isdecimal() and int(asked) > 0 else {"PJRT_NPROC": f"{advised}"}
    return env if num_devices is None else env | {COUNT: f"{num_devices}", "XLA_FLAGS": patient()}


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
