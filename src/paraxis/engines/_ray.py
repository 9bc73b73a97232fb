"""The elements of an axis run on a Ray cluster."""

import collections
import contextlib
import dataclasses
import os
import warnings
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from paraxis._calls import arguments
from paraxis._calls.extras import needed
from paraxis._host import threads
from paraxis.engines import _tasks
from paraxis.engines._job import Elsewhere
from paraxis.engines._plan import Keep
from paraxis.engines._processes import TRIES, Distributed, ProcessEndedError, TaskFailedError, environment
from paraxis.engines._progress import Progress
from paraxis.engines._tasks import Given, Task, Work
from paraxis.errors import ParaxisError, ProcessError

_MOMENT = 2.0  # seconds


@arguments.options(memory="at_once")
@dataclasses.dataclass(frozen=True)
class Ray(Distributed):
    """An engine that runs a program's elements on a Ray cluster.

    It gives what :class:`px.Stream` gives, and does it as :class:`px.Pool` does, by Ray's processes: passes are sent
    as compiled programs; sources that can be sent are read by the workers, so their files must be where the workers
    are. Values that are kept between passes, and rows of results until the end, stay in Ray's object store. A worker
    that is lost is replaced by Ray, and its tasks are done again. If this process is lost, ``folder`` goes on. Solvers
    and estimators take it for a :class:`px.Table`.

    Args:
        at_once: elements that a task computes at once; of a table, rows.
        address: of a cluster, as for ``ray.init``; ``"auto"`` finds one that ``ray start`` has started here. Default:
            the one that this process has joined, or that ``RAY_ADDRESS`` names; if there is none, one is started on
            this machine, and ends with this process.
        ahead: tasks that are submitted before the first of them is done; default: four for each of Ray's CPUs.
        keep, folder, save_every, verbose: as for ``px.Stream``.

    Raises:
        ValueError: if an argument is malformed.
        ModuleNotFoundError: if Ray is missing, at the first run; the extra ``ray`` brings it.
        ProcessError: if the cluster cannot be reached, at the first run.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np, paraxis as px
        >>> @px.program(clients=128)
        ... def loss(w, x):
        ...     return px.reduce_mean(px.map_fn(lambda w, x: jnp.sum((w - x) ** 2), (px.broadcast(w), x)))
        >>> clients = px.Groups.of_arrays(np.ones((128, 3), np.float32))
        >>> px.Ray(at_once=32).run(jax.grad(loss), jnp.zeros(3), clients)
        Array([-2., -2., -2.], dtype=float32)
    """

    at_once: int
    _: dataclasses.KW_ONLY
    address: str | None = None
    ahead: int | None = None
    keep: Keep = "recompute"
    folder: str | Path | None = None
    save_every: float = 10.0
    verbose: bool | Callable[[Progress], Any] = False

    def __post_init__(self) -> None:
        write = "px.Ray(at_once=16)"
        object.__setattr__(self, "at_once", arguments.count("Ray", "at_once", self.at_once, write=write))
        if self.address is not None:
            arguments.text("Ray", "address", self.address, "px.Ray(at_once=16, address='auto')")
        if self.ahead is not None:
            arguments.count("Ray", "ahead", self.ahead, write="px.Ray(at_once=16, ahead=64)")
        self._require_options()

    def _require_packages(self) -> None:
        _ray()

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        ray = _ray()
        if not ray.is_initialized():
            _connect(ray, self.address)
        yield

    @property
    def _num_processes(self) -> int:
        return max(1, int(_ray().cluster_resources().get("CPU", 1)))

    def _done(self, work: Work, tasks: Iterator[Task]) -> Generator[Given, None, None]:
        ray = _ray()
        told, perform = ray.put(work), _remote(TRIES - 1)
        most = self.ahead or 4 * self._num_processes
        waiting: collections.deque[tuple[Task, Any, Any]] = collections.deque()
        try:
            for task in tasks:
                waiting.append((task, *perform.remote(told, task)))
                if len(waiting) == most:
                    yield _given(len(work.kept), *waiting[0])
                    waiting.popleft()
            while waiting:
                yield _given(len(work.kept), *waiting[0])
                waiting.popleft()
        finally:
            _end(ray, [held for _, held, _ in waiting])

    def _attempt(self, work: Work, task: Task) -> Given:
        ray = _ray()
        try:
            return _given(len(work.kept), task, *_remote(0).remote(ray.put(work), task))
        except TaskFailedError as error:
            raise ProcessEndedError(str(error)) from error


def _end(ray: Any, waiting: list[Any]) -> None:
    """Have Ray do none of these tasks any more.

    Those that are under way get a moment to end by themselves: Ray ends this process (``Tried to complete task that was
    not pending``) if it is to cancel a task that ends at the same time.
    """
    first = waiting[: int(ray.cluster_resources().get("CPU", 1))]
    for held in reversed(waiting[len(first) :]):
        ray.cancel(held, force=True)
    if first:
        _, left = ray.wait(first, num_returns=len(first), timeout=_MOMENT, fetch_local=False)
        for held in left:
            ray.cancel(held, force=True)


def _ray() -> Any:
    with needed("px.Ray", "ray", "or write px.Pool(at_once=16) for the processes of this machine"):
        import flatbuffers as flatbuffers
        import ray
        import ray.exceptions
    return ray


def _connect(ray: Any, address: str | None) -> None:
    """Join a cluster, or start one.

    Ray's own processes are other programs, started from this one: what JAX warns of forks does not concern them.
    """
    quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": True, "logging_level": "ERROR"}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            if address is not None or os.environ.get("RAY_ADDRESS"):
                ray.init(address=address, log_to_driver=True, logging_level="ERROR")
            else:
                # Ray remembers the address of the last one, and waits for minutes if that one is gone.
                ray.init(address="local", num_cpus=threads.num_cores(), _node_ip_address="127.0.0.1", **quiet)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ProcessError(
            f"Ray: the cluster at {address!r} cannot be reached: {error}; start one with `ray start --head`, or leave "
            f"address out to start one on this machine"
        ) from error


def _remote(retries: int) -> Any:
    """Return what Ray calls for a task. Its parts of reductions come back; its rows stay where they are."""
    ray = _ray()
    options = {"num_cpus": 1, "num_returns": 2, "max_retries": retries, "runtime_env": {"env_vars": environment()}}
    return ray.remote(**options)(_tasks.perform)


def _given(kept: int, task: Task, held: Any, rows: Any) -> Given:
    """Wait for what a task gives.

    Raises:
        TaskFailedError: if it ended each process that did it.
        ProcessError: if what did it was lost otherwise. To look for the element would lose more nodes.
    """
    numbers = _tasks.elements_of(task)
    held = _got(held, f"results of elements {numbers[0]} to {numbers[-1]}, after up to {TRIES} tries", task)
    return held, [[_Kept(rows, at, number) for number in range(kept)] for at in range(len(task.parts))]


def _got(reference: Any, what: str, task: Task | None = None) -> Any:
    ray = _ray()
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, ParaxisError) else error from None
    except ray.exceptions.RayError as error:
        has_ended = isinstance(error, (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError))
        if has_ended and task is not None:
            raise TaskFailedError(task, _briefly(error)) from error
        raise ProcessError(
            f"Ray: {what}, are lost: {_briefly(error)}; `ray list nodes` tells which nodes are there; with "
            f"px.Ray(..., folder='runs/one') the next run goes on where this one was"
        ) from error


def _briefly(error: Exception) -> str:
    return str(error).strip().splitlines()[0].partition(". ")[0].rstrip(".")


@dataclasses.dataclass(frozen=True)
class _Kept(Elsewhere):
    """Rows in Ray's store: those of a chunk of a task, and which."""

    rows: Any
    chunk: int
    number: int

    def load(self) -> np.ndarray:
        return _got(self.rows, "values kept between passes, or rows of results")[self.chunk][self.number]
