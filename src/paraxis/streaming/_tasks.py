"""Passes carried out by other processes: chunks, by programs that come as bytes, without any code of the user's.

A task has the numbers of some chunks' elements. Elements are read where the task is done, if their source can be sent;
else their rows are in the task.
"""

import collections
import dataclasses
import functools
import hashlib
import itertools
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._calls.extras import needed
from paraxis._jax import jax_api, structure
from paraxis.errors import LoweringError
from paraxis.streaming._groups import Groups
from paraxis.streaming._program import Lengths
from paraxis.streaming._resume import plain
from paraxis.streaming._sums import Totals

Map = Callable[..., Iterable[Any]]
"""A function with the signature of ``concurrent.futures.Executor.map``."""

Result = tuple[list[list[np.ndarray] | None], list[list[np.ndarray]]]
"""Parts of reductions, as :class:`Totals` has them, and the rows of each chunk."""

_TASKS = 64
"""A pass is divided into at least so many tasks, if it has so many chunks, and into less than twice as many."""

_MOST_SENT = 16 * 2**20
"""Bytes of a source that is sent with each task; of larger ones, rows are sent."""

_programs: structure.Recent[Any] = structure.Recent(64)


@dataclasses.dataclass(frozen=True)
class Part:
    """A chunk of a task: its elements' numbers, their lengths, and rows that are not read where it is done."""

    numbers: np.ndarray
    lengths: Lengths
    rows: list[np.ndarray]


@dataclasses.dataclass(frozen=True)
class Work:
    """What all tasks of a pass need.

    Attributes:
        programs: by the number of elements and their lengths.
        shared: the values that are given whole, by lengths.
        sources: groups that are read where the task is done, each with its place among the call's groups.
        reads: for each of the pass's rows a source and a leaf of its elements; ``None``: the task has them.
        kinds: how parts of reductions, the first results, are put together.
        wide: whether 64-bit numbers are in force.
    """

    programs: dict[tuple[int, Lengths], bytes]
    shared: dict[Lengths, list[np.ndarray]]
    sources: list[tuple[Groups, int]]
    reads: list[tuple[int, int] | None]
    kinds: list[str]
    wide: bool

    @property
    def sends_rows(self) -> bool:
        return None in self.reads


def exported(fn: Callable[..., Any], structs: Sequence[Any], line: Callable[[int], str]) -> bytes:
    """Return a pass as bytes; random keys come as their data.

    Raises:
        LoweringError: if it gives random keys.
    """
    kinds = [str(jax.random.key_impl(jnp.zeros((), x.dtype))) if _is_key(x) else None for x in structs]
    given = [jax.eval_shape(jax.random.key_data, x) if _is_key(x) else x for x in structs]
    for number, y in enumerate(jax.eval_shape(fn, *structs)):
        if _is_key(y):
            raise LoweringError(
                f"random keys are kept between passes, or returned, from {line(number)}, which other processes cannot "
                f"give; make the keys where they are used: px.keys(key)"
            )

    def run(*args: Any) -> list[Any]:
        return fn(*(x if k is None else jax.random.wrap_key_data(x, impl=k) for x, k in zip(args, kinds, strict=True)))

    with needed("px.Stream(map=…)", "pool"):
        return jax_api.exported(run, given)


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.extended)


def can_be_sent(groups: Groups) -> bool:
    """Return whether another process can read groups: they are small, and of a module that can be imported."""
    try:
        sent = pickle.dumps(groups, pickle.HIGHEST_PROTOCOL)
    except Exception:  # whatever a source's own pickling raises
        return False
    return len(sent) <= _MOST_SENT and b"__main__" not in sent


def in_tasks(parts: Callable[[int], Part], begin: int, count: int) -> Iterator[list[Part]]:
    """Yield the chunks from ``begin`` on in tasks; which go together does not depend on who does them."""
    each = 1 << max(0, (count // _TASKS).bit_length() - 1)
    for start in range(begin, count, each):
        yield [parts(at) for at in range(start, min(start + each, count))]


def carried_out(mapped: Map, work: Work, tasks: Iterator[list[Part]]) -> Iterator[Result]:
    """Yield the results of tasks, in order. An executor takes all tasks at once: those with rows in portions."""
    run = functools.partial(perform, work)
    if not work.sends_rows:
        yield from mapped(run, tasks)
        return
    while portion := list(itertools.islice(tasks, _TASKS // 2)):
        yield from mapped(run, portion)


def perform(work: Work, task: list[Part]) -> Result:
    """Do a task, on this process's first CPU device."""
    totals, rows = Totals(work.kinds), list[list[np.ndarray]]()
    with jax.enable_x64(work.wide), jax.default_device(jax.local_devices(backend="cpu")[0]):
        for part in task:
            blob = work.programs[len(part.numbers), part.lengths]
            program = _programs.get(hashlib.sha256(blob).digest(), functools.partial(jax_api.imported, blob))
            found = [np.asarray(y) for y in program(*work.shared[part.lengths], *_rows(work, part))]
            totals.add(found[: len(work.kinds)])
            rows.append(found[len(work.kinds) :])
        return [None if held is None else [np.asarray(x) for x in held] for held in totals.held], rows


def _rows(work: Work, part: Part) -> list[Any]:
    sent = iter(part.rows)
    read = {
        at: jax.tree.leaves(work.sources[at][0]._read(part.numbers, part.lengths[work.sources[at][1]]))
        for at in {where[0] for where in work.reads if where is not None}
    }
    return [plain(next(sent)) if where is None else read[where[0]][where[1]] for where in work.reads]


def ray_map(**options: Any) -> Map:
    """Return a ``map`` for :class:`px.Stream` that runs on a Ray cluster, as plain Ray tasks.

    Ray runs a task again when its worker or node is lost, ``max_retries`` times. Twice as many tasks as the cluster has
    CPUs are under way at once.

    Args:
        **options: of ``ray.remote``, such as ``num_cpus``, ``max_retries``, ``runtime_env``.

    Raises:
        ModuleNotFoundError: if Ray is missing; the extra ``ray`` brings it.

    Example:
        >>> import paraxis as px
        >>> stream = px.Stream(at_once=16, map=px.ray_map(num_cpus=1))
    """

    def mapped(fn: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[Any]:
        with needed("px.ray_map", "ray"):
            import ray
        if not ray.is_initialized():
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", r"os\.fork", RuntimeWarning)  # it starts programs, and nothing more
                ray.init()
        call = ray.remote(_called) if not options else ray.remote(**options)(_called)
        given, most = ray.put(fn), 2 * max(1, int(ray.cluster_resources().get("CPU", 1)))
        running: collections.deque[Any] = collections.deque()
        try:
            for task in tasks:
                if len(running) == most:
                    yield ray.get(running.popleft())
                running.append(call.remote(given, task))
            while running:
                yield ray.get(running.popleft())
        finally:
            for task in running:
                ray.cancel(task)

    return mapped


def _called(fn: Callable[[Any], Any], task: Any) -> Any:
    return fn(task)
