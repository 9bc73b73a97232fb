"""The elements of an axis run by processes of this machine."""

import collections
import contextlib
import dataclasses
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from paraxis._calls import arguments
from paraxis._calls.extras import needed
from paraxis._host import threads
from paraxis.engines import _tasks
from paraxis.engines._plan import Keep
from paraxis.engines._processes import TRIES, Distributed, ProcessEndedError, TaskFailedError, environment
from paraxis.engines._progress import Progress
from paraxis.engines._run import temporary
from paraxis.engines._tasks import Given, Task, Work
from paraxis.errors import DataError, StateError

_SERVE = "from paraxis.engines._pool import serve; serve()"


@arguments.options(memory="at_once", readers="workers", num_workers="workers")
@dataclasses.dataclass(frozen=True)
class Pool(Distributed):
    """An engine that runs a program's elements in processes of this machine, each with one CPU device.

    It gives what :class:`px.Stream` gives. Use it where reading elements keeps Python busy, so that threads do not
    help, or where an element may take its process down: that is replaced, and what it did is done again. On this
    machine's accelerators, or with data in memory, ``px.Stream`` is faster.

    Passes are sent to the processes as compiled programs, without any code of yours. They read elements themselves
    where the source can be sent: files, memory-mapped arrays, objects of a module that can be imported. Others, such
    as arrays in memory, are read here and sent. Bits depend on ``at_once``, not on the number of processes.

    Solvers and estimators take it for a :class:`px.Table`: ``model.fit(table, engine=px.Pool(at_once=100_000))``.

    The processes start with the first run and end with :meth:`close`, with a ``with`` block, or with this process.
    One run at a time.

    Args:
        at_once: elements that a process computes at once; of a table, rows.
        workers: how many processes; default: the cores that this process may use.
        keep: as for ``px.Stream``; values that are kept are in temporary files.
        folder, save_every, verbose: as for ``px.Stream``.

    Raises:
        ValueError: if an argument is malformed.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np, paraxis as px
        >>> @px.program(clients=128)
        ... def loss(w, x):
        ...     return px.reduce_mean(px.map_fn(lambda w, x: jnp.sum((w - x) ** 2), (px.broadcast(w), x)))
        >>> with px.Pool(at_once=32, workers=1) as pool:
        ...     pool.run(jax.grad(loss), jnp.zeros(3), px.Groups.of_arrays(np.ones((128, 3), np.float32)))
        Array([-2., -2., -2.], dtype=float32)
    """

    at_once: int
    _: dataclasses.KW_ONLY
    workers: int | None = None
    keep: Keep = "recompute"
    folder: str | Path | None = None
    save_every: float = 10.0
    verbose: bool | Callable[[Progress], Any] = False
    _processes: "_Processes" = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        write = "px.Pool(at_once=16, workers=4)"
        object.__setattr__(self, "at_once", arguments.count("Pool", "at_once", self.at_once, write=write))
        workers = threads.num_cores() if self.workers is None else self.workers
        object.__setattr__(self, "workers", arguments.count("Pool", "workers", workers, write=write))
        self._require_options()
        object.__setattr__(self, "_processes", _Processes(self.workers or 1))

    def close(self) -> None:
        """End the processes. The next run starts others."""
        self._processes.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    @property
    def _num_processes(self) -> int:
        return self.workers or 1

    def _require_packages(self) -> None:
        with needed("px.Pool", "pool"):
            import flatbuffers as flatbuffers

    def _running(self) -> contextlib.AbstractContextManager[Path]:
        return self._processes.in_use()

    def _done(self, work: Work, tasks: Iterator[Task]) -> Generator[Given, None, None]:
        return self._processes.done(work, tasks)

    def _attempt(self, work: Work, task: Task) -> Given:
        return self._processes.attempt(work, task)


class _Processes:
    """Processes that wait for tasks, started when they are first needed, replaced when they end."""

    def __init__(self, count: int) -> None:
        self._all: list[_Process | None] = [None] * count
        self._lock = threading.Lock()
        weakref.finalize(self, _end, self._all)

    @contextlib.contextmanager
    def in_use(self) -> Generator[Path, None, None]:
        """Within, nobody else may use them; gives a folder for rows."""
        if not self._lock.acquire(blocking=False):
            raise StateError("Pool: it runs already, in another thread; give each thread a px.Pool of its own")
        try:
            with temporary() as folder:
                yield folder
        finally:
            self._lock.release()

    def done(self, work: Work, tasks: Iterator[Task]) -> Generator[Given, None, None]:
        """Yield what tasks give, in their order."""
        told = pickle.dumps(work, protocol=pickle.HIGHEST_PROTOCOL)
        again: collections.deque[tuple[int, Task]] = collections.deque()
        tries, given, yielded = collections.Counter[int](), dict[int, Given](), 0
        numbered = enumerate(tasks)
        try:
            while True:
                for process in self._idle():
                    ahead = len(given) + sum(p is not None and p.is_busy for p in self._all)
                    task = again.popleft() if again else next(numbered, None) if ahead < 4 * len(self._all) else None
                    if task is None:
                        break
                    process.start(told, task)
                busy = [p for p in self._all if p is not None and p.is_busy]
                for process in _first_of(busy):
                    number, task = process.task
                    try:
                        given[number] = process.result()
                    except ProcessEndedError as ended:
                        tries[number] += 1
                        self._drop(process)
                        if tries[number] == TRIES:
                            raise TaskFailedError(task, str(ended)) from ended
                        again.append((number, task))
                while yielded in given:
                    yield given.pop(yielded)
                    yielded += 1
                if not busy:
                    return
        finally:
            for process in self._all:
                if process is not None and process.is_busy:
                    self._drop(process)

    def attempt(self, work: Work, task: Task) -> Given:
        """Do one task, once."""
        told = pickle.dumps(work, protocol=pickle.HIGHEST_PROTOCOL)
        process = self._idle()[0]
        process.start(told, (0, task))
        try:
            return process.result()
        except ProcessEndedError:
            self._drop(process)
            raise

    def _idle(self) -> "list[_Process]":
        """Return those without a task. They start together: each takes a second before it reads what it is sent."""
        self._all[:] = [_Process() if process is None else process for process in self._all]
        return [process for process in self._all if process is not None and not process.is_busy]

    def _drop(self, process: "_Process") -> None:
        self._all[self._all.index(process)] = None
        process.stop()

    def close(self) -> None:
        _end(self._all)


def _end(processes: "list[_Process | None]") -> None:
    for process in processes:
        if process is not None:
            process.stop()
    processes[:] = [None] * len(processes)


def _first_of(busy: "list[_Process]") -> "list[_Process]":
    """Wait until one of these or more have something to say, and return them."""
    ready = wait([process.answers for process in busy]) if busy else []
    return [process for process in busy if process.answers in ready]


class _Process:
    """One process, and the task that it is at. It ends when this one does."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                **environment(),
                "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            },
            start_new_session=True,  # Ctrl-C is for who waits for it
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._asks = Connection(os.dup(self._process.stdin.fileno()), readable=False)
        self.answers = Connection(os.dup(self._process.stdout.fileno()), writable=False)
        self._process.stdin.close()
        self._process.stdout.close()
        self._told: bytes | None = None
        self._at: tuple[int, Task] | None = None

    @property
    def is_busy(self) -> bool:
        return self._at is not None

    @property
    def task(self) -> tuple[int, Task]:
        assert self._at is not None
        return self._at

    def start(self, told: bytes, task: tuple[int, Task]) -> None:
        """Have it do a task, and before, if it has not been told, know what all tasks of the pass need."""
        self._at = task
        with contextlib.suppress(BrokenPipeError):  # it has ended, which is seen when it is asked for the result
            if self._told is not told:
                self._asks.send_bytes(told)
                self._told = told
            self._asks.send(task[1])

    def result(self) -> Given:
        """Wait for what its task gives.

        Raises:
            ProcessEndedError: if it ended.
        """
        try:
            error, given = self.answers.recv()
        except (EOFError, ConnectionError):
            raise ProcessEndedError(self._how_it_ended()) from None
        self._at = None
        if error is not None:
            raise error
        return given

    def _how_it_ended(self) -> str:
        code = self._process.wait()
        if code >= 0:
            return f"it ended with exit code {code}"
        return f"it was killed by {signal.Signals(-code).name}" + (" (out of memory?)" if code == -9 else "")

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._asks.close()
        self.answers.close()


# --- in the process ----------------------------------------------------------------------------------------------


def serve() -> None:
    """Do tasks until nobody asks for any."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asks, answers = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
    os.dup2(2, 1)  # what is printed goes where errors go,
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # and who reads what is typed gets nothing
    work: Work | Exception = StateError("a task came before its pass")
    while True:
        try:
            message: Any = asks.recv()
        except EOFError:
            return
        except Exception as error:  # a source that cannot be made here
            work = DataError(f"Pool: groups cannot be read by another process: {type(error).__name__}: {error}")
            continue
        if isinstance(message, Work):
            work = message
            continue
        try:
            answers.send(_answer(work, message))
        except ConnectionError:  # who asked is gone
            return


def _answer(work: Work | Exception, task: Task) -> tuple[Exception | None, Given | None]:
    if isinstance(work, Exception):
        return work, None
    try:
        return None, _tasks.perform(work, task)
    except (KeyboardInterrupt, SystemExit) as error:  # of a source; Ctrl-C is not for this process
        return DataError(f"Pool: {type(error).__name__} was raised where an element was read"), None
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return error, None
