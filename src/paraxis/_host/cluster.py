"""Tasks elsewhere, by functions with the signature of ``concurrent.futures.Executor.map``."""

import collections
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future
from typing import Any

from paraxis._core.check import needed

_QUEUED = 256  # tasks that the cluster has at once


def ray_map(**options: Any) -> Callable[..., Iterable[Any]]:
    """Return a ``map`` for :class:`px.Stream` that carries out chunks as plain tasks of Ray, a bounded number at once.

    Ray runs a task again when its worker or node is lost, as often as ``max_retries`` says; then what it raises takes
    the place of the result, and :class:`px.Stream` raises or masks it. The cluster is the one that this process has
    joined, else the one that ``RAY_ADDRESS`` names, else one that Ray starts on this machine. ``options`` are those of
    ``ray.remote``.

    Example:
        >>> import paraxis as px
        >>> stream = px.Stream(at_once=16, map=px.ray_map(max_retries=5))
    """

    def mapped(fn: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[Any]:
        with needed("px.ray_map", "ray"):
            import ray
            from ray.exceptions import RayError

        def got(waiting: Any) -> Any:
            try:
                return ray.get(waiting)
            except RayError as error:
                return error

        shared, waiting = ray.put(fn), collections.deque[Any]()
        as_task: Any = ray.remote(**options) if options else ray.remote
        call = as_task(lambda fn, task: fn(task))
        for task in tasks:
            waiting.append(call.remote(shared, task))
            if len(waiting) == _QUEUED:
                yield got(waiting.popleft())
        yield from map(got, waiting)

    return mapped


def retrying(make_executor: Callable[[], Executor], *, attempts: int = 3) -> Callable[..., Iterable[Any]]:
    """Return a ``map`` for :class:`px.Stream` by a pool of processes, which runs tasks again that a worker died in.

    A pool that has lost a process is of no use: another one is made. Results that are there are kept; the first task
    that has none is run again by itself, so that it is known which one ends its worker, and then the others. After so
    many ``attempts``, the error takes the place of its result, and :class:`px.Stream` raises or masks it.

    Args:
        make_executor: gives a new :class:`concurrent.futures.Executor`. It is kept for later calls.
        attempts: how often a task is begun.

    Example:
        >>> import multiprocessing, concurrent.futures, paraxis as px
        >>> def pool():
        ...     context = multiprocessing.get_context("spawn")
        ...     return concurrent.futures.ProcessPoolExecutor(8, mp_context=context)
        >>> stream = px.Stream(at_once=16, map=px.retrying(pool))
    """
    executors = list[Executor]()

    def submitted(fn: Callable[[Any], Any], task: Any) -> Future[Any]:
        """Submit a task, to a new executor if there is none, or this one has broken."""
        try:
            executors[:] = executors or [make_executor()]
            return executors[0].submit(fn, task)
        except BrokenExecutor:
            executors.pop().shutdown()
            return submitted(fn, task)

    def mapped(fn: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[Any]:
        waiting = collections.deque((task, submitted(fn, task)) for task in tasks)
        while waiting:
            task, future = waiting.popleft()
            for _ in range(attempts - 1):
                if not isinstance(future.exception(), BrokenExecutor):
                    break
                future = submitted(fn, task)  # alone
            error = future.exception()
            yield error if isinstance(error, BrokenExecutor) else future.result()
            for at, (task, future) in enumerate(waiting):
                if future.done() and isinstance(future.exception(), BrokenExecutor):
                    waiting[at] = task, submitted(fn, task)

    return mapped
