"""Passes carried out by other processes: chunks, by programs that come as bytes, without any code of the user's.

A task has the numbers of some chunks' elements. Elements are read where the task is done, if their source can be sent;
else their rows are in the task.
"""

import dataclasses
import functools
import itertools
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from paraxis._core.check import needed
from paraxis.errors import LoweringError
from paraxis.streaming._groups import Groups
from paraxis.streaming._passes import Totals
from paraxis.streaming._program import Chunk, Lengths
from paraxis.streaming._resume import is_key, plain

Map = Callable[..., Iterable[Any]]
"""A function with the signature of ``concurrent.futures.Executor.map``."""

Result = tuple[list[list[Any] | None], list[list[Any]]]
"""Parts of reductions, as :class:`Totals` has them, and the rows of each chunk."""

_TASKS = 64
"""A pass is divided into at least so many tasks, if it has so many chunks, and into less than twice as many."""

_MOST_SENT = 16 * 2**20
"""Bytes of a source that is sent with each task; of larger ones, rows are sent."""

Task = list[tuple[Chunk, list[np.ndarray]]]
"""Chunks, with the rows that are not read where the task is done."""


@dataclasses.dataclass(frozen=True)
class Work:
    """What all tasks of a pass need.

    Attributes:
        programs: by the number of elements and their lengths.
        shared: the values that are given whole, by lengths.
        groups: those that are read where the task is done; ``None`` in place of others.
        reads: for each of the pass's rows, its groups and the leaf of their elements; ``None``: the task has them.
        kinds: how parts of reductions, the first results, are put together.
        wide: whether 64-bit numbers are in force.
    """

    programs: dict[tuple[int, Lengths], bytes]
    shared: dict[Lengths, list[np.ndarray]]
    groups: list[Groups | None]
    reads: list[tuple[int, int] | None]
    kinds: list[str]
    wide: bool


def ray_map(**options: Any) -> Map:
    """Return a ``map`` for :class:`px.Stream` that runs on a Ray cluster, as plain Ray tasks.

    Ray runs a task again when its worker or node is lost, ``max_retries`` times. The cluster is the one that this
    process has joined, else the one that ``RAY_ADDRESS`` names, else one that Ray starts on this machine.

    Args:
        **options: of ``ray.remote``, such as ``num_cpus``, ``max_retries``, ``runtime_env``.

    Raises:
        ModuleNotFoundError: if Ray is missing; the extra ``ray`` brings it.

    Example:
        >>> import paraxis as px
        >>> stream = px.Stream(at_once=16, map=px.ray_map(max_retries=5))
    """

    def mapped(fn: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[Any]:
        with needed("px.ray_map", "ray"):
            import ray
        if not ray.is_initialized():
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", r"os\.fork", RuntimeWarning)  # it starts programs, and nothing more
                ray.init()
        remote: Any = ray.remote(**options) if options else ray.remote
        call = remote(lambda task: fn(task))
        yield from map(ray.get, [call.remote(task) for task in tasks])

    return mapped


def exported(fn: Callable[..., Any], structs: Sequence[Any], line: Callable[[int], str]) -> bytes:
    """Return a pass as bytes; random keys come as their data.

    Raises:
        LoweringError: if it gives random keys.
    """
    for number, y in enumerate(jax.eval_shape(fn, *structs)):
        if is_key(y):
            raise LoweringError(
                f"random keys are kept between passes, or returned, from {line(number)}, which other processes cannot "
                f"give; make the keys where they are used: px.keys(key)"
            )

    def run(*args: Any) -> list[Any]:
        given = zip(args, structs, strict=True)
        return fn(*(jax.random.wrap_key_data(x, impl=s.dtype._impl.name) if is_key(s) else x for x, s in given))

    with needed("px.Stream(map=…)", "pool"):
        given = [jax.eval_shape(jax.random.key_data, s) if is_key(s) else s for s in structs]
        return bytes(jax.export.export(jax.jit(run), platforms=["cpu"])(*given).serialize())


def sendable(groups: Groups) -> Groups | None:
    """Return groups if another process can read them: they are small, and of a module that can be imported."""
    try:
        sent = pickle.dumps(groups, pickle.HIGHEST_PROTOCOL)
    except Exception:  # whatever a source's own pickling raises
        return None
    return None if len(sent) > _MOST_SENT or b"__main__" in sent else groups


def carried_out(
    mapped: Map, work: Work, chunks: Sequence[Any], rows: Callable[[int], list[Any]], begin: int
) -> Iterator[Result]:
    """Yield the results of tasks, in order; which chunks go together does not depend on who does them."""
    each = 1 << max(0, (len(chunks) // _TASKS).bit_length() - 1)

    def tasks() -> Iterator[Task]:
        for start in range(begin, len(chunks), each):
            yield [(chunks[at], rows(at)) for at in range(start, min(start + each, len(chunks)))]

    waiting, portion = tasks(), _TASKS // 2 if None in work.reads else len(chunks)
    while some := list(
        itertools.islice(waiting, portion)
    ):  # an executor takes all at once: those with rows in portions
        yield from mapped(functools.partial(perform, work), some)


@functools.lru_cache(maxsize=64)
def _imported(program: bytes) -> Callable[..., Any]:
    return jax.jit(jax.export.deserialize(bytearray(program)).call)


def perform(work: Work, task: Task) -> Result:
    """Do a task, on this process's first CPU device."""
    totals, rows = Totals(work.kinds), list[list[np.ndarray]]()
    with jax.enable_x64(work.wide), jax.default_device(jax.local_devices(backend="cpu")[0]):
        for chunk, sent in task:
            blob = work.programs[len(chunk.numbers), chunk.lengths]
            program = _imported(blob)
            given, read = iter(sent), dict[int, list[Any]]()
            for where in filter(None, work.reads):
                groups = work.groups[where[0]]
                if where[0] not in read and groups is not None:
                    read[where[0]] = jax.tree.leaves(groups._read(chunk.numbers, chunk.lengths[where[0]]))
            own = [plain(next(given)) if where is None else read[where[0]][where[1]] for where in work.reads]
            found = [np.asarray(y) for y in program(*work.shared[chunk.lengths], *own)]
            totals.add(found[: len(work.kinds)])
            rows.append(found[len(work.kinds) :])
        return [held and [np.asarray(x) for x in held] for held in totals.held], rows
