"""The environment variables by which a process learns its place among several.

The first three are enough, and may be set by hand, say on several hosts; ``paraxis launch`` sets them all. ``NPROC``,
the obvious name, is none of them: XLA takes it as its number of threads.
"""

import contextlib
import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Self

from paraxis.errors import ProcessError

COORDINATOR = "PARAXIS_COORDINATOR"
NUM_PROCESSES = "PARAXIS_NUM_PROCESSES"
PROCESS = "PARAXIS_PROCESS"
ATTEMPT = "PARAXIS_ATTEMPT"
GRACE = "PARAXIS_GRACE"
STUCK_AFTER = "PARAXIS_STUCK_AFTER"
LAUNCHER = "PARAXIS_LAUNCHER"
TELL = "PARAXIS_TELL"


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a process among those that were started together.

    Attributes:
        coordinator: ``host:port`` of the process with number 0.
        num_processes: how many there are.
        process: the number of this one.
        attempt: how often they were started before.
        grace: seconds that the others have after one has finished; ``None``: nobody looks.
        stuck_after: seconds without progress after which a process is stuck; 0: never.
    """

    coordinator: str
    num_processes: int
    process: int
    attempt: int = 0
    grace: float | None = None
    stuck_after: float = 0

    @classmethod
    def read(cls, variables: Mapping[str, str] = os.environ) -> Self | None:
        """Return the place that the variables tell; ``None`` if they do not, or are those of the parent process.

        Raises:
            ProcessError: if they cannot be read.
        """
        if not any(name in variables for name in (COORDINATOR, NUM_PROCESSES, PROCESS)) or _inherited(variables):
            return None
        place = cls(
            _text(variables, COORDINATOR),
            _whole(variables, NUM_PROCESSES),
            _whole(variables, PROCESS),
            _whole(variables, ATTEMPT) if ATTEMPT in variables else 0,
            _seconds(variables, GRACE) if GRACE in variables else None,
            _seconds(variables, STUCK_AFTER) if STUCK_AFTER in variables else 0,
        )
        if not 0 <= place.process < place.num_processes:
            raise ProcessError(
                f"{PROCESS}={place.process} must be from 0 to {NUM_PROCESSES} - 1, which is {place.num_processes - 1}"
            )
        return place

    @property
    def host(self) -> str:
        """Return the host of the process with number 0, by name or address."""
        return self.coordinator.rpartition(":")[0].strip("[]")

    @property
    def is_local(self) -> bool:
        """Return whether all processes are on this host."""
        return self.host in ("127.0.0.1", "localhost", "::1")

    def written(self) -> dict[str, str]:
        """Return the variables that tell this place."""
        return {
            COORDINATOR: self.coordinator,
            NUM_PROCESSES: str(self.num_processes),
            PROCESS: str(self.process),
            ATTEMPT: str(self.attempt),
            STUCK_AFTER: f"{self.stuck_after:g}",
            **({} if self.grace is None else {GRACE: f"{self.grace:g}"}),
        }


def _inherited(variables: Mapping[str, str]) -> bool:
    """Return whether they were meant for the process that started this one: a tool that a script runs is no rank."""
    return LAUNCHER in variables and variables[LAUNCHER] != str(os.getppid())


def _text(variables: Mapping[str, str], name: str) -> str:
    value = variables.get(name, "")
    if name == COORDINATOR and not value.rpartition(":")[2].isdigit():
        raise ProcessError(f"{name}={value!r} must be the host and port of process 0; write {name}=127.0.0.1:5000")
    return value


def _whole(variables: Mapping[str, str], name: str) -> int:
    value = variables.get(name, "")
    if not value.isdigit():
        raise ProcessError(f"{name}={value!r} must be a number; write, say, {name}=1")
    return int(value)


def _seconds(variables: Mapping[str, str], name: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (seconds := float(variables[name])) < math.inf:
            return seconds
    raise ProcessError(f"{name}={variables[name]!r} must be a finite number of seconds; write, say, {name}=60")
