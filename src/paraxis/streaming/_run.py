"""One call of a stream: pass after pass, and in each, chunk after chunk: read, compute, add."""

import contextlib
import functools
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._axes import arrays
from paraxis._calls import pytrees
from paraxis._host import memory, reading
from paraxis._jax import dtypes, jax_api
from paraxis._jax.jax_api import Literal
from paraxis.errors import LoweringError
from paraxis.streaming import _tasks
from paraxis.streaming._groups import Groups
from paraxis.streaming._padding import can_differ, counted
from paraxis.streaming._passes import Pass
from paraxis.streaming._program import READERS, Call, Chunk, Lengths, Program
from paraxis.streaming._progress import Progress, Show
from paraxis.streaming._resume import Saved, digest, text_of
from paraxis.streaming._sums import Totals
from paraxis.streaming._tasks import Part, Result, Work


class Run:
    """One call of a stream.

    Args:
        call, program: what is run.
        count: the number of elements in a chunk.
        mapped: carries out chunks elsewhere, if not ``None``.
    """

    def __init__(self, call: Call, program: Program, count: int, mapped: _tasks.Map | None) -> None:
        self.call, self.program, self.plan, self._map = call, program, program.plan, mapped
        self.chunks = call.chunks(program.size, count)
        self.lengths = list(dict.fromkeys(chunk.lengths for chunk in self.chunks))
        self._flat = {lengths: program.trace(call, program.size, lengths) for lengths in self.lengths}
        given = dict(enumerate(call.values()))
        self._groups: dict[int, tuple[Groups, int]] = {v: x for v, x in given.items() if isinstance(x, tuple)}
        self._values: dict[Lengths, dict[int, Any]] = {
            lengths: {**given, **flat.constants} for lengths, flat in self._flat.items()
        }
        self._kept: dict[int, list[Any]] = {}
        self._totals: list[list[Any]] = []
        self._timed, self._seconds = 0, 0.0

    def result(self, saved: Saved | None, show: Show) -> Any:
        """Run all passes; return the function's result."""
        self._saved, self._show = saved, show
        self._begun = saved.load() if saved else None
        for level, one in enumerate(self.plan.passes):
            for lengths, values in self._values.items():
                self.program.between(self.call, level, lengths, values)
            if one is not None:
                self._pass(one)
        first = self._flat[self.lengths[0]]
        wholes = {v: self._whole(v) for v in first.results if not isinstance(v, Literal) and self._is_rows(v)}
        values = self._values[self.lengths[0]]
        leaves = [
            jnp.asarray(v.val) if isinstance(v, Literal) else wholes[v] if v in wholes else jnp.asarray(values[v])
            for v in first.results
        ]
        if saved:
            saved.clear()
        return pytrees.opened(jax.tree.unflatten(first.out_tree, leaves))

    def depends(self) -> dict[str, str]:
        """Return digests of what the numbers of a run depend on."""
        flats = [*self._flat.values()]
        groups = []
        for one in self.call.groups:
            groups += [str(len(one)), digest(*jax.tree.leaves(one._first)), digest(one._numbers)]
            groups.append("" if one.lengths is None else digest(one.lengths))
        given = [x for x in self.call.values() if not isinstance(x, tuple)]
        chunks = [f"{chunk.lengths}: {chunk.numbers.tolist()}" for chunk in self.chunks]
        return {
            "the version of JAX": jax.__version__,
            "groups": digest(*groups),
            "how elements are put into chunks, by at_once or memory and the number of devices": digest(
                *chunks, str(self.program.placement.num_devices)
            ),
            "an argument": digest(*given),
            "fn": digest(*(text_of(flat.closed.jaxpr) for flat in flats), str(dtypes.is_wide())),
            "what fn closes over": digest(*(x for flat in flats for x in flat.constants.values())),
        }

    def _is_rows(self, v: int) -> bool:
        return self.plan.dims[v] is not None

    # --- one pass --------------------------------------------------------------------------------------------------

    def _pass(self, one: Pass) -> None:
        count, number = len(one.kinds), len(self._totals)
        totals, at, sums, kept = self._resumed(one, number)
        self._kept.update(kept)
        if sums is not None:
            self._finish(one, sums)
            return
        self._require_same_parts(one)
        shared = self._shared(one)
        self._check(one, shared)
        done = sum(len(chunk.numbers) for chunk in self.chunks[:at])
        began = time.monotonic()
        make = self._elsewhere if self._map else self._here
        reached = at, list(totals.held)  # one assignment: an interrupt comes before it or after it
        try:
            with contextlib.closing(make(one, shared, at)) as blocks:
                for held, rows in blocks:
                    totals.join(held)
                    for each in rows:
                        for v, y in zip(kept, each, strict=True):
                            kept[v].append(y)
                    ran = sum(len(chunk.numbers) for chunk in self.chunks[at : at + len(rows)])
                    at, done = at + len(rows), done + ran
                    reached = at, list(totals.held)
                    began = self._tell(number, ran, done, began)
                    self._save(kept, *reached)
        except BaseException as error:
            if self._saved:
                self._save(kept, *reached, now=True)
                error.add_note(f"{self.call.who}: saved; the same call goes on from there")
            raise
        self._finish(one, totals.result() if count else [])

    def _finish(self, one: Pass, totals: list[Any]) -> None:
        self._totals.append(totals)
        for lengths, values in self._values.items():
            avals = [self._flat[lengths].avals[v] for v in one.results[: len(totals)]]
            found = zip(map(jnp.asarray, totals), avals, strict=True)
            typed = [jax_api.weak(y) if aval.weak_type else y for y, aval in found]
            values.update(zip(one.results[: len(totals)], typed, strict=True))

    def _shared(self, one: Pass) -> dict[Lengths, list[Any]]:
        """Return the values that a pass is given whole, on all devices."""
        target = None if self._map else arrays.whole_sharding(self.program.placement)
        laid: dict[int, Any] = {}
        for values in self._values.values():
            for v in one.shared:
                x = values[v]
                if id(x) not in laid:
                    bound = isinstance(x, jax.Array) and x.committed
                    laid[id(x)] = x if target is None or bound else arrays.put(x, target)
        return {lengths: [laid[id(values[v])] for v in one.shared] for lengths, values in self._values.items()}

    def _require_same_parts(self, one: Pass) -> None:
        for v in one.results[: len(one.kinds)]:
            if len({flat.avals[v].shape for flat in self._flat.values()}) > 1:
                raise LoweringError(
                    f"{self.call.who}: values of which elements of different length have different numbers are reduced "
                    f"over the elements, at {self.plan.line(v)}; reduce them over an element's rows, with its mask"
                )

    # --- rows ------------------------------------------------------------------------------------------------------

    def _rows(self, at: int, values: Sequence[int]) -> list[Any]:
        """Return the rows of a chunk, in the host's memory; of random keys, as they are."""
        chunk, read = self.chunks[at], dict[int, list[Any]]()
        return [self._rows_of(v, at, chunk, read) for v in values]

    def _rows_of(self, v: int, at: int, chunk: Chunk, read: dict[int, list[Any]]) -> Any:
        if v not in self.plan.sources:
            return self._kept[v][at]
        if v in self._groups:
            groups, leaf = self._groups[v]
            if id(groups) not in read:
                place = next(n for n, one in enumerate(self.call.groups) if one is groups)
                read[id(groups)] = jax.tree.leaves(groups._read(chunk.numbers, chunk.lengths[place]))
            return read[id(groups)][leaf]
        x, dim = _on_host(self._values[chunk.lengths][v]), self.plan.dims[v] or 0
        return x[(*[slice(None)] * dim, chunk.numbers)]

    def _laid(self, one: Pass, rows: Sequence[Any], count: int) -> list[Any]:
        """Lay rows over the devices, if they are in the first dimension and divide; else JAX does it."""
        target = arrays.sharding(self.program.placement.holding(count), rows=True)
        return [
            x
            if target is None or self.plan.dims[v] or jnp.issubdtype(x.dtype, jax.dtypes.extended)
            else arrays.put(x, target)
            for v, x in zip(one.rows, rows, strict=True)
        ]

    def _whole(self, v: int) -> Any:
        """Put the rows of a result together, in the order of the elements; those of chunks are let go on the way."""
        parts, dim, whole, impl = self._kept[v], self.plan.dims[v] or 0, np.empty(0), None
        for at, chunk in enumerate(self.chunks):
            part, parts[at] = parts[at], None
            if jnp.issubdtype(part.dtype, jax.dtypes.extended):
                part, impl = jax.random.key_data(part), jax.random.key_impl(part)
            shape = (*part.shape[:dim], self.program.size, *part.shape[dim + 1 :])
            if at == 0:
                whole = np.empty(shape, part.dtype)
            if shape != whole.shape:
                raise LoweringError(
                    f"{self.call.who}: fn returns values of which elements of different length have different numbers; "
                    f"reduce them over an element's rows, with its mask"
                )
            whole[(*[slice(None)] * dim, chunk.numbers)] = part
        return whole if impl is None else jax.random.wrap_key_data(jnp.asarray(whole), impl=impl)

    # --- chunks, here and elsewhere --------------------------------------------------------------------------------

    def _here(self, one: Pass, shared: dict[Lengths, list[Any]], begin: int) -> Generator[Result, None, None]:
        wide, before, count = dtypes.is_wide(), None, len(one.kinds)

        def laid(at: int) -> list[Any]:
            with jax.enable_x64(wide):  # a thread does not see the width that is in force where it is started
                return self._laid(one, self._rows(at, one.rows), len(self.chunks[at].numbers))

        calls = (functools.partial(laid, at) for at in range(begin, len(self.chunks)))
        with contextlib.closing(reading.ahead(calls, READERS, READERS)) as read:
            for at, rows in enumerate(read, begin):
                chunk = self.chunks[at]
                run = self.program.compiled(self.call, one, len(chunk.numbers), chunk.lengths)
                found = _named(self.call.who, chunk, run, [*shared[chunk.lengths], *rows])
                yield [found[:count]], [[_on_host(y) for y in found[count:]]]
                jax.block_until_ready(before)  # where work is sent ahead, one chunk computes, and one waits
                before = found
                if self.program.fits is not None:
                    memory.give_back()

    def _elsewhere(self, one: Pass, shared: dict[Lengths, list[Any]], begin: int) -> Generator[Result, None, None]:
        assert self._map is not None
        kinds = {(len(chunk.numbers), chunk.lengths) for chunk in self.chunks}
        programs = {}
        for size, lengths in kinds:
            fn, structs = one.program(self.program.trace(self.call, size, lengths))
            programs[size, lengths] = _tasks.exported(fn, structs, lambda at: self.plan.line(one.results[at]))
        sources = [(x, n) for n, x in enumerate(self.call.groups) if _tasks.can_be_sent(x)]
        places = {id(groups): at for at, (groups, _) in enumerate(sources)}
        reads = [
            (places[id(self._groups[v][0])], self._groups[v][1])
            if v in self._groups and id(self._groups[v][0]) in places
            else None
            for v in one.rows
        ]
        whole = {lengths: [_tasks.plain(x) for x in values] for lengths, values in shared.items()}
        work = Work(programs, whole, sources, reads, one.kinds, dtypes.is_wide())
        sent = [v for v, where in zip(one.rows, reads, strict=True) if where is None]

        def part(at: int) -> Part:
            return Part(self.chunks[at].numbers, self.chunks[at].lengths, self._rows(at, sent))

        yield from _tasks.carried_out(self._map, work, _tasks.in_tasks(part, begin, len(self.chunks)))

    # --- a forgotten mask ------------------------------------------------------------------------------------------

    def _check(self, one: Pass, shared: dict[Lengths, list[Any]]) -> None:
        """Refuse a pass whose results depend on padding, once."""
        own = [groups.lengths for groups in self.call.groups]
        padded = [v in self._groups and self._groups[v][0]._is_padded(self._groups[v][1]) for v in one.rows]
        flat = self._flat[self.lengths[0]]
        if one in self.program.checked or not any(padded):
            return
        self.program.checked.add(one)
        if any(jax_api.has_effects(flat.operations[n].eqn) for n in one.operations):
            return
        at = self._most_padded(own)
        chunk = self.chunks[at]
        flat = self._flat[chunk.lengths]
        places = {id(groups): n for n, groups in enumerate(self.call.groups)}
        lengths = [
            own[places[id(self._groups[v][0])]][chunk.numbers] if is_padded else None  # pyright: ignore[reportOptionalSubscript]
            for v, is_padded in zip(one.rows, padded, strict=True)
        ]
        compared = [
            n
            for n, v in enumerate(one.results)
            if n < len(one.kinds) or not set(chunk.lengths).intersection(flat.avals[v].shape)
        ]
        run = self.program.compiled(self.call, one, len(chunk.numbers), chunk.lengths)

        def chunk_of(values: Sequence[Any], rows: Sequence[Any]) -> list[Any]:
            return arrays.ready(run(*arrays.ready([*values, *self._laid(one, rows, len(chunk.numbers))])))

        wrong = counted(chunk_of, shared[chunk.lengths], self._rows(at, one.rows), lengths, compared)
        if wrong is not None:
            name = self.call.name_of(next(self._groups[v][0] for v, x in zip(one.rows, padded, strict=True) if x))
            raise LoweringError(
                f"{self.call.who}: {self.plan.line(one.results[wrong])}: the result depends on rows that only pad the "
                f"elements of {name}. Use the mask for all that is computed over an element's rows: jnp.mean(x, "
                f"where={name}.mask), or jnp.sum(jnp.where({name}.mask, x, 0)) / {name}.count"
            )

    def _most_padded(self, own: Sequence[np.ndarray | None]) -> int:
        """Return the first chunk in half of whose elements padding could be otherwise, or where it is in most."""
        shares = [
            max(
                can_differ(lengths[chunk.numbers], length or 0).mean()
                for lengths, length in zip(own, chunk.lengths, strict=True)
                if lengths is not None
            )
            for chunk in self.chunks
        ]
        return int(np.argmax(np.minimum(shares, 0.5)))

    # --- what is told and saved ------------------------------------------------------------------------------------

    def _tell(self, number: int, ran: int, done: int, began: float) -> float:
        """Tell that chunks were run; those for which something was compiled say nothing about the time that is left."""
        now, size, passes = time.monotonic(), self.program.size, self.program.num_passes
        if done > ran:
            self._timed, self._seconds = self._timed + ran, self._seconds + now - began
        to_do = (passes - number) * size - done
        left = 0.0 if to_do == 0 else self._seconds / self._timed * to_do if self._timed else None
        self._show(Progress(self.program.axis.name, done, size, number + 1, passes, left))
        return now

    def _save(
        self, kept: dict[int, list[Any]], done: int, held: Sequence[list[Any] | None], *, now: bool = False
    ) -> None:
        """Save what finished passes gave, and what the one under way has come to, of which ``kept`` are the rows."""
        if self._saved is None:
            return
        parts = {v: rows[:done] if v in kept else rows for v, rows in self._kept.items()}
        said = {
            "totals": [len(x) for x in self._totals],
            "held": [part is not None for part in held],
            "kept": [[v, len(rows)] for v, rows in parts.items()],
            "done": done,
        }
        groups = [*self._totals, *(part for part in held if part is not None), *parts.values()]
        self._saved.save(said, [x for group in groups for x in group], now=now)

    def _resumed(self, one: Pass, number: int) -> tuple[Totals, int, list[Any] | None, dict[int, list[Any]]]:
        """Return what an earlier run had of a pass: parts, of how many chunks; totals, if it was done; rows."""
        totals, rows = Totals(one.kinds), one.results[len(one.kinds) :]
        if self._begun is None:
            return totals, 0, None, {v: [] for v in rows}
        said, found = self._begun
        taken = iter(found)
        sums = [[next(taken) for _ in range(count)] for count in said["totals"]]
        is_under_way = number == len(sums)
        if number > len(sums):
            return totals, 0, None, {v: [] for v in rows}
        under_way = [p for p in self.plan.passes if p is not None][len(sums)]
        held = [[next(taken) for _ in under_way.kinds] if there else None for there in said["held"]]
        parts = {v: [next(taken) for _ in range(count)] for v, count in said["kept"]}
        if not is_under_way:
            return totals, 0, sums[number], {v: parts[v] for v in rows}
        totals.held = held
        return totals, said["done"], None, {v: parts[v] for v in rows}


def _named(who: str, chunk: Chunk, run: Callable[..., list[Any]], args: list[Any]) -> list[Any]:
    """Run a chunk; say of which elements a result is not finite, where ``jax.debug_nans`` looks."""
    try:
        return arrays.ready(run(*arrays.ready(args)))
    except FloatingPointError as error:
        error.add_note(f"{who}: a value is not finite of the elements {sorted(set(chunk.numbers.tolist()))}")
        raise


def _on_host(x: Any) -> Any:
    return x if jnp.issubdtype(x.dtype, jax.dtypes.extended) else np.asarray(x)
