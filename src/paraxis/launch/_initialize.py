"""``initialize``: this process takes its place among several, and does not keep them waiting if it fails."""

import dataclasses
import errno
import functools
import math
import os
import socket
import sys
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import jax

from paraxis._calls import arguments
from paraxis._jax import jax_api
from paraxis.errors import ProcessError
from paraxis.launch import _run, _variables, _watchdog
from paraxis.launch._variables import Place

_JOIN_TIMEOUT, _JOIN_TIMEOUT_OF_CLUSTERS = 60.0, 300.0
_HEARTBEAT_TIMEOUT = 30
# JAX's own default: the last process may still be at work after the others, say on a plot.
_SHUTDOWN_TIMEOUT = 300
_AFTER_GRACE = 15

# By which variables a scheduler is known: those that JAX needs of it, and that a lone process there has not.
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
_OPEN_MPI = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
_KUBERNETES = ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX")
_TPU_HOSTS = ("TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES")


@dataclasses.dataclass(frozen=True)
class Processes:
    """This process's place among the processes of a run.

    Attributes:
        process: the number of this process, from 0.
        num_processes: the number of processes.
        attempt: how many attempts of the launcher failed before this one.

    Example:
        >>> import paraxis as px
        >>> px.initialize().num_processes
        1
    """

    process: int
    num_processes: int
    attempt: int = 0


_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]

_initialized: Processes | None = None


@arguments.named()
def initialize(
    *, cluster: str | None = None, join_timeout: float | None = None, stuck_after: float | None = None
) -> Processes:
    """Join the other processes of a run, so that ``jax.devices()`` lists the devices of all of them.

    Call it first, before anything runs on a device. It finds the other processes in the first of these ways that
    applies:

    * By the variables of ``paraxis launch``. You can also set the first three by hand: ``PARAXIS_COORDINATOR``, which
      is the ``host:port`` of process 0, ``PARAXIS_NUM_PROCESSES`` and ``PARAXIS_PROCESS``. If the host is
      ``127.0.0.1``, as in every launch, or ``localhost`` or ``[::1]``, the processes communicate only over loopback.
    * By a cluster that JAX detects: SLURM, Open MPI, an indexed job of Kubernetes, several hosts of TPUs.
    * Otherwise the process is alone, and nothing is done.

    After this call, an uncaught exception ends the process at once with status 70; JAX alone would wait up to five
    minutes for the other processes, which wait for this one. Under ``paraxis launch``, ``sys.exit(3)`` also ends the
    process at once. A second call returns the result of the first.

    Args:
        cluster: the name of the way in which JAX should find the processes: ``"gcetpu"``, ``"mpi4py"``, …; ``None``:
            by the variables that are set.
        join_timeout: seconds to wait for the others; default: 60, under a scheduler 300.
        stuck_after: seconds without a step of a training loop after which this process prints the stacks of all its
            threads and ends with status 79, at least 600 before the first step; 0: never; default: as
            ``paraxis launch --stuck-after`` says, otherwise 0.

    Returns:
        The number of this process, and the number of processes.

    Raises:
        ProcessError: if an argument is malformed, even in a lone process; if JAX has already found its devices, a
            variable cannot be read, or the coordinator's port is taken.

    Communicates: with the coordinator, process 0, until all have joined. If one does not join in time, JAX ends the
    others.

    Example:
        >>> import paraxis as px
        >>> px.initialize()
        Processes(process=0, num_processes=1, attempt=0)
    """
    global _initialized
    _check(cluster, join_timeout, stuck_after)
    if _initialized is None:
        _initialized = _initialize(cluster, join_timeout, stuck_after)
    return _initialized


def _check(cluster: Any, join_timeout: Any, stuck_after: Any) -> None:
    if cluster is not None and not (isinstance(cluster, str) and cluster):
        got = arguments.described(cluster)
        raise ProcessError(
            f"px.initialize: cluster must be the name of a way to find processes, got {got}; write "
            f"cluster='slurm', or leave it out"
        )
    of_time = functools.partial(arguments.number, "px.initialize", finite=True, unit="seconds", error=ProcessError)
    if join_timeout is not None:
        of_time("join_timeout", join_timeout, above=0, write="join_timeout=60")
    if stuck_after is not None:
        of_time("stuck_after", stuck_after, least=0, write="stuck_after=1800, or 0 for never")


def _initialize(cluster: str | None, join_timeout: float | None, stuck_after: float | None) -> Processes:
    place = Place.read() if cluster is None else None
    if not jax.distributed.is_initialized():
        if place is not None:
            _join(place, join_timeout or _JOIN_TIMEOUT)
        elif (name := cluster or scheduler(os.environ)) is not None:
            _join_as_scheduled(name, cluster, join_timeout or _JOIN_TIMEOUT_OF_CLUSTERS)
        else:
            return Processes(0, 1)
    sys.excepthook = _ending(sys.excepthook)
    if stuck_after is None:
        stuck_after = 0 if place is None else place.stuck_after
    if stuck_after > 0:
        _watchdog.watch(stuck_after)
    if place is not None:
        return Processes(place.process, place.num_processes, place.attempt)
    return Processes(jax.process_index(), jax.process_count())


def _join(place: Place, join_timeout: float) -> None:
    if place.process == 0:
        _require_free(place.coordinator)
    _run.tell("joining")
    _start_jax(
        coordinator_address=place.coordinator,
        num_processes=place.num_processes,
        process_id=place.process,
        local_device_ids=_own_devices(place),
        cluster_detection_method="deactivate",
        coordinator_bind_address=place.coordinator if place.is_local else None,
        initialization_timeout=math.ceil(join_timeout),
        # Later than the launcher, which knows more.
        shutdown_timeout_seconds=_SHUTDOWN_TIMEOUT if place.grace is None else int(place.grace) + _AFTER_GRACE,
    )
    if place.is_local:
        jax_api.collect_at(place.host)
    _run.tell("joined")


def _join_as_scheduled(name: str, method: str | None, join_timeout: float) -> None:
    try:
        _start_jax(
            cluster_detection_method=method,
            initialization_timeout=math.ceil(join_timeout),
            shutdown_timeout_seconds=_SHUTDOWN_TIMEOUT,
        )
    except ValueError as error:  # it found nothing
        raise ProcessError(
            f"px.initialize: JAX cannot find the other processes by way of {name}: {error} Set what it needs (for "
            f"Kubernetes, pip install 'jax[k8s]'), or {_variables.COORDINATOR}, {_variables.NUM_PROCESSES} and "
            f"{_variables.PROCESS} by hand"
        ) from error


def _start_jax(**arguments: Any) -> None:
    try:
        jax.distributed.initialize(heartbeat_timeout_seconds=_HEARTBEAT_TIMEOUT, **arguments)
    except RuntimeError as error:
        if "before" not in str(error):
            raise
        raise ProcessError(
            "px.initialize: JAX has its devices already, without those of the other processes; call it before "
            "anything that makes an array or asks for jax.devices(), right after the imports"
        ) from None


def _own_devices(place: Place) -> list[int] | None:
    """Return which of the host's GPUs are this process's. Says nothing of CPUs."""
    if not place.is_local or place.num_processes == 1 or "JAX_LOCAL_DEVICE_IDS" in os.environ:
        return None
    each = int(os.environ.get("JAX_NUM_CPU_DEVICES", 1))
    return list(range(place.process * each, (place.process + 1) * each))


def _require_free(coordinator: str) -> None:
    """JAX would crash (SIGSEGV), or the others wait in vain, if the port were taken."""
    host, _, port = coordinator.rpartition(":")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    with socket.socket(family) as probe:
        # As JAX's coordinator does, and the launcher that keeps the port for it.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            probe.bind((host.strip("[]"), int(port)))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ProcessError(
                    f"px.initialize: port {port}, at which process 0 is to be found, is taken; "
                    f"write another one in {_variables.COORDINATOR}={coordinator}, in all processes"
                ) from None


def scheduler(variables: Mapping[str, str]) -> str | None:
    """Return which scheduler started several processes of which this is one; ``None`` if none did."""
    if all(name in variables for name in _SLURM):
        # A batch script runs once, whatever number of tasks the job has: the step has one.
        return "slurm" if _many(variables.get("SLURM_STEP_NUM_TASKS", variables["SLURM_NTASKS"])) else None
    if all(name in variables for name in _OPEN_MPI):
        return "ompi" if _many(variables["OMPI_COMM_WORLD_SIZE"]) else None
    if all(name in variables for name in _KUBERNETES):
        return "k8s"
    if any("," in variables.get(name, "") for name in _TPU_HOSTS):
        return "tpu"
    return None


def _many(number: str) -> bool:
    return number.isdigit() and int(number) > 1


def _ending(before: _Hook) -> _Hook:
    """Return an excepthook that does what the one before did, and ends the process."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            before(kind, error, trace)
        finally:
            _run.leave_raised(kind)

    return hook
