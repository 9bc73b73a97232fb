"""The elements of an axis streamed through one machine, in bounded memory."""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, Self, TypeVar, cast

import jax

from paraxis._core import check
from paraxis.errors import DataError
from paraxis.streaming._program import Call, Program
from paraxis.streaming._resume import Saved
from paraxis.streaming._run import Progress, Run, shown
from paraxis.streaming._tasks import Map

_P = ParamSpec("_P")
_R = TypeVar("_R")

_COPIES = 6  # of rows of a table: being read, put together, waiting, on their way to the devices, being computed with
_ENOUGH = 1 << 24
"""Bytes of rows of a table that are read at once; more only takes longer. The memory of parts up to 32 MB is used
again; that of larger ones is new each time, and its pages then cost more than reading (`bench_table.py`)."""


class Schedule(NamedTuple):
    """What :meth:`Stream.run` would do; see :meth:`Stream.passes`.

    Attributes:
        num_passes: how often each element is read.
        chunks: sizes of the chunks, each with the lengths to which the elements of each groups are padded.
        kept: shapes of one element's values that are kept between passes.
    """

    num_passes: int
    chunks: list[tuple[int, tuple[int | None, ...]]]
    kept: list[tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Stream:
    """Runs a program over more elements than memory holds: chunk by chunk, on all devices of this machine.

    ``Stream(at_once=64).run(fn, *args)`` gives what ``fn(*args)`` gives, to rounding, where ``fn`` is a program, its
    gradient, or any other function built from the verbs. It is traced for all elements and for a chunk, and cut at its
    reductions; then the elements are read chunk by chunk, as often as reductions depend on each other: a loss and its
    gradient take one pass, a loss of data that are normalised by their mean and deviation three. :meth:`passes` tells
    beforehand. Sums are taken in a fixed tree: the same chunks give the same bits, whoever computes them.

    Args:
        at_once: elements in flight per device; with ``map``, in each task at once. Give this or ``memory``.
        memory: bytes that a pass may take, on all devices together and for rows that are read ahead: an integer, or
            text such as ``"2GB"``. As many elements are run at once as fit; for that, passes are compiled for two
            sizes more. Values kept between passes, results with a row for each element, and what the process needs
            anyway are not counted.
        map: carries out the chunks elsewhere: a function with the signature of ``concurrent.futures.Executor.map``,
            such as that of a process pool, of loky, Dask or mpi4py; docs/streaming.md has one for Ray. It gets compiled
            programs, without any code of yours, and runs them on a CPU device each.
        folder: where a run saves what it has done, so that the same call goes on after it was stopped, to the same
            bits. It is made if it is not there, and goes when the run is done.
        verbose: whether to show how far it is: below a notebook's cell, on a terminal's line, elsewhere a line every
            half minute; or a function to call with the :class:`px.streaming.Progress` of each chunk.

    Raises:
        ValueError: if ``at_once`` or ``memory`` is no number of elements or bytes, or not one of them is given.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np, paraxis as px
        >>> @px.program(clients=1000)
        ... def loss(w, x):
        ...     return px.reduce_mean(px.map_fn(lambda w, x: jnp.sum((w - x) ** 2), (px.broadcast(w), x)))
        >>> clients = px.Groups.of_arrays(np.ones((1000, 3), np.float32))
        >>> px.Stream(at_once=16).run(jax.grad(loss), jnp.zeros(3), clients)
        Array([-2., -2., -2.], dtype=float32)
    """

    at_once: int | None = None
    _: dataclasses.KW_ONLY
    memory: int | str | None = None
    map: Map | None = None
    folder: str | Path | None = None
    verbose: bool | Callable[[Progress], Any] = False

    def __post_init__(self) -> None:
        if (self.at_once is None) == (self.memory is None) or (self.map and self.memory):
            raise ValueError(
                f"Stream: give at_once or memory, and not both, with map at_once, got at_once={self.at_once!r}, "
                f"memory={self.memory!r}; write px.Stream(at_once=64) or px.Stream(memory='2GB')"
            )
        if self.at_once is not None:
            object.__setattr__(self, "at_once", check.count("Stream", "at_once", self.at_once))
        elif (found := re.fullmatch(r"(\d+(?:\.\d+)?) *([kmgt]?)(i?)b?", str(self.memory).strip().lower())) is None:
            raise ValueError(f"Stream: memory must be bytes, or text such as '2GB', got {self.memory!r}")
        else:
            unit = (1024 if found[3] else 1000) ** " kmgt".index(found[2] or " ")
            object.__setattr__(self, "memory", int(float(found[1]) * unit))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, fn: Callable[..., _R], *args: Any) -> _R:
        """Return ``fn(*args)``, in which groups stand for arrays of all their elements.

        Args:
            fn: built from the verbs: a program, or its gradient, value and gradient, jvp, Hessian-vector product, and
                so on. It is traced at each call.
            *args: its arguments: :class:`px.Groups` for what is read chunk by chunk; everything else is shared.

        Returns:
            The function's result. What has a value per element is in NumPy arrays ``(size, ...)``.

        Raises:
            AxisError: if elements meet elsewhere than in a reduction, or a result depends on rows that only pad
                elements of different length; the message has the line.
            AxisError: if a mapped function exchanges values.
            AxisError: if it is not clear along which axis the elements are.
            DataError: if an element cannot be read, or does not look like the others; they name it.
            CheckpointError: if ``folder`` holds another run, or cannot be written.
        """
        return self.jit(fn)(*args)

    def jit(self, fn: Callable[_P, _R]) -> Callable[_P, _R]:
        """Return :meth:`run` of a function that is traced once for each type of arguments, as under ``jax.jit``.

        Example:
            >>> import jax, numpy as np, paraxis as px
            >>> @px.program(clients=100)
            ... def mean(x):
            ...     return px.reduce_mean(x)
            >>> streamed = px.Stream(at_once=8).jit(mean)
            >>> streamed(px.Groups.of_arrays(np.arange(100.0)))
            Array(49.5, dtype=float32)
        """
        known: dict[Any, Program] = {}

        @functools.wraps(fn)
        def run(*args: Any) -> _R:
            call = Call(fn, args)
            key = call.key
            if key not in known:
                known[key] = self._program(call)
            program = known[key]
            with shown(self.verbose) as show:
                one = Run(call, program, self._count(call, program), self.map, show)
                saved = None if self.folder is None else Saved(self.folder, one.depends())
                with saved or contextlib.nullcontext():
                    return one.result(saved)

        return cast("Callable[_P, _R]", run)

    def passes(self, fn: Callable[..., Any], *args: Any) -> Schedule:
        """Return what :meth:`run` would do: how many passes, in which chunks. Nothing is computed.

        Example:
            >>> import jax, numpy as np, paraxis as px
            >>> @px.program(clients=100)
            ... def spread(x):
            ...     return px.reduce_mean((x - px.reduce_mean(x)) ** 2)
            >>> px.Stream(at_once=8).passes(spread, px.Groups.of_arrays(np.ones(100))).num_passes
            2
        """
        call = Call(fn, args)
        program = self._program(call)
        chunks, plan = call.chunks(program.size, self._count(call, program)), program.plan
        avals = program.whole(call, chunks[0].lengths).avals
        kept = [tuple(n for d, n in enumerate(avals[v].shape) if d != plan.dims[v]) for v in plan.kept]
        return Schedule(len(plan.passes), [(len(chunk.numbers), chunk.lengths) for chunk in chunks], kept)

    def _program(self, call: Call) -> Program:
        # On CPU, XLA puts matrix products and what is between them into a library's calls, of unknown memory.
        without_calls = {"xla_cpu_experimental_ynn_fusion_type": ""} if jax.default_backend() == "cpu" else {}
        return Program(call, alone=self.map is not None, options=None if self.memory is None else without_calls)

    def _count(self, call: Call, program: Program) -> int:
        """Return the number of elements in a chunk."""
        if self.at_once is not None:
            return min(self.at_once * program.placement.num_devices, program.size)
        if program.fits is None:
            program.fits = self._fitting(call, program)
        return program.fits

    def _fitting(self, call: Call, program: Program) -> int:
        """Return how many elements fit into memory: what a pass needs grows linearly with them."""
        assert isinstance(self.memory, int)
        devices, lengths = program.placement.num_devices, call.chunks(program.size, program.size)[0].lengths
        least, more = (
            max(program.bytes_of(call, one, count * devices, lengths) for one in program.plan.passes)
            for count in (2, 4)
        )
        each = max(1, (more - least) // (2 * devices))
        count = 2 * devices + (self.memory - least) // each
        if count < devices:
            least -= each * devices
            raise ValueError(
                f"Stream: memory must be at least {least:,} bytes, which one element on each of {devices} devices "
                f"takes, got {self.memory:,}; write px.Stream(memory={2 * least})"
            )
        return min(count // devices * devices, program.size)

    # --- for solvers, which read a px.Table themselves -------------------------------------------------------------

    def rows_at_once(self, *, row_bytes: int, kept_bytes: int, num_devices: int) -> int:
        """Return how many rows of a :class:`px.Table` a solver reads at once, which keeps so many bytes beside them.

        Raises:
            DataError: if ``memory`` is too little.
            ValueError: if ``map`` is given: a solver reads its table in this process.
        """
        if self.map is not None:
            raise ValueError("Stream: map is not for a px.Table, whose rows this process reads; leave it out")
        if self.at_once is not None:
            return self.at_once * num_devices
        assert isinstance(self.memory, int)
        found = (self.memory - kept_bytes) // (_COPIES * row_bytes)
        if found < num_devices:
            least = kept_bytes + _COPIES * row_bytes * num_devices
            raise DataError(
                f"Stream: memory must be at least {least:,} bytes for this table, of which {kept_bytes:,} are for "
                f"values by row, got {self.memory:,}; write px.Stream(memory={2 * least})"
            )
        return max(num_devices, min(found, max(_ENOUGH, num_devices << 20) // row_bytes))

    @contextlib.contextmanager
    def rows_shown(self) -> Iterator[Callable[[int, int, int], None]]:
        """Give what a solver tells of its passes: the rows that are done, the number of all, and that of the pass."""
        with shown(self.verbose) as show:
            yield lambda done, rows, number: show and show(Progress("rows", done, rows, number, None, None))

    def rows_saved(self, described: Mapping[str, Any]) -> contextlib.AbstractContextManager[Saved | None]:
        """Give where a solver's run is saved, which depends on these texts and arrays, if there is a folder.

        Raises:
            CheckpointError: if the folder holds another run, or cannot be used.
        """
        if self.folder is None:
            return contextlib.nullcontext()
        return Saved(self.folder, (x if hasattr(x, "dtype") else str(x) for x in jax.tree.leaves(described)))
