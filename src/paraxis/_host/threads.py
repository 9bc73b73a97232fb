"""The number of XLA's threads on CPU: the last bits of results depend on it, and it is fixed when JAX starts."""

import os
from collections.abc import Mapping

VARIABLE = "PJRT_NPROC"
"""Environment variable that XLA takes the number from; ``NPROC`` if there is none."""

FLOOR = 8
"""The least number, so that one process with eight devices has as many as eight with one, on small machines too."""


def num_cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def advised(num_devices: int = 1) -> int:
    """Return a number that is the same for all processes of a machine, with any of the usual numbers of devices."""
    return max(num_cores(), num_devices, FLOOR)


def asked_for(variables: Mapping[str, str]) -> int | None:
    """Return the number in an environment; ``None``: XLA decides, by cores and devices."""
    found = variables.get(VARIABLE) or variables.get("NPROC") or ""
    return int(found) if found.isdigit() and int(found) > 0 else None
