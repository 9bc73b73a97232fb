"""Chunks carried out by other processes, by programs that come as bytes, without any code of the user's."""

import functools
import pickle
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from paraxis.streaming._groups import Groups
from paraxis.streaming._program import Chunk, Lengths

Map = Callable[..., Iterable[Any]]  # with the signature of concurrent.futures.Executor.map

_MOST_SENT = 16 * 2**20  # bytes of a source that is sent with each task; of larger ones, rows are sent


class Work(NamedTuple):
    """What all tasks of a pass need: programs of chunks of so many ``rows``, by lengths and whether they have a mask.

    ``groups`` are read where a task is carried out; there are none if rows are read here.
    """

    programs: dict[tuple[Lengths, bool], bytes]
    shared: dict[Lengths, list[Any]]
    groups: list[Groups]
    rows: int
    wide: bool


class Task(NamedTuple):
    """A chunk, with the rows that are read here, or what was raised then."""

    chunk: Chunk
    masked: bool
    rows: list[Any] | Exception


def can_be_sent(groups: Groups) -> bool:
    """Return whether another process can read groups: they are small, and of a module that can be imported."""
    try:
        sent = pickle.dumps(groups, pickle.HIGHEST_PROTOCOL)
    except Exception:  # whatever a source's own pickling raises
        return False
    return len(sent) <= _MOST_SENT and b"__main__" not in sent


@functools.lru_cache(maxsize=64)
def _imported(program: bytes) -> Callable[..., Any]:
    return jax.jit(jax.export.deserialize(bytearray(program)).call)


def perform(work: Work, task: Task) -> list[np.ndarray] | Exception:
    """Carry out a chunk on the first CPU device; return what it comes to, or what an element has raised."""
    chunk, masked, rows = task
    if isinstance(rows, Exception):
        return rows
    try:
        with jax.enable_x64(work.wide), jax.default_device(jax.local_devices(backend="cpu")[0]):
            run = _imported(work.programs[chunk.lengths, masked])
            read = chunk.read(work.groups, rows, work.rows)
            real = [np.arange(work.rows) < len(chunk.numbers)] * masked
            return [*map(np.asarray, run(*work.shared[chunk.lengths], *read, *real))]
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # a process cannot send it to another
            return RuntimeError(f"{type(error).__name__}: {error}")
        return error
