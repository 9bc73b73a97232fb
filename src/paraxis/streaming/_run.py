"""One call of a stream: pass after pass, and in each, chunk after chunk: read, compute, add.

A chunk's program sends nothing: each device has the sums of its own elements, which meet when the pass is over. So an
element that raises is an exception, in this process or in a worker; it is sought by running parts of its chunk.
"""

import contextlib
import functools
import itertools
import json
import re
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import BrokenExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from paraxis._core import arrays, jax_api
from paraxis._host import reading
from paraxis._host.digests import is_key
from paraxis._host.progress import Display
from paraxis.errors import AxisError, DataError
from paraxis.streaming import _padding, _tasks
from paraxis.streaming._passes import Pass, add, met, total
from paraxis.streaming._program import READERS, Call, Chunk, Leaf, Lengths, Program
from paraxis.streaming._results import Results
from paraxis.streaming._resume import Saved
from paraxis.streaming._tasks import Map


class Progress(NamedTuple):
    """The progress of a run.

    Attributes:
        axis: the name of the axis that is streamed.
        done, elements: elements of this pass that are done, and of all.
        pass_number, passes: the pass under way, from 1, and how many there are; of a solver's, how many it expects by
            how its error has fallen, or ``None``.
        seconds_left: in all passes; ``None``: it is not known.
        per_second: elements; ``None``: it is not known, as after the first chunk, which waited for the compiler.
        lost: how many elements were left out, as they raised.
    """

    axis: str
    done: int
    elements: int
    pass_number: int
    passes: int | None
    seconds_left: float | None
    per_second: float | None = None
    lost: int = 0

    def __str__(self) -> str:
        of = "" if self.passes is None else f" of {self.passes}"
        rate = "" if self.per_second is None else f", {self.per_second:,.3g} a second"
        left = "" if self.seconds_left is None else f", {self.seconds_left:,.0f} s left"
        lost = f", {self.lost:,} lost" if self.lost else ""
        return f"pass {self.pass_number}{of}: {self.done:,} of {self.elements:,} {self.axis}{rate}{left}{lost}"


_MOST_TASKS = 64  # that an executor has at once, if they have rows: it takes all that there are

Show = Callable[[Progress], Any]


@contextlib.contextmanager
def shown(progress: bool | Show) -> Iterator[Show | None]:
    """Give what to call with each progress, if anything."""
    if not progress or callable(progress):
        yield progress or None
    else:
        with contextlib.closing(Display()) as display:
            yield lambda progress: display.show(progress.__str__, progress.done, progress.elements)


def _caught(fn: Callable[..., Any], *args: Any) -> Any:
    """Return what a function returns, or the exception that an element has raised in it."""
    try:
        return fn(*args)
    except AxisError:  # it is the program's, and not an element's
        raise
    except Exception as error:
        return error


class Run:
    """One call of a stream, in chunks of ``count`` elements on each device, which ``mapped`` may carry out elsewhere.

    Attributes:
        lost: what was said of elements that are left out, by number.
    """

    def __init__(
        self, call: Call, program: Program, count: int, mapped: Map | None, results: Results, *, masks: bool
    ) -> None:
        self._call, self._program, self._plan, self._map = call, program, program.plan, mapped
        self._count, self._places, self._results, self._masks = count, program.places(count), results, masks
        self._chunks = call.chunks(program.size, count * program.placement.num_devices)
        self.lost, self._is_stale = dict[int, str](), False
        self._values: dict[Lengths, dict[int, Any]] = {}  # known values, and leaves of groups
        self._padded = self._padded_elements()
        compared = self._padded[2:] if self._padded else ()
        for lengths in dict.fromkeys([*(chunk.lengths for chunk in self._chunks), *compared]):
            known = dict(enumerate(call.values)) | program.whole(lengths).constants
            self._values[lengths] = self._laid(known | dict.fromkeys(self._plan.counts, np.int32(self._num_present)))
        self._began, self._ran = 0.0, 0

    @property
    def _num_present(self) -> int:
        return self._program.size - len(self.lost)

    def _laid(self, values: dict[int, Any]) -> dict[int, Any]:
        """Lay shared values over all devices, once: JAX would, at each chunk."""
        target = None if self._map else arrays.sharding(self._program.placement, ())
        shared = {v: x for v, x in values.items() if target is not None and self._plan.dims[v] is None}
        return values | arrays.device_put(shared, target)

    def depends(self) -> Any:
        """Return what the numbers of a run depend on."""
        groups = [(x[0], x.numbers, x.lengths) for x in self._call.groups]
        values = [x for x in self._call.values if not isinstance(x, Leaf)]
        chunks = [(chunk.numbers, chunk.lengths) for chunk in self._chunks]
        flats = [self._program.whole(lengths) for lengths in dict.fromkeys(chunk.lengths for chunk in self._chunks)]
        traced = [(re.sub(r" at 0x[0-9a-f]+", "", str(flat.closed.jaxpr)), flat.constants) for flat in flats]
        placement = self._program.placement
        processes = jax.process_count() if placement.spans_processes else 1
        return placement.num_devices, processes, jax_api.is_wide(), self._masks, groups, values, chunks, traced

    # --- passes ---------------------------------------------------------------------------------------------------

    def result(self, saved: Saved | None, show: Show | None) -> Any:
        """Run all passes; return the function's result."""
        self._saved, self._show = saved, show
        self._parts, begun = list[Any](), list[Any]()  # of each pass, what this process's devices have come to
        if saved and saved.state:
            self._parts, *begun, kept, texts = saved.state
            self._results.rows.update(((int(v), rows.shape), rows) for v, rows in kept)
            self._leave_out({int(n): text for n, text in json.loads(bytes(texts)).items()})
        while not self._run_passes(begun):
            self._parts, begun, self._is_stale = [], [], False
            if saved:
                saved.keep(None)  # what is on the disk is right, up to the loss
        returned = self._results.returned(self._values[self._chunks[0].lengths], sorted(self.lost), self._gathered)
        if self.lost:
            first, lines = min(self.lost), self.lost[min(self.lost)].splitlines()
            why = next((line for line in reversed(lines) if "Error: " in line), lines[0])
            warnings.warn(
                f"Stream: {len(self.lost)} of {self._program.size} {self._program.axis.name} are left out, as they "
                f"raised; stream.lost says what. Element {first}: {why}",
                stacklevel=4,
            )
        return returned

    def _run_passes(self, begun: Sequence[Any]) -> bool:
        """Run the passes; return whether their numbers are right: no element was lost that they have counted."""
        number, avals = 0, self._program.whole(self._program.lengths).avals
        for one in self._plan.steps:
            if one.is_once:
                for lengths, values in self._values.items():
                    run = self._program.compiled(one, self._program.size, lengths)
                    results = run(*[values[v] for v in one.shared])
                    values.update(self._laid(dict(zip(one.results, results, strict=True))))
                continue
            if number == len(self._parts):
                self._parts.append(self._pass(number, one, *begun))
                begun = []
            if self._is_stale:
                return False
            dtypes = tuple(avals[v].dtype for v in one.results[: len(one.kinds)])
            everywhere = arrays.sharding(self._program.placement, ())
            totals = met(one.kinds, dtypes, everywhere, [self._program.laid(x, 0, 1) for x in self._parts[number]])
            for values in self._values.values():
                values.update(zip(one.results, totals, strict=False))
            number += 1
        return True

    def _pass(self, number: int, one: Pass, done: Any = 0, held: Sequence[Any] = ()) -> list[Any]:
        """Return what the parts of a pass come to, of which some chunks are ``done``; its rows go to the results."""
        known = self._program.checked
        if self._padded and one not in known and _caught(self._check, one, *self._padded) is True:
            known.add(one)  # what raises does so again, below
        sums = [[int(rank), [self._program.laid(x, 0, 1) for x in parts]] for rank, parts in held]
        ats = [at for at in range(int(done), len(self._chunks)) if len(self._chunks[at].numbers)]
        with contextlib.closing(self._outcomes(one, ats)) as outcomes:
            for at, outcome in zip(ats, outcomes, strict=True):
                self._take(number, one, at, outcome, sums)
                if self._saved and not self._is_stale:
                    self._saved.keep(functools.partial(self._state, number, at + 1, [*sums], dict(self.lost)))
                if self._show:
                    self._show(self._progress(number, at + 1))
        return [self._program.local(x, 0) for x in total(sums, one.kinds)] if sums else []

    def _take(self, number: int, one: Pass, at: int, outcome: Any, sums: list[Any]) -> None:
        """Take what a chunk has come to, or what it has raised."""
        if isinstance(outcome, Exception):
            outcome = self._without_failing(number, one, at, outcome)
        if outcome is None:  # all its elements are left out
            return
        chunk, count = self._chunks[at], len(one.kinds)
        add(sums, outcome[:count], one.kinds)
        if not self._is_stale:
            pairs = zip(one.results[count:], outcome[count:], strict=True)
            rows = {v: self._program.local(y, self._plan.dims[v] or 0) for v, y in pairs}
            numbers = chunk.numbers[self._places[self._places < len(chunk.numbers)]]
            self._results.take(one, numbers, rows, self._program.whole(chunk.lengths).avals)

    def _state(self, number: int, at: int, sums: Sequence[Any], lost: dict[int, str]) -> Any:
        """Return what passes gave, and what the one under way has come to with its first ``at`` chunks."""
        held = [[rank, [self._program.local(x, 0) for x in parts]] for rank, parts in sums]
        kept = [[v, x] for (v, _), x in self._results.rows.items() if not isinstance(x, np.memmap)]
        for x in self._results.rows.values():
            if isinstance(x, np.memmap):
                x.flush()
        return [self._parts[:number], at, held, kept, np.frombuffer(json.dumps(lost).encode(), np.uint8)]

    def _progress(self, number: int, at: int) -> Progress:
        size, passes = self._num_present, len(self._plan.passes)
        done = sum(len(chunk.numbers) for chunk in self._chunks[:at])
        self._ran += len(self._chunks[at - 1].numbers) if self._began else 0  # the first waits for the compiler
        self._began = self._began or time.monotonic()
        rate = self._ran / max(time.monotonic() - self._began, 1e-9) or None
        left = ((passes - number) * size - done) / rate if rate else None
        return Progress(self._program.axis.name, done, size, number + 1, passes, left, rate, len(self.lost))

    # --- chunks ---------------------------------------------------------------------------------------------------

    def _rows(self, one: Pass, at: int, where: np.ndarray) -> list[Any]:
        """Return the rows in these places of a chunk in the host's memory, random keys as they are; of groups, leaves.

        They are as many as this process's devices have; the last one is repeated.
        """
        chunk, operands = self._chunks[at], []
        numbers = arrays.repeat_last(chunk.numbers[where], len(self._places))
        for v in one.rows:
            x, dim = self._values[chunk.lengths].get(v), self._plan.dims[v] or 0
            if not isinstance(x, Leaf):
                if x is None:
                    x = np.moveaxis(self._results.of(v, self._program.whole(chunk.lengths).avals[v]), 0, dim)
                x = (x if is_key(x) else np.asarray(x))[(*[slice(None)] * dim, numbers)]
            operands.append(x)
        return operands

    def _mine(self, chunk: Chunk) -> np.ndarray:
        """Return the places of a chunk that this process reads; past the end, the last one stands in."""
        return np.unique(np.minimum(self._places, len(chunk.numbers) - 1))

    def _read(self, one: Pass, at: int, where: np.ndarray, lengths: Lengths) -> list[Any]:
        """Return the rows in these places of a chunk, and which are elements if not all are, laid over the devices."""
        rows, numbers = self._rows(one, at, where), self._chunks[at].numbers
        read = Chunk(numbers[where], lengths).read(self._call.groups, rows, len(self._places))
        dims = [self._plan.dims[v] or 0 for v in one.rows]
        laid = [self._program.laid(x, dim, self._count) for x, dim in zip(read, dims, strict=True)]
        real = self._places < len(numbers)
        return [*laid, self._program.laid(real, 0, self._count)] if self._is_short(at) else laid

    def _is_short(self, at: int) -> bool:
        return len(self._chunks[at].numbers) < self._count * self._program.placement.num_devices

    def _computed(self, one: Pass, lengths: Lengths, shared: Sequence[Any], rows: Sequence[Any]) -> list[Any]:
        run = self._program.compiled(one, self._count, lengths)
        return jax.block_until_ready(run(*shared, *rows))  # another one beside it would take as much memory

    def _shared(self, one: Pass, lengths: Lengths) -> list[Any]:
        return [self._values[lengths][v] for v in one.shared]

    def _gathered(self, rows: np.ndarray) -> np.ndarray:
        """Return the rows ``(size, ...)`` of all processes, from those of this one."""
        for chunk in self._chunks if self._program.placement.spans_processes else ():
            local = rows[chunk.numbers[np.minimum(self._places, len(chunk.numbers) - 1)]]
            whole = arrays.local_copy(self._program.laid(local, 0, self._count))
            rows[chunk.numbers] = np.asarray(whole)[: len(chunk.numbers)]
        return rows

    def _outcomes(self, one: Pass, ats: Sequence[int]) -> Generator[Any, None, None]:
        """Yield what chunks come to, in order; an exception, where one has raised."""
        done = 0
        while done < len(ats):
            try:
                for outcome in self._carried_out(one, ats[done:]):
                    yield outcome
                    done += 1
                return
            except AxisError:
                raise
            except BrokenExecutor as error:
                error.add_note("Stream: the pool has lost a process; map=px.retrying(make_executor) makes another one")
                raise
            except Exception as error:  # of the engine's, which gives none of the chunks after this one
                yield error
                done += 1

    def _carried_out(self, one: Pass, ats: Sequence[int], where: np.ndarray | None = None) -> Iterator[Any]:
        """Yield what chunks come to, here or elsewhere; of one chunk, only the elements in these places."""
        return (self._here if self._map is None else self._elsewhere)(one, ats, where)

    def _here(self, one: Pass, ats: Sequence[int], where: np.ndarray | None) -> Iterator[Any]:
        wide = jax_api.is_wide()

        def read(at: int) -> Any:
            with jax.enable_x64(wide):  # a thread does not see the width that is in force where it is started
                places = self._mine(self._chunks[at]) if where is None else where
                return _caught(self._read, one, at, places, self._chunks[at].lengths)

        calls = (functools.partial(read, at) for at in ats)
        with contextlib.closing(reading.ahead(calls, READERS, READERS)) as ahead:
            for at, rows in zip(ats, ahead, strict=True):
                lengths = self._chunks[at].lengths
                failed = isinstance(rows, Exception)
                yield rows if failed else _caught(self._computed, one, lengths, self._shared(one, lengths), rows)

    def _elsewhere(self, one: Pass, ats: Sequence[int], where: np.ndarray | None) -> Iterator[Any]:
        assert self._map is not None
        groups = self._call.groups
        there = groups if all(map(_tasks.can_be_sent, groups)) else []
        keys = {(self._chunks[at].lengths, self._is_short(at)) for at in ats}
        programs = {key: self._program.exported(one, self._count, *key) for key in keys}
        shared = {lengths: self._shared(one, lengths) for lengths, _ in programs}

        def task(at: int) -> _tasks.Task:
            places = self._mine(self._chunks[at]) if where is None else where
            chunk = self._chunks[at]._replace(numbers=self._chunks[at].numbers[places])
            rows = self._rows(one, at, places)
            read = rows if there else _caught(chunk.read, groups, rows, self._count)
            return _tasks.Task(chunk, self._is_short(at), read)

        work = _tasks.Work(programs, shared, there, self._count, jax_api.is_wide())
        tasks = map(task, ats)
        while some := [*itertools.islice(tasks, None if there else _MOST_TASKS)]:
            yield from self._map(functools.partial(_tasks.perform, work), some)

    # --- elements that fail ---------------------------------------------------------------------------------------

    def _without_failing(self, number: int, one: Pass, at: int, error: Exception) -> Any:
        """Return what a chunk comes to without the elements that raise; ``None``: all do. Or raise, and name one."""
        chunk, axis = self._chunks[at], self._program.axis.name
        numbers = chunk.numbers[self._mine(chunk)]
        among = f"elements {min(numbers)} to {max(numbers)} of {axis}" if len(numbers) > 1 else f"of {axis}"
        error.add_note(f"Stream: raised by {among}, in pass {number + 1}")
        if self._program.placement.spans_processes or (isinstance(error, DataError) and not self._masks):
            raise error
        failing = self._failing(one, at, np.arange(len(chunk.numbers)), error)
        if not self._masks:
            place, cause = next(failing, (0, error))
            if cause is not error:
                cause.add_note(f"Stream: raised by element {chunk.numbers[place]} alone; {among} were run together")
            raise cause
        if errors := dict(failing):
            self._leave_out({int(chunk.numbers[place]): f"{type(e).__name__}: {e}" for place, e in errors.items()})
            self._is_stale = self._is_stale or number > 0 or self._plan.counts_at_once
        if not self._num_present:
            raise error
        chunk = self._chunks[at]
        outcome = _caught(next, self._carried_out(one, [at])) if len(chunk.numbers) else None
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _failing(self, one: Pass, at: int, where: np.ndarray, error: Exception) -> Iterator[tuple[int, Exception]]:
        """Yield which elements in these places of a chunk, which have raised together, raise by themselves."""
        if len(where) == 1:
            yield int(where[0]), error
            return
        for half in np.array_split(where, 2):
            outcome = _caught(next, self._carried_out(one, [at], half))
            if isinstance(outcome, Exception):
                yield from self._failing(one, at, half, outcome)

    def _leave_out(self, reasons: dict[int, str]) -> None:
        self.lost |= reasons
        for at, chunk in enumerate(self._chunks):
            self._chunks[at] = chunk._replace(numbers=chunk.numbers[~np.isin(chunk.numbers, [*reasons])])
        for values in self._values.values():
            values.update(self._laid(dict.fromkeys(self._plan.counts, np.int32(self._num_present))))

    # --- padding --------------------------------------------------------------------------------------------------

    def _padded_elements(self) -> tuple[int, np.ndarray, Lengths, Lengths] | None:
        """Return elements of a chunk, and two lengths to pad these to; ``None``: no element is padded.

        No length is beyond the longest there is. Of a shorter chunk, and of those in the first one that are not its
        longest, these are the more elements with several rows, which tell of padding; of the first, a program more
        has to be compiled.
        """
        ragged = [(n, groups.lengths) for n, groups in enumerate(self._call.groups) if groups.lengths is not None]
        is_padded = any((lengths[x.numbers] < x.lengths[n]).any() for x in self._chunks for n, lengths in ragged)
        if not is_padded or self._program.checked.issuperset(self._plan.passes):
            return None
        longest, numbers = self._chunks[0].lengths, self._chunks[0].numbers
        candidates = list[tuple[int, np.ndarray, Lengths, Lengths]]()
        for at, x in enumerate(self._chunks):
            if x.lengths != longest:
                pairs = zip(x.lengths, longest, strict=True)
                longer = tuple(None if n is None or m is None else max(n, m) for n, m in pairs)
                candidates.append((at, x.numbers, x.lengths, longer))
        for n, lengths in ragged:
            where = np.flatnonzero(lengths[numbers] < longest[n])
            shorter = max(1, *lengths[numbers[where]], 0)
            if len(where) and shorter != longest[n]:
                candidates.append((0, numbers[where], (*longest[:n], shorter, *longest[n + 1 :]), longest))
        counts = [sum((lengths[some] > 1).sum() for _, lengths in ragged) for _, some, *_ in candidates]
        return candidates[int(np.argmax(counts))] if candidates else None

    def _check(self, one: Pass, at: int, some: np.ndarray, lengths: Lengths, longer: Lengths) -> bool:
        """Refuse a pass whose results depend on padding; return whether there was some that could tell."""
        where = np.flatnonzero(np.isin(self._chunks[at].numbers, some))  # those that are not lost
        groups, wholes = self._call.groups, [self._program.whole(n) for n in (lengths, longer)]
        operations = [wholes[0].operations[n].eqn for n in one.operations]
        bodies = [body for eqn in operations for body in jax_api.jaxprs_in_params(eqn.params)]
        sources = {v: self._values[lengths].get(v) for v in one.rows}
        ragged = [v for v, x in sources.items() if isinstance(x, Leaf) and groups[x.place]._form.padded[x.number]]
        kept = [[flat.avals[v].shape for v, x in sources.items() if x is None] for flat in wholes]
        if not ragged or kept[0] != kept[1] or any(map(jax_api.has_effects, operations)):
            return True  # nothing is padded, or it was kept, or it would act once more
        if not len(where):
            return False
        rows = {n: self._read(one, at, where, n) for n in (lengths, longer)}

        def run(is_longer: bool, shared: Sequence[Any]) -> list[np.ndarray]:
            n = longer if is_longer else lengths
            return [*map(self._program.local, self._computed(one, n, shared, rows[n]), self._program.dims_of(one))]

        shared = [self._shared(one, n) for n in (lengths, longer)]
        wrong = _padding.counted(run, *shared, varies=not any(map(jax_api.calls_back, bodies)))
        if wrong is not None:
            name = re.split(r"\W", wholes[0].closed.jaxpr.debug_info.arg_names[min(ragged)] or "data")[0]
            raise AxisError(
                f"Stream: {self._plan.line(one.results[wrong])}: the result depends on rows that only pad the elements "
                f"of {name}. Use the mask for all that is computed over an element's rows: jnp.mean(x, "
                f"where={name}.mask), or jnp.sum(jnp.where({name}.mask, x, 0)) / {name}.count"
            )
        return True
