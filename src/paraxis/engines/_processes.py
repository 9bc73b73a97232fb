"""Engines whose passes other processes carry out: what a pool and a cluster have in common."""

import abc
import contextlib
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from paraxis._axes import placing
from paraxis._host import threads
from paraxis._jax import jax_api
from paraxis.engines import _tasks
from paraxis.engines._groups import Groups
from paraxis.engines._job import Job
from paraxis.engines._run import Block, Engine, Pass
from paraxis.engines._tables import ENOUGH, OfTables
from paraxis.engines._tasks import Given, Task, Work
from paraxis.errors import DataError

TRIES = 3
"""The number of times that a task may end its process before it is examined."""


class ProcessEndedError(Exception):
    """A process ended while it did a task. The text says how."""


class Distributed(OfTables):
    """An engine that says how tasks are done."""

    at_once: int

    def rows_at_once(self, *, row_bytes: int, kept_bytes: int, num_devices: int) -> int:
        """Return how many rows go together: on each device here, as many as a process takes at once, or 16 MB."""
        self._require_for_tables(f"px.{self._name}(at_once={self.at_once})")
        return min(self.at_once, max(1, ENOUGH // row_bytes)) * num_devices

    def of_blocks(self, blocks: Any) -> "OfBlocks":
        """Return what carries out passes over a table's rows, of which ``blocks`` is a source, as for ``px.Groups``."""
        return OfBlocks(self, blocks)

    @abc.abstractmethod
    def _require_packages(self) -> None:
        """Import what is needed besides JAX: flatbuffers, with which JAX writes programs."""

    @abc.abstractmethod
    def _done(self, work: Work, tasks: Iterator[Task]) -> Generator[Given, None, None]:
        """Yield what tasks give, in their order; each is tried :data:`TRIES` times.

        Raises:
            TaskFailedError: with a task that ended its process each time.
        """

    @abc.abstractmethod
    def _attempt(self, work: Work, task: Task) -> Given:
        """Do one task, once.

        Raises:
            ProcessEndedError: if it ends its process.
        """

    def _chunk_size(self, job: Job) -> int:
        return self.at_once

    def _job(self, who: str, fn: Callable[..., Any], args: Sequence[Any], known: dict[Any, Any] | None) -> Job:
        self._require_packages()
        return Job(who, fn, args, self.keep, known, elsewhere=True)

    def _blocks(self, work: Pass, begin: int) -> Generator[Block, None, None]:
        with placing.without_context():
            sent = _tasks.work_of(work)
        gives = next(iter(work.cuts.values())).stage(work.level).gives
        avals = [gives[at].aval for at in work.folded]
        try:
            with contextlib.closing(self._done(sent, _tasks.tasks_of(work, sent, begin))) as done:
                for held, rows in done:
                    totals = [None if part is None else _typed(part, avals) for part in held.totals]
                    yield Block(totals, rows, held.is_checked)
        except TaskFailedError as error:
            raise self._named(work.job.groups, sent, error) from error

    def _named(self, groups: Sequence[Groups], work: Work, error: "TaskFailedError") -> DataError:
        """Return what to say of the element that ends its process, found by halves."""
        task, said = error.task, str(error)
        while len(_tasks.elements_of(task)) > 1:
            for half in _tasks.halves(task):
                try:
                    self._attempt(work, half)
                except ProcessEndedError as ended:
                    task, said = half, str(ended)
                    break
            else:
                break
        numbers = _tasks.elements_of(task)
        which, look = f"element {numbers[0]}", f"the element: groups[{numbers[0]}]"
        if len(numbers) > 1:
            which = f"one of elements {numbers[0]} to {numbers[-1]}"
        elif groups and isinstance(groups[0], _Blocks):
            which, look = groups[0].ids[numbers[0]], "them"
        return DataError(
            f"{self._name}: {which} ended each process that ran it, {TRIES} of them: {said}. If memory is short, give "
            f"a smaller at_once; else look at {look}"
        )


class OfBlocks(Engine):
    """An engine of which each element is a block of a table's rows; another one carries out the passes."""

    keep, folder, save_every, verbose = "recompute", None, 0.0, False

    def __init__(self, engine: Distributed, blocks: Any) -> None:
        self._engine = engine
        self._groups = _Blocks(blocks, ids=map(blocks.rows, range(len(blocks))))
        self._known: dict[Any, dict[Any, Any]] = {}

    def mapped(self, key: Any, fn: Callable[..., Any], args: Sequence[Any], show: Callable[[int], Any]) -> Any:
        """Return ``fn(X, *args)``, in which ``X`` stands for all blocks, each read where it is used.

        Args:
            key: the same for the same function, which is then not traced again.
            fn: maps along an axis of the blocks.
            show: is told how many blocks are done.
        """
        self.verbose = lambda progress: show(progress.done)
        return self._started("run", fn, [self._groups, *args], self._known.setdefault(key, {})).result()

    @property
    def _name(self) -> str:
        return self._engine._name

    @property
    def _num_processes(self) -> int:
        return self._engine._num_processes

    def _chunk_size(self, job: Job) -> int:
        return 1

    def _job(self, who: str, fn: Callable[..., Any], args: Sequence[Any], known: dict[Any, Any] | None) -> Job:
        return self._engine._job(who, fn, args, known)

    def _running(self) -> contextlib.AbstractContextManager[Any]:
        return self._engine._running()

    def _blocks(self, work: Pass, begin: int) -> Generator[Block, None, None]:
        return self._engine._blocks(work, begin)


class _Blocks(Groups):
    """Blocks of a table's rows. What is raised when one is read is the table's own: it names file and row."""

    def _element(self, number: int) -> Any:
        return self._as_arrays(self._source[number], number)

    @property
    def _together(self) -> int:
        return 1 << (max(1, self._source.together).bit_length() - 1)


class TaskFailedError(Exception):
    """A task ended its process as often as it was tried."""

    def __init__(self, task: Task, said: str) -> None:
        super().__init__(said)
        self.task = task


def environment() -> dict[str, str]:
    """Return the variables of a process that does tasks: it has one device and one thread, so that bits are alike."""
    return {"XLA_FLAGS": threads.not_simulating(os.environ), "JAX_PLATFORMS": "cpu", threads.VARIABLE: "1"}


def _typed(part: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    arrays = map(jnp.asarray, part)
    return [jax_api.weak(x) if aval.weak_type else x for x, aval in zip(arrays, avals, strict=True)]
