"""``initialize``: join the other processes of a run."""

import atexit
import collections
import dataclasses
import functools
import os
import sys
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax

from paraxis._core import check
from paraxis._host import processes
from paraxis.errors import DeviceError
from paraxis.launch import _lost, _rank, _schedulers

COORDINATOR, ATTEMPT, GRACE = "PARAXIS_COORDINATOR", "PARAXIS_ATTEMPT", "PARAXIS_GRACE"
_State = TypeVar("_State")


@dataclasses.dataclass(frozen=True)
class Processes:
    """This process's number among the processes of a run.

    Attributes:
        process: the number of this process, from 0.
        num_processes: the number of processes.
        attempt: how often all ranks, or with ``--rejoin`` this one, were started before.

    Example:
        >>> import paraxis as px
        >>> px.initialize().num_processes
        1
    """

    process: int
    num_processes: int
    attempt: int = 0

    def fori_loop(self, lower: int, upper: int, body: Callable[[int, _State], _State], init: _State) -> _State:
        """Return the state after the turns ``lower`` to ``upper - 1``, as :func:`jax.lax.fori_loop`, run by Python.

        With ``px.initialize(lost="continue")``, a process that dies ends none of this: a turn in which it was lost is
        repeated on the devices of those that live, and one that comes back, as ``paraxis launch --rejoin`` has it,
        takes part with the newest state. The answer is that of an undisturbed run to rounding. Experimental, as what
        it is made of is in JAX. A job has one such loop, or one ``px.fit``, whose steps are turns.

        Args:
            lower, upper: the first turn, and the one after the last.
            body: ``body(i, state)`` → the state after turn ``i``. It gives all elements, in NumPy or from a file, to
                programs, maps and steps, without a mesh of its own: they run on the devices that are there. With a
                loader, a step is ``lambda i, state: step(state, next(data.batches(i)))[0]``. What it prints or writes
                may happen twice.
            init: any tree of arrays, keys and numbers, with the same shapes and dtypes in all processes. It begins as
                that of process 0.

        Raises:
            StateError: if a process has a part of the state only, or in a second loop with ``lost="continue"``.
            DeviceError: in the other processes, if ``body`` raises in one; or if no order of the CPU devices is left,
                of which each comeback takes one: six for three devices.

        Communicates: with ``lost="continue"``, two messages to process 0 a turn; at the beginning
            and whenever others take part, 400 bytes per device and one all-reduce of the state's bytes.

        Example:
            >>> import paraxis as px
            >>> px.initialize().fori_loop(0, 10, lambda i, state: state + i, 0)
            45
        """
        if processes.members is None:
            return functools.reduce(lambda state, i: body(i, state), range(lower, upper), init)
        last = collections.deque(processes.members.turns(lower, upper, body, init), maxlen=1)
        return last[0][1] if last else init


_initialized: Processes | None = None


def initialize(*, stuck_after: float = 0, lost: Literal["raise", "continue"] = "raise") -> Processes:
    """Join the other processes of a run, so that ``jax.devices()`` lists the devices of all of them.

    Call it first, before anything runs on a device. It finds the other processes by ``jax.distributed.initialize()``,
    if you have called that; by the variables of ``paraxis launch``, which you can also set by hand:
    ``PARAXIS_COORDINATOR``, which is the ``host:port`` of process 0, ``PARAXIS_NUM_PROCESSES`` and ``PARAXIS_PROCESS``;
    or by JAX's detection of clusters: SLURM, Open MPI, an indexed job of Kubernetes, a TPU. Otherwise the process is
    alone, and nothing is done.

    After this call, an uncaught exception ends the process at once; JAX alone would wait up to five minutes for the
    other processes, which wait for this one. A second call returns the result of the first.

    Args:
        stuck_after: seconds without a step of ``px.fit`` after which this process prints the stacks of its threads and
            exits with status 1, at least 600 before the first step; 0: never.
        lost: what becomes of the others when a process dies: ``"raise"``, they end; ``"continue"``, they go on with
            :meth:`Processes.fori_loop`. Process 0 must live. Experimental.

    Returns:
        The number of this process, and the number of processes.

    Raises:
        DeviceError: if a launcher that JAX does not know has started several processes; or if GPUs of a node would be
            idle, of which JAX gives one to each task of SLURM or Open MPI.
        RuntimeError: if JAX has already started its devices.

    Communicates: with the coordinator, process 0. If one process does not join within a minute, JAX ends the others.

    Example:
        >>> import paraxis as px
        >>> px.initialize()
        Processes(process=0, num_processes=1, attempt=0)
    """
    global _initialized
    if _initialized is None:
        check.one_of("px.initialize", "lost", lost, ("raise", "continue"), DeviceError)
        _initialized = _join(continues=lost == "continue")
        if jax.distributed.is_initialized():
            sys.excepthook = functools.partial(_rank.end_after, sys.excepthook)
        if processes.members is not None:
            atexit.register(_lost.leave)
        processes.watch(stuck_after)
    return _initialized


def _join(*, continues: bool) -> Processes:
    if not jax.distributed.is_initialized():
        is_launched = processes.is_launched()
        if not is_launched and not _detects_cluster():
            _schedulers.require_known()
            return Processes(0, 1)
        options: dict[str, Any] = {"heartbeat_timeout_seconds": _lost.HEARTBEAT} if continues else {}
        if continues:
            _lost.enable()
        if is_launched:
            return _join_launched(options)
        _schedulers.require_all_gpus()
        jax.distributed.initialize(**options)
    elif continues:
        raise DeviceError(
            "px.initialize(lost='continue'): leave out jax.distributed.initialize(), which ends all processes with one"
        )
    return Processes(jax.process_index(), jax.process_count())


def _join_launched(options: dict[str, Any]) -> Processes:
    variables = {ATTEMPT: "0", GRACE: "300", **os.environ}
    coordinator, grace = variables[COORDINATOR], float(variables[GRACE])
    numbers = [int(variables[name]) for name in (processes.PROCESS, processes.NUM_PROCESSES, ATTEMPT)]
    joined, is_local = Processes(*numbers), coordinator.startswith("127.0.0.1:")
    jax.distributed.initialize(
        coordinator,
        joined.num_processes,
        joined.process,
        cluster_detection_method="deactivate",
        coordinator_bind_address=coordinator if is_local else None,
        initialization_timeout=60,
        shutdown_timeout_seconds=max(1, round(grace)),
        **{"heartbeat_timeout_seconds": 30} | options,
    )
    if is_local:
        _collect_here()
    return joined


# --- parts of JAX that are not public, imported where they are used --------------------------------------------------


def _detects_cluster() -> bool:
    """Return whether ``jax.distributed.initialize()`` would find a scheduler that has started this process."""
    from jax._src import clusters

    return any(kind.is_env_present() for kind in clusters.ClusterEnv._cluster_types if not kind.opt_in_only_method)


def _collect_here() -> None:
    """Have CPU devices meet others' on this machine: JAX takes what the host's name resolves to."""
    from jax._src import distributed, xla_bridge

    def make() -> Any:
        client, gloo = distributed.global_state.client, xla_bridge._jax.make_gloo_tcp_collectives  # pyright: ignore
        return xla_bridge.make_cpu_client(gloo(distributed_client=client, hostname="127.0.0.1"))

    if jax.config.jax_cpu_collectives_implementation == "gloo":  # pyright: ignore[reportAttributeAccessIssue]
        xla_bridge.register_backend_factory("cpu", make, fail_quietly=False)
