"""The elements of an axis streamed through one machine, in bounded memory."""

import collections
import concurrent.futures
import dataclasses
import functools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._calls import arguments, pytrees
from paraxis._core import arrays, dtypes, placing
from paraxis.engines._flat import Scan, Step, Value
from paraxis.engines._job import Chunk, Cut, Job, Length, Pieces, Rows
from paraxis.engines._journal import Journal
from paraxis.engines._plan import Plan
from paraxis.engines._progress import Progress, Show, shown
from paraxis.engines._stage import Stage
from paraxis.engines._sums import Totals
from paraxis.errors import DataError, LoweringError

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclasses.dataclass(frozen=True)
class Passes:
    """What a run will do; see :meth:`Stream.passes`.

    Attributes:
        num_passes: how often each element is read; ``None`` if that depends on values, as in a ``while`` loop.
        elements: how many there are.
        chunks: sizes of the chunks, with the length to which their elements are filled up.
        kept: shapes of one element's values that are kept between passes.
        padding: rows that are computed over rows that are real; 1.0 if all elements have the same shapes.
    """

    num_passes: int | None
    elements: int
    chunks: list[tuple[int, Length]]
    kept: list[tuple[int, ...]]
    padding: float


@dataclasses.dataclass(frozen=True)
class Stream:
    """An engine that runs a program's elements in turns on this machine: on all its devices, in bounded memory.

    ``Stream(at_once=64).run(fn, *args)`` gives what ``fn(*args)`` gives, to rounding, where ``fn`` is a program, its
    gradient, or any other function built from the verbs. It is traced for all elements and cut at its reductions;
    then the elements are read chunk by chunk, as often as reductions depend on each other: a loss and its gradient
    take one pass, a loss of data that are normalised by their mean and deviation three. :meth:`passes` tells
    beforehand.

    Args:
        at_once: elements in flight per device. Give this or ``memory``.
        memory: bytes that a pass may take, on all devices together and for rows that were read ahead: an integer, or
            text such as ``"2GB"``. As many elements are run at once as fit; for that, passes are compiled for two
            sizes more. Values kept between passes, results with a row for each element, and what the process needs
            anyway are not counted.
        keep: what becomes of values of elements that a later pass needs: ``"recompute"`` computes them again from
            the data, ``"memory"`` keeps them. What is compared with a maximum or minimum over the elements, and what
            has effects, is always kept, since computed again it might be another.
        readers: threads that read elements ahead.
        folder: where a run saves what it has done, so that the same call goes on after it was killed, to the same
            bits. It is made if it is not there, is for one run at a time, and goes when the run is done.
        save_every: seconds between two savings.
        verbose: whether to show how far it is: below a notebook's cell, on a terminal's line, elsewhere a line every
            half minute; or a function to call with the :class:`px.engines.Progress` of each chunk.

    Raises:
        ValueError: if an argument is malformed.

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
    keep: Literal["recompute", "memory"] = "recompute"
    readers: int = 2
    folder: str | Path | None = None
    save_every: float = 10.0
    verbose: bool | Callable[[Progress], Any] = False

    def __post_init__(self) -> None:
        if (self.at_once is None) == (self.memory is None):
            raise ValueError(
                f"Stream: at_once or memory must be given, and not both, got at_once={self.at_once!r}, "
                f"memory={self.memory!r}; write px.Stream(at_once=64) or px.Stream(memory='2GB')"
            )
        if self.at_once is not None:
            at_once = arguments.count("Stream", "at_once", self.at_once, write="px.Stream(at_once=64)")
            object.__setattr__(self, "at_once", at_once)
        else:
            object.__setattr__(self, "memory", _bytes(self.memory))
        readers = arguments.count("Stream", "readers", self.readers, write="px.Stream(at_once=64, readers=2)")
        object.__setattr__(self, "readers", readers)
        arguments.one_of("Stream", "keep", self.keep, ("recompute", "memory"))
        if not callable(self.verbose):
            arguments.flag("Stream", "verbose", self.verbose)
        if self.folder is not None:
            arguments.path("Stream", "folder", self.folder, write="px.Stream(at_once=64, folder='run')")
        write = "px.Stream(at_once=64, folder='run', save_every=10)"
        arguments.number("Stream", "save_every", self.save_every, least=0, unit="seconds", write=write)

    @arguments.named()
    def run(self, fn: Callable[..., _R], *args: Any) -> _R:
        """Return ``fn(*args)``, in which groups stand for arrays of all their elements.

        Args:
            fn: built from the verbs: a program, or its gradient, value and gradient, jvp, Hessian-vector product,
                several rounds of one, and so on. It is traced at each call.
            *args: its arguments. :class:`px.Groups` for what is read in turns; arrays ``(size, ...)`` that are used
                as elements' values are cut into chunks, too; everything else is shared.

        Returns:
            The function's result. What has a value per element is in NumPy arrays ``(size, ...)``.

        Raises:
            LoweringError: if elements meet elsewhere than in a reduction; the message has the line.
            CollectiveError: if they exchange values otherwise than by ``psum``, ``pmean``, ``pmax`` and ``pmin``.
            AxisError: if it is not clear along which axis the elements are.
            DataError, ShapeError: if an element cannot be read, or does not look like the others; they name it.
            CheckpointError: if ``folder`` holds another run, or cannot be written.
        """
        arguments.function("Stream.run", "fn", fn, "px.Stream(at_once=64).run(jax.grad(loss), w, clients)")
        return _Run(self, Job("Stream.run", fn, args, self.keep)).result()

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
        arguments.function("Stream.jit", "fn", fn, "px.Stream(at_once=64).jit(jax.grad(loss))")
        known: dict[Any, Any] = {}

        @functools.wraps(fn)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if kwargs:
                names = ", ".join(kwargs)
                raise TypeError(
                    f"Stream.jit: arguments must be given by position, got {names} by name; write "
                    f"px.Stream(at_once=64).jit(fn)({names})"
                )
            return _Run(self, Job("Stream.jit", fn, args, self.keep, known)).result()

        return run

    @arguments.named()
    def passes(self, fn: Callable[..., Any], *args: Any) -> Passes:
        """Return what :meth:`run` would do: how many passes, in which chunks. Nothing is computed.

        Example:
            >>> import jax, numpy as np, paraxis as px
            >>> @px.program(clients=100)
            ... def spread(x):
            ...     return px.reduce_mean((x - px.reduce_mean(x)) ** 2)
            >>> px.Stream(at_once=8).passes(spread, px.Groups.of_arrays(np.ones(100))).num_passes
            2
        """
        arguments.function("Stream.passes", "fn", fn, "px.Stream(at_once=64).passes(loss, w, clients)")
        run = _Run(self, Job("Stream.passes", fn, args, self.keep))
        chunks = [(len(chunk.numbers), chunk.length) for chunk in run.chunks]
        cut = run.first
        kept = [tuple(n for d, n in enumerate(v.aval.shape) if d != cut.plan.dims[v]) for v in cut.plan.kept]
        padding = 1.0
        if run.job.ragged is not None and run.job.ragged.lengths is not None:
            padding = sum(count * (length or 0) for count, length in chunks) / max(1, int(run.job.ragged.lengths.sum()))
        return Passes(run.num_passes, run.job.axis.size, chunks, kept, padding)


_RunBody = Callable[[int, dict[Length, list[Any]]], dict[Length, list[Any]]]
"""Runs one of a loop's bodies with these arguments, for each length."""


class _Run:
    """One call of an engine."""

    def __init__(self, engine: Stream, job: Job) -> None:
        self.engine, self.job = engine, job
        self.chunks = job.chunks(self._count())
        lengths = dict.fromkeys(chunk.length for chunk in self.chunks)
        self.cuts: dict[Length, Cut] = {length: job.cut(length) for length in lengths}
        self.first = next(iter(self.cuts.values()))
        self.num_passes = num_passes(self.first.plan)
        self.passes_done = 0
        self.journal: Journal | None = None
        self.began = time.monotonic()
        self.found = 0  # elements of all passes that an earlier run has done
        self.told: Show

    def result(self) -> Any:
        engine = self.engine
        if engine.folder is not None:
            described = self.job.description(self.chunks)
            self.journal = Journal(Path(engine.folder), described, engine.save_every)
        try:
            return self._finished()
        finally:
            if self.journal is not None:
                self.journal.close()

    def _finished(self) -> Any:
        with shown(self.engine.verbose) as self.told:
            found = self.execute(self.cuts)[self.chunks[0].length]
        dims = [self.first.plan.dims[v] if isinstance(v, Value) else None for v in self.first.program.results]
        leaves = [jnp.asarray(y) if dim is None else self._whole(y, dim) for y, dim in zip(found, dims, strict=True)]
        if self.journal is not None:
            self.journal.clear()
        return pytrees.opened(jax.tree.unflatten(self.first.out_tree, leaves))

    def _count(self) -> int:
        """Return the number of elements in a chunk."""
        engine, job = self.engine, self.job
        if engine.at_once is not None:
            return engine.at_once * job.placement.num_devices
        assert isinstance(engine.memory, int)
        return job.remembered(f"memory={engine.memory}", self._fitting)

    def _fitting(self) -> int:
        """Return how many elements fit into memory: what a pass needs grows linearly with them."""
        engine, job = self.engine, self.job
        assert isinstance(engine.memory, int)
        plan, devices = job.cut(job.longest).plan, job.placement.num_devices
        few, more = devices, 3 * devices
        ahead = engine.readers + 1

        def needed(count: int) -> int:
            stages = [Stage.of(one, level) for one in _plans(plan) for level in range(one.num_levels)]
            return max(s.bytes_for(count) + ahead * s.bytes_of_rows(count) for s in stages if not s.is_empty)

        least, later = needed(few), needed(more)
        each = max(1, (later - least) // (more - few))
        count = few + (engine.memory - least) // each
        if count < 1:
            raise ValueError(
                f"{job.who}: memory must be at least {least:,} bytes, which one element on each of {devices} devices "
                f"takes, got {engine.memory:,}; write px.Stream(memory={2 * least})"
            )
        return min(max(1, count // devices) * devices, job.axis.size)

    def execute(self, cuts: dict[Length, Cut]) -> dict[Length, list[Any]]:
        """Run a program that is cut for elements of each length; return its results for each."""
        plan = next(iter(cuts.values())).plan
        for level in range(plan.num_levels):
            next(iter(cuts.values())).act(level)
            if not Stage.of(plan, level).is_empty:
                self._pass(cuts, level)
            for step in plan.loops_at(level):
                number = plan.flat.steps.index(step)
                self._loop(cuts, {length: cut.program.steps[number] for length, cut in cuts.items()})
        self._align(cuts)
        return {length: cut.results for length, cut in cuts.items()}

    def _align(self, cuts: dict[Length, Cut]) -> None:
        """Have all lengths' programs know what the first does, where it is the same."""
        first, *others = cuts.values()
        for other in others:
            other.learn(first)

    # --- one pass ----------------------------------------------------------------------------------------------

    def _pass(self, cuts: dict[Length, Cut], level: int) -> None:
        first = next(iter(cuts.values()))
        shared: dict[Length, list[Any]] = {}
        for length, cut in cuts.items():
            if cut is not first:
                cut.learn(first)
            shared[length] = cut.know(cut.stage(level).shared)
        stage, plan = first.stage(level), first.plan
        folded = [at for at, v in enumerate(stage.gives) if v in plan.folds]
        kept = [at for at, v in enumerate(stage.gives) if v not in plan.folds and v not in first.rows]
        found = self.journal.finished(self.passes_done) if self.journal else None
        self.found += self.job.axis.size if found else 0
        sums, pieces = found or self._run(cuts, level, shared, folded, kept)
        self.passes_done += 1
        for cut in cuts.values():
            gives = cut.stage(level).gives
            cut.rows.update((gives[at], one) for at, one in zip(kept, pieces, strict=True))
            cut.shared.update((gives[at], y) for at, y in zip(folded, sums, strict=True))

    def _run(
        self,
        cuts: dict[Length, Cut],
        level: int,
        shared: dict[Length, list[Any]],
        folded: Sequence[int],
        kept: Sequence[int],
    ) -> tuple[list[Any], list[Pieces]]:
        """Run a pass over all chunks, from where it was left; return the totals, and rows."""
        first, journal, number = next(iter(cuts.values())), self.journal, self.passes_done
        gives = first.stage(level).gives
        self._require_same_parts(cuts, level, folded)
        totals, pieces = Totals([first.plan.folds[gives[at]] for at in folded]), [Pieces() for _ in kept]
        begin = journal.begun(number, totals, pieces) if journal else 0
        done, before = sum(len(chunk.numbers) for chunk in self.chunks[:begin]), None
        self.found += done
        reached = begin, list(totals.held)  # one assignment: an interrupt comes before it or after it
        try:
            for at, (chunk, rows) in enumerate(self._read(cuts, level, begin), begin):
                count, own = len(chunk.numbers), cuts[chunk.length].stage(level)
                run = own.compiled(shared[chunk.length], rows[:-1], count)
                found = arrays.ready(run(*arrays.ready([*shared[chunk.length], *rows])))
                totals.add([found[place] for place in folded])
                for place, one in zip(kept, pieces, strict=True):
                    one.parts.append(_on_host(found[place]))
                jax.block_until_ready(before)  # where work is sent ahead, one chunk computes, and one waits
                before = found
                done += count
                reached = at + 1, list(totals.held)
                self._tell(done)
                if journal:
                    journal.part(number, at + 1, totals, pieces)
        except (DataError, KeyboardInterrupt):
            if journal:
                finished, totals.held = reached
                journal.part(number, finished, totals, pieces, now=True)
            raise
        sums = totals.result() if folded else []
        if journal:
            journal.finish(number, len(self.chunks), sums, pieces)
        return sums, pieces

    def _require_same_parts(self, cuts: dict[Length, Cut], level: int, folded: Sequence[int]) -> None:
        given = [[cut.stage(level).gives[at] for at in folded] for cut in cuts.values()]
        for values in zip(*given, strict=True):
            if len({v.aval.shape for v in values}) > 1:
                line = next(iter(cuts.values())).plan.made[values[0]].line
                raise LoweringError(
                    f"{self.job.who}: values of which elements of different length have different numbers are "
                    f"reduced over the elements, at {line}; reduce them over an element's rows first, with its mask"
                )

    def _read(self, cuts: dict[Length, Cut], level: int, begin: int) -> Iterator[tuple[Chunk, list[Any]]]:
        """Yield the chunks with the rows that a pass needs of each, and their numbers, read ahead, on the devices."""
        wide = dtypes.is_wide()  # a thread does not see the width that is in force where it is started

        def rows_of(at: int) -> list[Any]:
            with jax.enable_x64(wide):
                return self._rows(cuts[self.chunks[at].length], level, at)

        waiting: collections.deque[Any] = collections.deque()
        with concurrent.futures.ThreadPoolExecutor(self.engine.readers, "paraxis-read") as pool:
            try:
                for at, chunk in enumerate(self.chunks[begin:], begin):
                    waiting.append((chunk, pool.submit(rows_of, at)))
                    if len(waiting) > self.engine.readers:
                        first, rows = waiting.popleft()
                        yield first, rows.result()
                while waiting:
                    first, rows = waiting.popleft()
                    yield first, rows.result()
            finally:
                for _, rows in waiting:
                    rows.cancel()

    def _rows(self, cut: Cut, level: int, at: int) -> list[Any]:
        read: dict[int, list[Any]] = {}
        placement = self.job.placement.holding(len(self.chunks[at].numbers))
        rows = [
            _laid(self._of_chunk(cut.rows[v], at, read), cut.plan.dims[v] or 0, placement)
            for v in cut.stage(level).rows
        ]
        return arrays.ready([*rows, jnp.asarray(self.chunks[at].numbers, jnp.int32)])

    def _of_chunk(self, rows: Rows, at: int, read: dict[int, list[Any]]) -> Any:
        """Return the rows of a chunk; ``read`` has the leaves of groups that were read for it."""
        chunk = self.chunks[at]
        if isinstance(rows, Pieces):
            return rows.parts[at]
        if not isinstance(rows, tuple):
            return _on_host(rows)[chunk.numbers]
        groups, leaf = rows
        if id(groups) not in read:
            length = chunk.length if groups.lengths is not None else None
            read[id(groups)] = jax.tree.leaves(groups._read(chunk.numbers, length))
        return read[id(groups)][leaf]

    def _whole(self, rows: Rows, dim: int) -> np.ndarray:
        """Put a result's rows together, in the order of the elements."""
        parts = [self._of_chunk(rows, at, {}) for at in range(len(self.chunks))]
        if len({np.shape(part)[:dim] + np.shape(part)[dim + 1 :] for part in parts}) > 1:
            raise LoweringError(
                f"{self.job.who}: fn returns values of which elements of different length have different numbers; "
                f"reduce them over an element's rows, with its mask"
            )
        order = np.argsort(np.concatenate([chunk.numbers for chunk in self.chunks]), kind="stable")
        module = _numpy_of(parts[0])
        return module.take(module.concatenate(parts, axis=dim), order, axis=dim)

    # --- loops around passes -----------------------------------------------------------------------------------

    def _loop(self, cuts: dict[Length, Cut], steps: dict[Length, Step]) -> None:
        self._align(cuts)
        loops = {length: cut.plan.loops[steps[length]] for length, cut in cuts.items()}
        operands = {length: [self._operand(cut, v) for v in steps[length].invars] for length, cut in cuts.items()}

        def run(number: int, args: dict[Length, list[Any]]) -> dict[Length, list[Any]]:
            inner = {}
            for length, of in loops.items():
                body, dims = of.bodies[number], of.in_dims[number]
                given = [self._as_rows(x, dim) for x, dim in zip(args[length], dims, strict=True)]
                inner[length] = Cut(body, dict(zip(body.flat.arguments, given, strict=True)))
            return self.execute(inner)

        some = next(iter(steps.values()))
        results = {"scan": self._scan, "while": self._while, "cond": self._cond}[some.name](some, operands, run)
        for length, cut in cuts.items():
            for v, y, dim in zip(steps[length].outvars, results[length], loops[length].out_dims, strict=True):
                if dim is None:
                    cut.shared[v] = y
                else:
                    cut.rows[v] = self._as_rows(y, dim)

    def _operand(self, cut: Cut, v: Any) -> Any:
        if not isinstance(v, Value):
            return jnp.asarray(v.val)
        return cut.know([v])[0] if cut.plan.dims[v] is None else cut.rows[v]

    def _as_rows(self, x: Any, dim: int | None) -> Any:
        """Return rows as they are, and a whole array, of which rows are needed, cut into those of the chunks."""
        if dim is None or isinstance(x, (tuple, Pieces)):
            return x
        whole = _on_host(x)
        return Pieces([_numpy_of(whole).take(whole, chunk.numbers, axis=dim) for chunk in self.chunks])

    def _cond(self, step: Step, operands: dict[Length, list[Any]], run: _RunBody) -> dict[Length, list[Any]]:
        chosen = int(next(iter(operands.values()))[0])
        number = min(max(chosen, 0), len(step.params["branches"]) - 1)
        return run(number, {length: values[1:] for length, values in operands.items()})

    def _while(self, step: Step, operands: dict[Length, list[Any]], run: _RunBody) -> dict[Length, list[Any]]:
        num_cond, num_body = step.params["cond_nconsts"], step.params["body_nconsts"]
        carry = {length: values[num_cond + num_body :] for length, values in operands.items()}
        while True:
            going = run(0, {length: [*values[:num_cond], *carry[length]] for length, values in operands.items()})
            if not bool(next(iter(going.values()))[0]):
                return carry
            fixed = {length: values[num_cond : num_cond + num_body] for length, values in operands.items()}
            carry = run(1, {length: [*values, *carry[length]] for length, values in fixed.items()})

    def _scan(self, step: Step, operands: dict[Length, list[Any]], run: _RunBody) -> dict[Length, list[Any]]:
        scans = {length: Scan.of(step, values) for length, values in operands.items()}
        carry = {length: scan.carry for length, scan in scans.items()}
        some = next(iter(scans.values()))
        stacks: dict[int, dict[Length, list[Any]]] = {}
        for number in some.numbers():
            args = {
                length: [*scan.fixed, *carry[length], *(_item(x, number) for x in scan.scanned)]
                for length, scan in scans.items()
            }
            found = run(0, args)
            carry = {length: values[: len(some.carry)] for length, values in found.items()}
            stacks[number] = {length: values[len(some.carry) :] for length, values in found.items()}
        empty = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in step.outvars if some.length == 0][len(some.carry) :]
        count = len(step.outvars) - len(some.carry)
        return {
            length: [
                *carry[length],
                *(empty or (self._stacked([stacks[n][length][at] for n in range(some.length)]) for at in range(count))),
            ]
            for length in scans
        }

    def _stacked(self, items: Sequence[Any]) -> Any:
        if not isinstance(items[0], (tuple, Pieces)):
            return jnp.stack(items)
        parts = ([self._of_chunk(item, at, {}) for item in items] for at in range(len(self.chunks)))
        return Pieces([_numpy_of(steps[0]).stack(steps) for steps in parts])

    def _tell(self, done: int) -> None:
        size, passes = self.job.axis.size, self.num_passes
        finished = self.passes_done * size + done
        per_element = (time.monotonic() - self.began) / max(1, finished - self.found)
        left = None if passes is None else per_element * (passes * size - finished)
        self.told(Progress(self.job.axis.name, done, size, self.passes_done + 1, passes, left))


def _plans(plan: Plan) -> Iterator[Plan]:
    """Yield a plan, and those of loops in it around passes."""
    yield plan
    for step, loop in plan.loops.items():
        if plan.kinds[step] == "loop":
            for body in loop.bodies:
                yield from _plans(body)


def num_passes(plan: Plan) -> int | None:
    """Return how often elements are read; ``None`` if that depends on values."""
    total = sum(not Stage.of(plan, level).is_empty for level in range(plan.num_levels))
    for level in range(plan.num_levels):
        for step in plan.loops_at(level):
            counts = [num_passes(body) for body in plan.loops[step].bodies]
            if step.name == "while" or None in counts or len(set(counts)) > 1:
                return None
            total += (counts[0] or 0) * (step.params["length"] if step.name == "scan" else 1)
    return total


def _item(x: Any, number: int) -> Any:
    return Pieces([part[number] for part in x.parts]) if isinstance(x, Pieces) else x[number]


_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def _bytes(memory: Any) -> int:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", memory.lower()) if isinstance(memory, str) else None
    if found is not None and found[2] in _UNITS:
        memory = int(float(found[1]) * _UNITS[found[2]])
    if isinstance(memory, bool) or not isinstance(memory, int) or memory < 1:
        raise ValueError(
            f"Stream: memory must be a number of bytes, or text such as '2GB', got {arguments.described(memory)}; "
            f"write px.Stream(memory='2GB')"
        )
    return memory


def _laid(rows: Any, dim: int, placement: placing.Placement) -> Any:
    """Lay rows over the devices, if they are in the first dimension and divide; else JAX does it."""
    target = arrays.sharding(placement, rows=True)
    if target is None or dim or jnp.issubdtype(rows.dtype, jax.dtypes.extended):
        return rows
    return arrays.put(rows, target)


def _on_host(rows: Any) -> Any:
    """Return rows in the host's memory. Random keys stay where they are."""
    return rows if jnp.issubdtype(rows.dtype, jax.dtypes.extended) else np.asarray(rows)


def _numpy_of(rows: Any) -> Any:
    return np if isinstance(rows, np.ndarray) else jnp
