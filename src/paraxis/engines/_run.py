"""One call of an engine: what the host does around passes, loops that hold reductions included."""

import abc
import contextlib
import dataclasses
import functools
import tempfile
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._calls import arguments, pytrees
from paraxis._calls.surroundings import Reads
from paraxis.engines._flat import Scan, Step, Value
from paraxis.engines._job import Chunk, Cut, Job, Length, Part, Pieces, Rows, Saved, loaded, numpy_of, of_chunk, on_host
from paraxis.engines._journal import Journal
from paraxis.engines._padding import PaddingCountedError, Probe
from paraxis.engines._plan import Keep, Plan, operand_dims
from paraxis.engines._progress import Progress, Show, shown
from paraxis.engines._stage import Stage
from paraxis.engines._sums import Totals
from paraxis.errors import DataError, LoweringError

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclasses.dataclass(frozen=True)
class Pass:
    """A pass over the chunks that is to be run.

    Attributes:
        cuts: the program, cut, for elements of each length.
        level: which pass of it.
        number: of the pass in the whole run, from 0.
        shared: the values that it is given whole, for each length.
        folded, kept: which of what it gives are parts of reductions, and rows.
        kinds: how the parts are put together.
        spill: a folder for rows, for as long as the run goes on; ``None``: they are kept in memory.
        probe: a chunk that is to be run with other padding as well, if there is one.
    """

    job: Job
    chunks: Sequence[Chunk]
    cuts: dict[Length, Cut]
    level: int
    number: int
    shared: dict[Length, list[Any]]
    folded: Sequence[int]
    kept: Sequence[int]
    kinds: Sequence[str]
    spill: Path | None
    probe: Probe | None

    def stage(self, length: Length) -> Stage:
        return self.cuts[length].stage(self.level)

    def rows(self, at: int, which: Sequence[bool] | None = None) -> list[Any]:
        """Return the rows that the pass needs of a chunk, or some of them, in the host's memory."""
        chunk, read = self.chunks[at], dict[int, list[Any]]()
        cut = self.cuts[chunk.length]
        values = cut.stage(self.level).rows
        wanted = (v for v, is_wanted in zip(values, which or [True] * len(values), strict=True) if is_wanted)
        return [of_chunk(cut.rows[v], chunk, at, read) for v in wanted]


@dataclasses.dataclass(frozen=True)
class Block:
    """The results of consecutive chunks: parts of reductions, as in :class:`Totals`, and each one's rows.

    Their number is a power of two, and so many go before; only the last block may have fewer. ``is_checked``: one was
    run with other padding, and gave the same.
    """

    totals: list[list[Any] | None]
    rows: list[list[Any]]
    is_checked: bool = False


@dataclasses.dataclass(frozen=True)
class Passes:
    """The plan of a run; see :meth:`Stream.passes`.

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


@contextlib.contextmanager
def temporary() -> Generator[Path, None, None]:
    """Give a folder that is there for as long as a run."""
    with tempfile.TemporaryDirectory(prefix="paraxis-rows-") as folder:
        yield Path(folder)


class Engine(abc.ABC):
    """The common part of engines. Each says how large chunks are, and carries out passes."""

    keep: Keep
    folder: str | Path | None
    save_every: float
    verbose: bool | Callable[[Progress], Any]

    @abc.abstractmethod
    def _chunk_size(self, job: Job) -> int:
        """Return the number of elements in a chunk."""

    @abc.abstractmethod
    def _blocks(self, work: Pass, begin: int) -> Generator[Block, None, None]:
        """Yield what chunks give, from one on, in order."""

    def _job(self, who: str, fn: Callable[..., Any], args: Sequence[Any], known: dict[Any, Any] | None) -> Job:
        return Job(who, fn, args, self.keep, known)

    def _described(self) -> dict[str, Part]:
        """Return what a run depends on besides what it is of."""
        said = {"the engine": f"px.{self._name}", "JAX": jax.__version__}
        return {name: Part.of({name: (text, "")}) for name, text in said.items()}

    def _running(self) -> contextlib.AbstractContextManager[Path | None]:
        """Return what a run is done within, which gives a folder for rows, or none."""
        return contextlib.nullcontext()

    @property
    def _name(self) -> str:
        return type(self).__name__

    @property
    def _num_processes(self) -> int:
        """The number of processes that compile the programs that are run."""
        return 1

    def _started(
        self, method: str, fn: Callable[..., Any], args: Sequence[Any], known: dict[Any, Any] | None = None
    ) -> "Run":
        return Run(self, self._job(f"{self._name}.{method}", fn, args, known))

    def _require_options(self) -> None:
        """Refuse what is malformed, of the options that all engines have."""
        arguments.one_of(self._name, "keep", self.keep, ("recompute", "memory", "disk"))
        if not callable(self.verbose):
            arguments.flag(self._name, "verbose", self.verbose)
        if self.folder is not None:
            arguments.path(self._name, "folder", self.folder, write=f"px.{self._name}(at_once=64, folder='run')")
        write = f"px.{self._name}(at_once=64, folder='run', save_every=10)"
        arguments.number(self._name, "save_every", self.save_every, least=0, unit="seconds", write=write)
        if self.folder is None and self.save_every != type(self).save_every:
            write = f"px.{self._name}(…, folder='run', save_every={self.save_every!r})"
            arguments.of_no_use(self._name, "save_every", self.save_every, "folder", write)

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
            LoweringError: if elements meet elsewhere than in a reduction, or rows are counted that only fill up
                elements of different length; the message has the line.
            CollectiveError: if they exchange values otherwise than by ``psum``, ``pmean``, ``pmax`` and ``pmin``.
            AxisError: if it is not clear along which axis the elements are.
            DataError, ShapeError: if an element cannot be read, or does not look like the others; they name it.
            CheckpointError: if ``folder`` holds another run, or cannot be written.
        """
        arguments.function(
            f"{self._name}.run", "fn", fn, f"px.{self._name}(at_once=64).run(jax.grad(loss), w, clients)"
        )
        return self._started("run", fn, args).result()

    def jit(self, fn: Callable[_P, _R]) -> Callable[_P, _R]:
        """Return :meth:`run` of a function that is traced once for each type of arguments, as under ``jax.jit``.

        If something else that it reads has changed, it is traced anew.

        Example:
            >>> import jax, numpy as np, paraxis as px
            >>> @px.program(clients=100)
            ... def mean(x):
            ...     return px.reduce_mean(x)
            >>> streamed = px.Stream(at_once=8).jit(mean)
            >>> streamed(px.Groups.of_arrays(np.arange(100.0)))
            Array(49.5, dtype=float32)
        """
        arguments.function(f"{self._name}.jit", "fn", fn, f"px.{self._name}(at_once=64).jit(jax.grad(loss))")
        known: dict[Any, Any] = {}
        reads = Reads([fn])

        @functools.wraps(fn)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if kwargs:
                names = ", ".join(kwargs)
                raise TypeError(
                    f"{self._name}.jit: arguments must be given by position, got {names} by name; write "
                    f"px.{self._name}(at_once=64).jit(fn)({names})"
                )
            if reads.changed():
                known.clear()
            if not known:
                reads.begin()
            count = len(known)
            try:
                return self._started("jit", fn, args, known).result()
            finally:
                if len(known) != count:
                    reads.end()

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
        arguments.function(f"{self._name}.passes", "fn", fn, f"px.{self._name}(at_once=64).passes(loss, w, clients)")
        run = self._started("passes", fn, args)
        chunks = [(len(chunk.numbers), chunk.length) for chunk in run.chunks]
        cut = run.first
        kept = [tuple(n for d, n in enumerate(v.aval.shape) if d != cut.plan.dims[v]) for v in cut.plan.kept]
        padding = 1.0
        if run.job.ragged is not None and run.job.ragged.lengths is not None:
            padding = sum(count * (length or 0) for count, length in chunks) / max(1, int(run.job.ragged.lengths.sum()))
        return Passes(run.num_passes, run.job.axis.size, chunks, kept, padding)


_RunBody = Callable[[int, dict[Length, list[Any]]], dict[Length, list[Any]]]
"""Runs one of a loop's bodies with these arguments, for each length."""


class Run:
    """One call of an engine."""

    def __init__(self, engine: "Engine", job: Job) -> None:
        self.engine, self.job = engine, job
        self.chunks = job.chunks(engine._chunk_size(job))
        self.most_filled = job.most_filled(self.chunks)
        lengths = dict.fromkeys(chunk.length for chunk in self.chunks)
        self.cuts: dict[Length, Cut] = {length: job.cut(length) for length in lengths}
        self.first = next(iter(self.cuts.values()))
        self.num_passes = num_passes(self.first.plan)
        self.passes_done = 0
        self.journal: Journal | None = None
        self.told_at = time.monotonic()
        self.timed, self.seconds = 0, 0.0  # elements of all passes for which nothing was compiled, and what they took
        self.told: Show
        self.spill: Path | None = None

    def result(self) -> Any:
        engine = self.engine
        if engine.folder is not None:
            at_once = str(engine._chunk_size(self.job) // self.job.placement.num_devices)
            if (memory := getattr(engine, "memory", None)) is not None:
                at_once += f" by memory={memory}"
            described = {**engine._described(), **self.job.description(self.chunks, at_once)}
            self.journal = Journal(type(engine).__name__, Path(engine.folder), described, engine.save_every)
        try:
            with engine._running() as self.spill:
                return self._finished()
        finally:
            if self.journal is not None:
                self.journal.close()

    def _finished(self) -> Any:
        with shown(self.engine.verbose) as self.told:
            found = self.execute(self.cuts)[self.chunks[0].length]
        dims = [self.first.plan.dims[v] if isinstance(v, Value) else None for v in self.first.program.results]
        wholes: dict[int, Any] = {}
        for y, dim in zip(found, dims, strict=True):
            if dim is not None and id(y) not in wholes:
                wholes[id(y)] = self._whole(y, dim)
        leaves = [jnp.asarray(y) if dim is None else wholes[id(y)] for y, dim in zip(found, dims, strict=True)]
        if self.journal is not None:
            self.journal.clear()
        return pytrees.opened(jax.tree.unflatten(self.first.out_tree, leaves))

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
        kinds = [plan.folds[stage.gives[at]] for at in folded]
        found = self.journal.finished(self.passes_done) if self.journal else None
        probe = self._probe(cuts, level, [*folded, *kept])
        work = Pass(
            self.job, self.chunks, cuts, level, self.passes_done, shared, folded, kept, kinds, self.spill, probe
        )
        sums, pieces = found or self._carried_out(work)
        self.passes_done += 1
        for cut in cuts.values():
            gives = cut.stage(level).gives
            cut.rows.update((gives[at], one) for at, one in zip(kept, pieces, strict=True))
            cut.shared.update((gives[at], y) for at, y in zip(folded, sums, strict=True))

    def _carried_out(self, work: Pass) -> tuple[list[Any], list[Pieces]]:
        """Run a pass over all chunks, from where it was left; return the totals, and rows."""
        self._require_same_parts(work.cuts, work.level, work.folded)
        totals, pieces, journal = Totals(work.kinds), [Pieces() for _ in work.kept], self.journal
        at = journal.begun(work.number, totals, pieces) if journal else 0
        for one in pieces:
            weakref.finalize(one, _remove_files, one.parts)
        done = sum(len(chunk.numbers) for chunk in self.chunks[:at])
        reached = at, list(totals.held)  # one assignment: an interrupt comes before it or after it
        try:
            with contextlib.closing(self.engine._blocks(work, at)) as blocks:
                for block in blocks:
                    work.stage(self.chunks[at].length).is_checked |= block.is_checked
                    totals.join(block.totals)
                    for place, one in enumerate(pieces):
                        one.parts += [rows[place] for rows in block.rows]
                    ran = self.chunks[at : at + len(block.rows)]
                    done += sum(len(chunk.numbers) for chunk in ran)
                    at += len(block.rows)
                    reached = at, list(totals.held)
                    self._tell(work, ran, done)
                    if journal:
                        journal.part(work.number, at, totals, pieces)
        except PaddingCountedError as error:
            raise self._forgotten(work, *error.args) from None
        except (DataError, KeyboardInterrupt) as stopped:
            if journal:
                finished, totals.held = reached
                journal.part(work.number, finished, totals, pieces, now=True)
                stopped.add_note(f"{self.job.who}: saved in {str(self.engine.folder)!r}; the same call resumes there")
            raise
        sums = totals.result() if work.folded else []
        if journal:
            journal.finish(work.number, len(self.chunks), sums, pieces)
        return sums, pieces

    def _probe(self, cuts: dict[Length, Cut], level: int, gives: Sequence[int]) -> Probe | None:
        """Return what to look at to see whether a pass counts padding, unless that is known or would have effects."""
        if self.most_filled is None or self.job.ragged is None or self.job.ragged.lengths is None:
            return None
        chunk = self.chunks[self.most_filled]
        cut = cuts[chunk.length]
        stage = cut.stage(level)
        sources = [cut.rows[v] for v in stage.rows]
        filled = [isinstance(where, tuple) and where[0]._is_filled(where[1]) for where in sources]
        if stage.is_checked or stage.calling_back is not None or not any(filled):
            return None
        compared = [at for at in gives if _is_of_elements(at, stage, [each.stage(level) for each in cuts.values()])]
        return Probe(self.most_filled, self.job.ragged.lengths[chunk.numbers], filled, compared)

    def _forgotten(self, work: Pass, gives: int, rows: Sequence[int]) -> LoweringError:
        assert work.probe is not None
        length = self.chunks[work.probe.at].length
        cut, stage = work.cuts[length], work.stage(length)
        told = [self.job.told(cut.rows[stage.rows[at]]) for at in rows]
        (name, *_), leaves = dict.fromkeys(name for name, _ in told), ", ".join(leaf for _, leaf in told if leaf)
        return LoweringError(
            f"{self.job.who}: fn counts rows of {name} that only fill up its elements: what comes out at "
            f"{cut.plan.made[stage.gives[gives]].line} depends on what they hold{f', in {leaves}' if leaves else ''}. "
            f"Use the mask for all that is computed over an element's rows: jnp.mean(…, where={name}.mask), or "
            f"jnp.sum(jnp.where({name}.mask, …, 0)) / {name}.count"
        )

    def _require_same_parts(self, cuts: dict[Length, Cut], level: int, folded: Sequence[int]) -> None:
        given = [[cut.stage(level).gives[at] for at in folded] for cut in cuts.values()]
        for values in zip(*given, strict=True):
            if len({v.aval.shape for v in values}) > 1:
                line = next(iter(cuts.values())).plan.made[values[0]].line
                raise LoweringError(
                    f"{self.job.who}: values of which elements of different length have different numbers are "
                    f"reduced over the elements, at {line}; reduce them over an element's rows first, with its mask"
                )

    def _whole(self, rows: Rows, dim: int) -> Any:
        """Put a result's rows together, in the order of the elements; those of a pass are let go on the way."""
        whole, impl = np.empty(0), None
        for at, chunk in enumerate(self.chunks):
            part = of_chunk(rows, chunk, at, {})
            if isinstance(rows, Pieces):
                rows.parts[at] = None
            if jnp.issubdtype(part.dtype, jax.dtypes.extended):
                part, impl = jax.random.key_data(part), jax.random.key_impl(part)
            shape = (*part.shape[:dim], self.job.axis.size, *part.shape[dim + 1 :])
            if at == 0:
                whole = np.empty(shape, part.dtype)
            if shape != whole.shape:
                raise LoweringError(
                    f"{self.job.who}: fn returns values of which elements of different length have different numbers; "
                    f"reduce them over an element's rows, with its mask"
                )
            whole[(*[slice(None)] * dim, chunk.numbers)] = part
        return whole if impl is None else jax.random.wrap_key_data(jnp.asarray(whole), impl=impl)

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
        _require_same(some, [step.params.get("length") for step in steps.values()])
        if some.name == "while":
            for length, values in operands.items():
                dims = operand_dims(steps[length], loops[length])
                operands[length] = [self._as_rows(x, dim) for x, dim in zip(values, dims, strict=True)]
            results = self._while(some, operands, {length: of.out_dims for length, of in loops.items()}, run)
        else:
            results = (self._scan if some.name == "scan" else self._cond)(some, operands, run)
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
        whole = on_host(x)
        return Pieces([numpy_of(whole).take(whole, chunk.numbers, axis=dim) for chunk in self.chunks])

    def _cond(self, step: Step, operands: dict[Length, list[Any]], run: _RunBody) -> dict[Length, list[Any]]:
        _require_same(step, [values[0] for values in operands.values()])
        chosen = int(next(iter(operands.values()))[0])
        number = min(max(chosen, 0), len(step.params["branches"]) - 1)
        return run(number, {length: values[1:] for length, values in operands.items()})

    def _while(
        self, step: Step, operands: dict[Length, list[Any]], dims: dict[Length, list[int | None]], run: _RunBody
    ) -> dict[Length, list[Any]]:
        num_cond, num_body = step.params["cond_nconsts"], step.params["body_nconsts"]
        carry = {length: values[num_cond + num_body :] for length, values in operands.items()}
        while True:
            going = run(0, {length: [*values[:num_cond], *carry[length]] for length, values in operands.items()})
            _require_same(step, [goes for (goes,) in going.values()])
            goes = self._by_chunk(next(iter(going.values()))[0])  # under vmap, JAX stops each alone
            if not any(x.any() for x in goes):
                return carry
            fixed = {length: values[num_cond : num_cond + num_body] for length, values in operands.items()}
            found = run(1, {length: [*values, *carry[length]] for length, values in fixed.items()})
            if not all(x.all() for x in goes):
                found = {
                    length: [
                        self._chosen(goes, self._as_rows(new, dim), old)
                        for new, old, dim in zip(values, carry[length], dims[length], strict=True)
                    ]
                    for length, values in found.items()
                }
            carry = found

    def _by_chunk(self, x: Any) -> list[Any]:
        """Return what a value is for each chunk."""
        if not isinstance(x, (tuple, Pieces)):
            return [np.asarray(x)] * len(self.chunks)
        return [of_chunk(x, chunk, at, {}) for at, chunk in enumerate(self.chunks)]

    def _chosen(self, goes: Sequence[np.ndarray], new: Any, old: Any) -> Any:
        if not isinstance(new, (tuple, Pieces)):
            return _where(goes[0], new, old)
        return Pieces([_where(*parts) for parts in zip(goes, self._by_chunk(new), self._by_chunk(old), strict=True)])

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
        parts = ([of_chunk(item, chunk, at, {}) for item in items] for at, chunk in enumerate(self.chunks))
        return Pieces([numpy_of(steps[0]).stack(steps) for steps in parts])

    @functools.cached_property
    def _num_processes(self) -> int:
        return self.engine._num_processes  # a cluster is asked once

    def _tell(self, work: Pass, ran: Sequence[Chunk], done: int) -> None:
        """Tell that chunks were run. The first of a kind, on each process, took what their program took to compile."""
        size, passes, now = self.job.axis.size, self.num_passes, time.monotonic()
        kinds = {(chunk.length, len(chunk.numbers)) for chunk in ran}
        had_run = [work.stage(length).ran(count, self._num_processes) for length, count in kinds]
        if all(had_run):
            self.timed += sum(len(chunk.numbers) for chunk in ran)
            self.seconds += now - self.told_at
        self.told_at, left = now, None
        if passes is not None:
            to_do = (passes - self.passes_done) * size - done
            left = 0.0 if to_do == 0 else self.seconds / self.timed * to_do if self.timed else None
        self.told(Progress(self.job.axis.name, done, size, self.passes_done + 1, passes, left))


def _is_of_elements(at: int, stage: Stage, all_lengths: Sequence[Stage]) -> bool:
    """Return whether a result is one of elements, not of their rows, among which padding may show."""
    shapes = {each.gives[at].aval.shape for each in all_lengths}
    is_folded = stage.gives[at] in stage.plan.folds
    return is_folded or (len(shapes) == 1 and (len(all_lengths) > 1 or len(shapes.pop()) == 1))


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


def _require_same(step: Step, decides: Sequence[Any]) -> None:
    """Refuse a loop or branch, in which all elements meet, that goes on otherwise for those of another length."""
    first, *others = decides
    if isinstance(first, (tuple, Pieces)) or all(np.array_equal(first, x) for x in others):
        return
    raise LoweringError(
        f"elements of different length take other turns in a {step.name} in which all of them meet, at {step.line}: it "
        f"depends on the length to which they are filled up. Have all take the same ones, jax.lax.fori_loop(0, 100, "
        f"…), and let each use what it has, jnp.where(i < data.count, …, 0); or fill all up to one length, "
        f"px.Groups(…, num_shapes=1)"
    )


def _remove_files(parts: Sequence[Any]) -> None:
    """Remove the files of rows that nothing reads any more: those of a loop's earlier turns."""
    for part in parts:
        if isinstance(part, Saved):
            with contextlib.suppress(OSError):  # where a file that is mapped cannot be removed, it goes with the folder
                Path(part.path).unlink()


def _where(goes: np.ndarray, new: Any, old: Any) -> Any:
    return numpy_of(new).where(goes.reshape(goes.shape + (1,) * (new.ndim - goes.ndim)), new, old)


def _item(x: Any, number: int) -> Any:
    return Pieces([loaded(part)[number] for part in x.parts]) if isinstance(x, Pieces) else x[number]
