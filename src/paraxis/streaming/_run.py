"""One call of a stream: pass after pass, and in each, chunk after chunk: read, compute, add."""

import contextlib
import functools
import re
import time
from collections.abc import Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import dtypes, pytrees
from paraxis._core.jax_api import Literal
from paraxis._host import memory, reading
from paraxis.errors import LoweringError
from paraxis.streaming import _probe, _tasks
from paraxis.streaming._passes import Pass, Totals
from paraxis.streaming._program import READERS, Call, Lengths, Program
from paraxis.streaming._progress import Progress, Show
from paraxis.streaming._resume import Saved, is_key
from paraxis.streaming._tasks import Map, Result, Work


class Run:
    """One call of a stream.

    Args:
        call, program: what is run.
        count: the number of elements in a chunk.
        mapped: carries out chunks elsewhere, if not ``None``.
    """

    def __init__(self, call: Call, program: Program, count: int, mapped: Map | None) -> None:
        self._call, self._program, self._plan, self._map = call, program, program.plan, mapped
        self._chunks = call.chunks(program.size, count)
        self._groups: dict[int, tuple[int, int]] = {}  # of an argument of the trace, the groups and their leaf
        given: dict[int, Any] = {}
        for v, x in enumerate(call.values()):
            (self._groups if isinstance(x, tuple) else given)[v] = x
        self._values: dict[Lengths, dict[int, Any]] = {}
        for chunk in self._chunks:
            if chunk.lengths not in self._values:
                self._values[chunk.lengths] = self._laid({**given, **program.whole(call, chunk.lengths).constants})
        self._kept: dict[int, list[Any]] = {}  # rows of chunks, by value
        self._totals: list[list[Any]] = []  # of passes that are done
        self._begun: tuple[int, list[Any]] | None = None
        self._saved: Saved | None = None
        self._show: Show | None = None
        self._clock: tuple[float, int] | None = None

    def _laid(self, values: dict[int, Any]) -> dict[int, Any]:
        """Lay shared values over all devices, once: JAX would, at each chunk."""
        target = None if self._map else self._program.sharding(None)
        if target is None:
            return values
        shared = {v: x for v, x in values.items() if self._plan.dims[v] is None}
        return {**values, **jax.device_put(shared, target)}

    def depends(self) -> list[Any]:
        """Return what the numbers of a run depend on."""
        found: list[Any] = [str(self._program.placement.num_devices), str(dtypes.is_wide())]
        for groups in self._call.groups:
            found += [str(len(groups)), *jax.tree.leaves(groups[0]), groups.numbers]
            found += [] if groups.lengths is None else [groups.lengths]
        found += [x for x in self._call.values() if not isinstance(x, tuple)]
        found += [f"{chunk.lengths}: {chunk.numbers.tolist()}" for chunk in self._chunks]
        for lengths in self._values:
            flat = self._program.whole(self._call, lengths)
            text = re.sub(r" at 0x[0-9a-f]+", "", str(flat.closed.jaxpr))
            found += [text, *flat.constants.values()]
        return found

    def result(self, saved: Saved | None, show: Show | None) -> Any:
        """Run all passes; return the function's result."""
        self._saved, self._show = saved, show
        if saved and saved.found:
            self._totals, at, held, kept = saved.found
            self._begun, self._kept = (at, held), {int(v): rows for v, rows in kept.items()}
        number = 0
        for before, one in self._plan.stages:
            if before is not None:
                for lengths, values in self._values.items():
                    run = self._program.compiled(self._call, before, self._program.size, lengths)
                    found = run(*[values[v] for v in before.shared])
                    values.update(self._laid(dict(zip(before.results, found, strict=True))))
            if one is not None:
                if number == len(self._totals):
                    self._totals.append(self._pass(number, one))
                for values in self._values.values():
                    values.update(zip(one.results, self._totals[number], strict=False))
                number += 1
        lengths = self._chunks[0].lengths
        flat, values, leaves = self._program.whole(self._call, lengths), self._values[lengths], []
        for v in flat.results:
            if isinstance(v, Literal):
                leaves.append(jnp.asarray(v.val))
            else:
                leaves.append(jnp.asarray(values[v]) if self._plan.dims[v] is None else self._whole(v))
        return pytrees.opened(jax.tree.unflatten(flat.out_tree, leaves))

    # --- one pass --------------------------------------------------------------------------------------------------

    def _pass(self, number: int, one: Pass) -> list[Any]:
        """Return the totals of a pass; its rows are kept."""
        totals, rows, at = Totals(one.kinds), one.results[len(one.kinds) :], 0
        if self._begun is not None:
            (at, totals.held), self._begun = self._begun, None
        else:
            self._kept.update((v, []) for v in rows)
        if one not in self._program.checked and self._check(one):
            self._program.checked.add(one)
        blocks = self._elsewhere(one, at) if self._map else self._here(one, at)
        with contextlib.closing(blocks):
            for held, found in blocks:
                totals.join(held)
                for each in found:
                    for v, y in zip(rows, each, strict=True):
                        self._kept[v].append(y)
                before, at = at, at + len(found)
                if self._saved:
                    self._saved.keep(functools.partial(self._state, number, at, [*totals.held]))
                if self._show:
                    self._show(self._progress(number, before, at))
        return totals.result() if one.kinds else []

    def _state(self, number: int, at: int, held: list[Any]) -> Any:
        """Return what passes gave, and what the one under way has come to with its first ``at`` chunks."""
        done = {v for one in self._plan.passes[:number] for v in one.results}
        kept = {v: rows if v in done else rows[:at] for v, rows in self._kept.items()}
        return self._totals[:number], at, held, kept

    def _progress(self, number: int, before: int, at: int) -> Progress:
        size, passes, now = self._program.size, len(self._plan.passes), time.monotonic()
        done = sum(len(chunk.numbers) for chunk in self._chunks[:at])
        total, left = number * size + done, None
        if self._clock is None:
            self._clock = now, total
        elif total > self._clock[1]:
            left = (now - self._clock[0]) / (total - self._clock[1]) * (passes * size - total)
        return Progress(
            self._program.axis.name, done, size, number + 1, passes, 0.0 if total == passes * size else left
        )

    # --- rows ------------------------------------------------------------------------------------------------------

    def _rows(self, values: Sequence[int], at: int) -> list[Any]:
        """Return the rows of a chunk, in the host's memory; of random keys, as they are."""
        chunk, read, found = self._chunks[at], dict[int, list[Any]](), []
        for v in values:
            if v in self._groups:
                place, leaf = self._groups[v]
                if place not in read:
                    tree = self._call.groups[place]._read(chunk.numbers, chunk.lengths[place])
                    read[place] = jax.tree.leaves(tree)
                found.append(read[place][leaf])
            elif v not in self._values[chunk.lengths]:
                found.append(self._kept[v][at])
            else:
                x = self._values[chunk.lengths][v]
                cut = (*[slice(None)] * (self._plan.dims[v] or 0), chunk.numbers)
                found.append(x[cut] if is_key(x) else np.asarray(x)[cut])
        return found

    def _on_devices(self, one: Pass, rows: Sequence[Any]) -> list[Any]:
        """Lay rows over the devices, if they are in the first dimension and divide; else JAX does it."""
        target, found = None, []
        for v, x in zip(one.rows, rows, strict=True):
            if self._plan.dims[v] or is_key(x):
                found.append(x)
            else:
                target = target or self._program.sharding(len(x))
                found.append(x if target is None else jax.device_put(x, target))
        return found

    def _whole(self, v: int) -> Any:
        """Put the rows of a result together, in the order of the elements; those of chunks are let go on the way."""
        parts, dim, whole, impl = self._kept[v], self._plan.dims[v] or 0, np.empty(0), None
        for at, chunk in enumerate(self._chunks):
            part, parts[at] = parts[at], None
            if is_key(part):
                part, impl = jax.random.key_data(part), jax.random.key_impl(part)
            if at == 0:
                whole = np.empty((*part.shape[:dim], self._program.size, *part.shape[dim + 1 :]), part.dtype)
            whole[(*[slice(None)] * dim, chunk.numbers)] = part
        return whole if impl is None else jax.random.wrap_key_data(jnp.asarray(whole), impl=impl)

    # --- chunks, here and elsewhere --------------------------------------------------------------------------------

    def _here(self, one: Pass, begin: int) -> Generator[Result, None, None]:
        wide, before, count = dtypes.is_wide(), None, len(one.kinds)
        shared = {lengths: [values[v] for v in one.shared] for lengths, values in self._values.items()}

        def laid(at: int) -> list[Any]:
            with jax.enable_x64(wide):  # a thread does not see the width that is in force where it is started
                return self._on_devices(one, self._rows(one.rows, at))

        calls = (functools.partial(laid, at) for at in range(begin, len(self._chunks)))
        with contextlib.closing(reading.ahead(calls, READERS, READERS)) as read:
            for at, rows in enumerate(read, begin):
                chunk = self._chunks[at]
                run = self._program.compiled(self._call, one, len(chunk.numbers), chunk.lengths)
                try:
                    found = jax.block_until_ready(run(*shared[chunk.lengths], *rows))
                except FloatingPointError as error:  # where jax.debug_nans looks
                    error.add_note(
                        f"{self._call.who}: a value is not finite of the elements {sorted(chunk.numbers.tolist())}"
                    )
                    raise
                yield [found[:count]], [[y if is_key(y) else np.asarray(y) for y in found[count:]]]
                jax.block_until_ready(before)  # where work is sent ahead, one chunk computes, and one waits
                before = found
                if self._program.fits is not None:
                    memory.give_back()

    def _elsewhere(self, one: Pass, begin: int) -> Generator[Result, None, None]:
        programs = {}
        for chunk in self._chunks:
            key = len(chunk.numbers), chunk.lengths
            if key not in programs:
                fn, structs = one.program(self._program.part(self._call, *key))
                programs[key] = _tasks.exported(fn, structs, lambda at: self._plan.line(one.results[at]))
        groups = [*map(_tasks.sendable, self._call.groups)]
        where = [self._groups.get(v) for v in one.rows]
        reads = [x if x is not None and groups[x[0]] is not None else None for x in where]
        whole = {lengths: [_tasks.plain(values[v]) for v in one.shared] for lengths, values in self._values.items()}
        work = Work(programs, whole, groups, reads, one.kinds, dtypes.is_wide())
        sent = [v for v, x in zip(one.rows, reads, strict=True) if x is None]
        assert self._map is not None
        yield from _tasks.carried_out(self._map, work, self._chunks, functools.partial(self._rows, sent), begin)

    # --- a forgotten mask ------------------------------------------------------------------------------------------

    def _check(self, one: Pass) -> bool:
        """Refuse a pass whose results depend on padding; return whether there was some that could tell."""
        padded = {
            n: place
            for n, (place, leaf) in enumerate(self._groups.get(v, (0, -1)) for v in one.rows)
            if leaf >= 0 and self._call.groups[place]._is_padded(leaf)
        }
        operations = self._program.whole(self._call, self._chunks[0].lengths).operations
        if not padded or any(operations[n].acts for n in one.operations):
            return True
        own = [np.zeros(0, int) if x is None else x for x in (groups.lengths for groups in self._call.groups)]
        shares = [
            max(_probe.share_that_differs(own[n][chunk.numbers], chunk.lengths[n] or 0) for n in padded.values())
            for chunk in self._chunks
        ]
        at = int(np.argmax(shares))
        if not shares[at]:
            return False
        chunk = self._chunks[at]
        run = self._program.compiled(self._call, one, len(chunk.numbers), chunk.lengths)
        lengths = [own[padded[n]][chunk.numbers] if n in padded else None for n in range(len(one.rows))]

        def chunk_of(values: Sequence[Any], rows: Sequence[Any]) -> list[Any]:
            return run(*values, *self._on_devices(one, rows))

        shared = [self._values[chunk.lengths][v] for v in one.shared]
        avals = self._program.whole(self._call, chunk.lengths).avals
        for n in _probe.counted(chunk_of, shared, self._rows(one.rows, at), lengths):
            if n >= len(one.kinds) and set(chunk.lengths).intersection(avals[one.results[n]].shape):
                continue  # rows of an element are returned as they are, those of padding included
            name = self._call.name_of(next(iter(padded.values())))
            raise LoweringError(
                f"{self._call.who}: {self._plan.line(one.results[n])}: the result depends on rows that only pad the "
                f"elements of {name}. Use the mask for all that is computed over an element's rows: jnp.mean(x, "
                f"where={name}.mask), or jnp.sum(jnp.where({name}.mask, x, 0)) / {name}.count"
            )
        return True
