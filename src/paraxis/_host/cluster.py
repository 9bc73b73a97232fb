"""Tasks on a cluster, by a function with the signature of ``concurrent.futures.Executor.map``."""

import collections
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from paraxis._core.check import needed

_QUEUED = 256  # tasks that the cluster has at once


def ray_map(**options: Any) -> Callable[..., Iterable[Any]]:
    """Return a ``map`` for :class:`px.Stream` that carries out chunks as plain tasks of Ray, a bounded number at once.

    Ray runs a task again when its worker or node is lost. The cluster is the one that this process has joined, else the
    one that ``RAY_ADDRESS`` names, else one that Ray starts on this machine. ``options`` are those of ``ray.remote``.

    Example:
        >>> import paraxis as px
        >>> stream = px.Stream(at_once=16, map=px.ray_map(max_retries=5))
    """

    def mapped(fn: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[Any]:
        with needed("px.ray_map", "ray"):
            import ray

        shared, waiting = ray.put(fn), collections.deque[Any]()
        as_task: Any = ray.remote(**options) if options else ray.remote
        call = as_task(lambda fn, task: fn(task))
        for task in tasks:
            waiting.append(call.remote(shared, task))
            if len(waiting) == _QUEUED:
                yield ray.get(waiting.popleft())
        yield from map(ray.get, waiting)

    return mapped
