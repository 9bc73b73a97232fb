"""Chunks carried out by other processes, by programs that come as bytes, without any code of the user's."""

import functools
import itertools
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from paraxis._core.check import needed
from paraxis.streaming._groups import Groups
from paraxis.streaming._program import Chunk, Lengths

Map = Callable[..., Iterable[Any]]
"""A function with the signature of ``concurrent.futures.Executor.map``."""

_MOST_SENT = 16 * 2**20  # bytes of a source that is sent with each task; of larger ones, rows are sent


class Work(NamedTuple):
    """What all tasks of a pass need; ``groups`` are those that are read where a task is carried out, else ``None``."""

    programs: dict[tuple[int, Lengths], bytes]
    shared: dict[Lengths, list[Any]]
    groups: list[Groups | None]
    wide: bool


def exported(fn: Callable[..., Any], structs: Sequence[Any]) -> bytes:
    """Return a pass as bytes, which any process with CPU devices can run."""
    with needed("px.Stream(map=…)", "pool"):
        return bytes(jax.export.export(jax.jit(fn), platforms=["cpu"])(*structs).serialize())


def can_be_sent(groups: Groups) -> bool:
    """Return whether another process can read groups: they are small, and of a module that can be imported."""
    try:
        sent = pickle.dumps(groups, pickle.HIGHEST_PROTOCOL)
    except Exception:  # whatever a source's own pickling raises
        return False
    return len(sent) <= _MOST_SENT and b"__main__" not in sent


def carried_out(mapped: Map, work: Work, tasks: Iterator[tuple[Chunk, list[Any]]]) -> Iterator[list[np.ndarray]]:
    """Yield the results of chunks, in order. An executor takes all at once: tasks with rows come in portions."""
    portion = 64 if None in work.groups else None
    while some := [*itertools.islice(tasks, portion)]:
        yield from mapped(functools.partial(perform, work), some)


@functools.lru_cache(maxsize=64)
def _imported(program: bytes) -> Callable[..., Any]:
    return jax.jit(jax.export.deserialize(bytearray(program)).call)


def perform(work: Work, task: tuple[Chunk, list[Any]]) -> list[np.ndarray]:
    """Carry out a chunk, of which the task has the rows that are not read here, on the first CPU device."""
    chunk, rows = task
    with jax.enable_x64(work.wide), jax.default_device(jax.local_devices(backend="cpu")[0]):
        run = _imported(work.programs[len(chunk.numbers), chunk.lengths])
        return [*map(np.asarray, run(*work.shared[chunk.lengths], *chunk.read(work.groups, rows)))]
