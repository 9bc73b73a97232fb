"""The elements of an axis streamed through one machine, in bounded memory."""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar, cast

import jax

from paraxis._core import check
from paraxis._core.placing import Axis
from paraxis._core.verbs import map_fn
from paraxis._host.digests import is_key
from paraxis.errors import DataError
from paraxis.streaming._groups import Groups
from paraxis.streaming._program import Call, Program
from paraxis.streaming._results import Each, Results
from paraxis.streaming._resume import Saved
from paraxis.streaming._run import Progress, Run, shown
from paraxis.streaming._tasks import Map

_P = ParamSpec("_P")
_R = TypeVar("_R")

_COPIES = 6  # of rows of a table: being read, put together, waiting, on their way to the devices, being computed with
_ENOUGH = 1 << 24  # bytes of them that are read at once: the memory of larger parts is new each time, and costs more


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


class Stream:
    """Runs a program over more elements than memory holds: chunk by chunk, on all devices of all processes.

    ``Stream(at_once=64).run(fn, *args)`` gives what ``fn(*args)`` gives, to rounding, where ``fn`` is a program, its
    gradient, or any other function built from the verbs. It is cut at its reductions; then the elements are read chunk
    by chunk, as often as reductions depend on each other (:meth:`passes` tells): a loss and its gradient take one pass.
    Sums are taken in a fixed tree: the same chunks give the same bits, whoever computes them. In several processes,
    each reads the elements of its own devices, and all have the result.

    Args:
        at_once: elements in flight per device; with ``map``, in each task at once. Give this or ``memory``.
        memory: bytes that a pass may take, on all devices together and for rows that are read ahead: an integer, or
            text such as ``"2GB"``. As many elements are run at once as fit; for that, passes are compiled for two
            sizes more. Values kept between passes, results with a row for each element, and what the process needs
            anyway are not counted.
        map: carries out the chunks elsewhere, on a CPU device each: a function with the signature of
            ``concurrent.futures.Executor.map``, such as that of a process pool, ``px.retrying(…)`` or
            ``px.ray_map()``. It gets compiled programs, and no code.
        checkpoint: the folder where a run saves what it has done, so that the same call goes on after it was stopped,
            to the same bits. It is made if it is not there, and goes when the run is done.
        progress: whether to show how far it is: below a notebook's cell, on a terminal's line, elsewhere a line every
            half minute; or a function to call with the :class:`px.streaming.Progress` of each chunk.
        lost: what to do with an element that raises, that cannot be read, or whose worker dies: ``"raise"`` its
            exception, which names it; or ``"mask"`` it, as ``where=`` does in every reduction of the program. Then its
            rows are masked in NumPy's masked arrays, :attr:`lost` says what it raised, and a warning tells of it. For a
            gradient of a mean, the run begins again without it.
        each: called with the numbers ``(n,)`` of elements and the rows ``(n, ...)`` of the result, as a pytree with
            ``None`` for what is no row, when a chunk is done. Then these are not kept, and ``None`` in the result. Each
            element comes once; after a run was killed, those come again that were done since it last saved; all do, if
            an element is lost in a later pass than the first, or of a mean's gradient.
        out: a folder of ``.npy`` files, into which rows of the result are written as they come, and which the result
            maps into memory: for results larger than that. Files are called by the result's keys, ``rows.npy`` if it
            has none. Not in several processes.

    Attributes:
        lost: after a run with ``lost="mask"``: a dict from the numbers of the elements left out to what each raised.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np, paraxis as px
        >>> @px.program(clients=1024)
        ... def loss(w, x):
        ...     return px.reduce_mean(px.map_fn(lambda w, x: jnp.sum((w - x) ** 2), (px.broadcast(w), x)))
        >>> clients = px.Groups.of_arrays(np.ones((1024, 3), np.float32))
        >>> px.Stream(at_once=16).run(jax.grad(loss), jnp.zeros(3), clients)
        Array([-2., -2., -2.], dtype=float32)
    """

    @check.renamed(folder="checkpoint", verbose="progress")
    def __init__(
        self,
        at_once: int | None = None,
        *,
        memory: int | str | None = None,
        map: Map | None = None,  # noqa: A002  the name that engines give it
        checkpoint: str | Path | None = None,
        progress: bool | Callable[[Progress], Any] = False,
        lost: Literal["raise", "mask"] = "raise",
        each: Each | None = None,
        out: str | Path | None = None,
    ) -> None:
        if (at_once is None) == (memory is None) or (map and memory):
            raise ValueError(f"Stream: give at_once or memory, not both, and with map at_once: {at_once=}, {memory=!r}")
        check.one_of("Stream", "lost", lost, ("raise", "mask"))
        self.at_once = None if at_once is None else check.count("Stream", "at_once", at_once)
        self.memory = None if memory is None else _bytes(memory)
        self._map, self._each, self._out = map, each, None if out is None else Path(out)
        self.checkpoint, self._progress = checkpoint, progress
        self._masks, self.lost = lost == "mask", dict[int, str]()

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
                elements of different length, with the line; or if the elements are along none or several axes.
            DataError: if an element cannot be read, or does not look like the others; they name it.
            CheckpointError: if ``checkpoint`` holds another run, or cannot be read or written.
            BlockingIOError: if another run is under way there.
            Exception: what an element raises, which a note names, with ``lost="raise"``.

        Communicates: in each pass one all-reduce the size of what is reduced, when its last chunk is done.
        """
        return self.jit(fn)(*args)

    def map(self, fn: Callable[..., Any], groups: Any, *more: Any) -> Any:
        """Return the results of a function for each of many elements, such as chains or solves: arrays ``(size, ...)``.

        ``groups`` and ``more`` are :class:`px.Groups`, or pytrees of arrays ``(size, ...)``: the function is given one
        element of each. ``lost``, ``each``, ``out``, ``checkpoint`` and ``progress`` are those of the stream.

        Example:
            >>> import numpy as np, paraxis as px
            >>> px.Stream(at_once=2).map(lambda x: x**2, np.arange(5.0)).tolist()
            [0.0, 1.0, 4.0, 9.0, 16.0]
        """
        has_keys = lambda x: any(map(is_key, jax.tree.leaves(x)))  # noqa: E731  # which are cut, and not read
        inputs = [x if has_keys(x) or isinstance(x, Groups) else Groups.of_arrays(x) for x in (groups, *more)]
        axis = Axis("elements", len(inputs[0]) if isinstance(inputs[0], Groups) else len(jax.tree.leaves(inputs[0])[0]))
        return self.run(lambda *xs: map_fn(fn, xs, axis), *inputs)

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
            program = known.get(call.key) or known.setdefault(call.key, self._program(call))
            for name, value in {"lost='mask'": self._masks, "out": self._out, "map": self._map}.items():
                if value and program.placement.spans_processes:
                    raise ValueError(f"Stream: {name} is for one process, and elements lie on {jax.process_count()}")
            results = Results(program.plan, program.whole(program.lengths), self._each, self._out)
            one = Run(call, program, self._count(call, program), self._map, results, masks=self._masks)
            with shown(self._progress) as show, self.saved(one.depends) as file:
                self.lost = one.lost
                return one.result(file, show)

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
        count, plan = self._count(call, program) * program.placement.num_devices, program.plan
        chunks = call.chunks(program.size, count)
        avals = program.whole(chunks[0].lengths).avals
        kept = [tuple(n for d, n in enumerate(avals[v].shape) if d != plan.dims[v]) for v in plan.kept]
        return Schedule(len(plan.passes), [(len(chunk.numbers), chunk.lengths) for chunk in chunks], kept)

    def _program(self, call: Call) -> Program:
        # On CPU, XLA puts matrix products and what is between them into a library's calls, of unknown memory.
        is_bounded_on_cpu = self.memory is not None and jax.default_backend() == "cpu"
        options = {"xla_cpu_experimental_ynn_fusion_type": ""} if is_bounded_on_cpu else None
        return Program(call, alone=self._map is not None, masks=self._masks, options=options)

    def _count(self, call: Call, program: Program) -> int:
        """Return the number of elements of a chunk on each device. What a pass needs grows linearly with it."""
        devices = program.placement.num_devices
        if self.at_once is not None:
            return program.traceable(_balanced(self.at_once, devices, program.size))
        lengths = call.chunks(program.size, program.size)[0].lengths
        two, four = (program.bytes_of(count, lengths) for count in (2, 4))
        each = max(1, (four - two) // 2)  # one element more on each device
        memory = self._at_least(two - each, f"for one element on each of {devices} devices")
        return _balanced(2 + (memory - two) // each, devices, program.size)

    def _at_least(self, least: int, what: str) -> int:
        assert self.memory is not None
        if self.memory < least:
            raise DataError(
                f"Stream: memory must be at least {least:,} bytes {what}, got {self.memory:,}; write "
                f"px.Stream(memory={2 * least})"
            )
        return self.memory

    def rows_at_once(self, *, row_bytes: int, kept_bytes: int, num_devices: int) -> int:
        """Return how many rows of a :class:`px.Table` a solver reads at once, which keeps so many bytes beside them."""
        if self._map is not None:
            raise ValueError("Stream: map is not for a px.Table, whose rows this process reads; leave it out")
        if self.at_once is not None:
            return self.at_once * num_devices
        least = kept_bytes + _COPIES * row_bytes * num_devices
        memory = self._at_least(least, f"for this table, of which {kept_bytes:,} are for values by row")
        count = (memory - kept_bytes) // (_COPIES * row_bytes)
        return max(num_devices, min(count, max(_ENOUGH, num_devices << 20) // row_bytes))

    @contextlib.contextmanager
    def rows_shown(self) -> Iterator[Callable[[int, int, int, int | None], None]]:
        """Give what a solver calls with the rows that are done, all, the pass's number, and how many it expects."""
        with shown(self._progress) as show:
            yield lambda *counts: show and show(Progress("rows", *counts, seconds_left=None))

    def saved(self, depends: Callable[[], Any]) -> contextlib.AbstractContextManager[Saved | None]:
        """Give where a run, which ``depends`` on a tree of texts and arrays, is saved, if there is a folder."""
        return contextlib.nullcontext() if self.checkpoint is None else Saved(self.checkpoint, depends())


def _balanced(most: int, devices: int, size: int) -> int:
    """Return how many elements each device takes at once, at most so many, in chunks of nearly equal size."""
    chunks = -(-size // (most * devices))
    return -(-size // (chunks * devices))


def _bytes(memory: int | str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([kmgt]?)(i?)b?", str(memory).strip().lower())
    if match is None:
        raise ValueError(f"Stream: memory must be bytes, or text such as '2GB', got {memory!r}")
    unit = (1024 if match[3] else 1000) ** " kmgt".index(match[2] or " ")
    return int(float(match[1]) * unit)
