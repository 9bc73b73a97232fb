"""One call of a stream: pass after pass, and in each, chunk after chunk: read, compute, add."""

import contextlib
import functools
import re
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import jax_api, pytrees
from paraxis._core.jax_api import Literal
from paraxis._host import reading
from paraxis._host.progress import Display
from paraxis.errors import AxisError
from paraxis.streaming import _padding, _tasks
from paraxis.streaming._passes import Pass, add, total
from paraxis.streaming._program import READERS, Call, Chunk, Leaf, Lengths, Program
from paraxis.streaming._resume import Saved, is_key
from paraxis.streaming._tasks import Map


class Progress(NamedTuple):
    """The progress of a run.

    Attributes:
        axis: the name of the axis that is streamed.
        done, elements: elements of this pass that are done, and of all.
        pass_number, passes: the pass under way, from 1, and how many there are; ``None``: that depends on values.
        seconds_left: in all passes; ``None``: it is not known.
    """

    axis: str
    done: int
    elements: int
    pass_number: int
    passes: int | None
    seconds_left: float | None

    def __str__(self) -> str:
        of = "" if self.passes is None else f" of {self.passes}"
        left = "" if self.seconds_left is None else f", {self.seconds_left:,.0f} s left"
        return f"pass {self.pass_number}{of}: {self.done:,} of {self.elements:,} {self.axis}{left}"


Show = Callable[[Progress], Any]


@contextlib.contextmanager
def shown(verbose: bool | Show) -> Iterator[Show | None]:
    """Give what to call with each progress, if anything."""
    if not verbose or callable(verbose):
        yield verbose or None
    else:
        with contextlib.closing(Display()) as display:
            yield lambda progress: display.show(progress.__str__, progress.done, progress.elements)


class Run:
    """One call of a stream, in chunks of ``count`` elements, which ``mapped`` may carry out elsewhere."""

    def __init__(self, call: Call, program: Program, count: int, mapped: Map | None, show: Show | None) -> None:
        self._call, self._program, self._plan, self._map, self._show = call, program, program.plan, mapped, show
        self._chunks = call.chunks(program.size, count)
        self._values: dict[Lengths, dict[int, Any]] = {}  # known values, and leaves of groups
        for lengths in dict.fromkeys(chunk.lengths for chunk in self._chunks):
            self._values[lengths] = self._laid(dict(enumerate(call.values)) | program.whole(lengths).constants)
        self._began, self._ran = time.monotonic(), 0

    def _laid(self, values: dict[int, Any]) -> dict[int, Any]:
        """Lay shared values over all devices, once: JAX would, at each chunk."""
        target, dims = None if self._map else self._program.sharding(None), self._plan.dims
        return values | jax.device_put({v: x for v, x in values.items() if target and dims[v] is None}, target)

    def depends(self) -> Any:
        """Return what the numbers of a run depend on."""
        groups = [(x[0], x.numbers, x.lengths) for x in self._call.groups]
        given = [x for x in self._call.values if not isinstance(x, Leaf)]
        chunks = [(chunk.numbers, chunk.lengths) for chunk in self._chunks]
        flats = [self._program.whole(lengths) for lengths in self._values]
        traced = [(re.sub(r" at 0x[0-9a-f]+", "", str(flat.closed.jaxpr)), flat.constants) for flat in flats]
        return self._program.placement.num_devices, jax_api.is_wide(), groups, given, chunks, traced

    def result(self, saved: Saved | None) -> Any:
        """Run all passes; return the function's result."""
        self._totals, *begun, kept = (saved and saved.found) or ([], {})
        self._kept, number = {int(v): rows for v, rows in kept.items()}, 0  # rows of chunks, by value
        for one in self._plan.steps:
            if one.is_once:
                for lengths, values in self._values.items():
                    run = self._program.compiled(one, self._program.size, lengths)
                    found = run(*[values[v] for v in one.shared])
                    values.update(self._laid(dict(zip(one.results, found, strict=True))))
                continue
            if number == len(self._totals):
                self._totals.append(self._pass(number, one, saved, *begun))
                begun = []
            for values in self._values.values():
                values.update(zip(one.results, self._totals[number], strict=False))
            number += 1
        lengths, dims = self._chunks[0].lengths, self._plan.dims
        flat, values = self._program.whole(lengths), self._values[lengths]
        returned = {v for v in flat.results if isinstance(v, int)}
        found = {v: jnp.asarray(values[v]) if dims[v] is None else self._rows_of(v) for v in returned}
        leaves = [jnp.asarray(v.val) if isinstance(v, Literal) else found[v] for v in flat.results]
        return pytrees.combine(jax.tree.unflatten(flat.out_tree, leaves))

    def _pass(self, number: int, one: Pass, saved: Saved | None, at: int = 0, held: Sequence[Any] = ()) -> list[Any]:
        """Return the totals of a pass, of which ``at`` chunks are done; its rows are kept."""
        held, count, at = [*held], len(one.kinds), int(at)
        if not at:
            self._kept.update((v, []) for v in one.results[count:])
        if one not in self._program.checked and self._check(one):
            self._program.checked.add(one)
        with contextlib.closing(self._elsewhere(one, at) if self._map else self._here(one, at)) as chunks:
            for found in chunks:
                at += 1
                add(held, found[:count], one.kinds)
                for v, y in zip(one.results[count:], found[count:], strict=True):
                    self._kept[v].append(np.asarray(y))
                if saved:
                    saved.keep(functools.partial(self._state, number, one, at, [*held]))
                if self._show:
                    self._show(self._progress(number, at))
        return total(held, one.kinds)

    def _state(self, number: int, one: Pass, at: int, held: Any) -> Any:
        """Return what passes gave, and what the one under way has come to with its first ``at`` chunks."""
        kept = self._kept | {v: self._kept[v][:at] for v in one.results[len(one.kinds) :]}
        return [self._totals[:number], at, held, kept]

    def _progress(self, number: int, at: int) -> Progress:
        size, passes = self._program.size, len(self._plan.passes)
        done = sum(len(chunk.numbers) for chunk in self._chunks[:at])
        self._ran += len(self._chunks[at - 1].numbers)
        left = (time.monotonic() - self._began) / self._ran * ((passes - number) * size - done)
        return Progress(self._program.axis.name, done, size, number + 1, passes, left)

    def _rows(self, one: Pass, at: int) -> list[Any]:
        """Return the rows of a chunk in the host's memory, random keys as they are; of groups, their leaves."""
        chunk, found = self._chunks[at], []
        for v in one.rows:
            x, cut = self._values[chunk.lengths].get(v), (*[slice(None)] * (self._plan.dims[v] or 0), chunk.numbers)
            if x is None or isinstance(x, Leaf):
                found.append(self._kept[v][at] if x is None else x)
            else:
                found.append((x if is_key(x) else np.asarray(x))[cut])
        return found

    def _laid_rows(self, one: Pass, rows: Sequence[Any]) -> list[Any]:
        """Lay rows over the devices, if they are in the first dimension and divide; else JAX does it."""

        def laid(v: int, x: Any) -> Any:
            target = None if self._plan.dims[v] or is_key(x) else self._program.sharding(len(x))
            return x if target is None else jax.device_put(x, target)

        return [*map(laid, one.rows, rows)]

    def _rows_of(self, v: int) -> np.ndarray:
        """Put the rows of a result together, in the order of the elements; those of chunks are let go on the way."""
        parts, dim = self._kept[v], self._plan.dims[v] or 0
        shape = (*parts[0].shape[:dim], self._program.size, *parts[0].shape[dim + 1 :])
        whole = np.empty(shape, parts[0].dtype)
        for at, chunk in enumerate(self._chunks):
            whole[(*[slice(None)] * dim, chunk.numbers)], parts[at] = parts[at], None
        return whole

    def _here(self, one: Pass, begin: int) -> Generator[list[Any], None, None]:
        wide = jax_api.is_wide()

        def read(at: int) -> list[Any]:
            with jax.enable_x64(wide):  # a thread does not see the width that is in force where it is started
                return self._laid_rows(one, self._chunks[at].read(self._call.groups, self._rows(one, at)))

        calls = (functools.partial(read, at) for at in range(begin, len(self._chunks)))
        with contextlib.closing(reading.ahead(calls, READERS, READERS)) as ahead:
            for chunk, rows in zip(self._chunks[begin:], ahead, strict=True):
                yield self._compute(one, chunk, [self._values[chunk.lengths][v] for v in one.shared], rows)

    def _compute(self, one: Pass, chunk: Chunk, shared: Sequence[Any], rows: Sequence[Any]) -> list[Any]:
        run = self._program.compiled(one, len(chunk.numbers), chunk.lengths)
        return jax.block_until_ready(run(*shared, *rows))  # another one beside it would take as much memory

    def _elsewhere(self, one: Pass, begin: int) -> Generator[list[Any], None, None]:
        programs = dict[Any, bytes]()
        for key in dict.fromkeys((len(chunk.numbers), chunk.lengths) for chunk in self._chunks):
            programs[key] = _tasks.exported(*one.program(self._program.part(*key)))
        there = [groups if _tasks.can_be_sent(groups) else None for groups in self._call.groups]
        here = [groups if sent is None else None for groups, sent in zip(self._call.groups, there, strict=True)]
        tasks = ((x, x.read(here, self._rows(one, at))) for at, x in enumerate(self._chunks[begin:], begin))
        shared = {lengths: [values[v] for v in one.shared] for lengths, values in self._values.items()}
        work = _tasks.Work(programs, shared, there, jax_api.is_wide())
        assert self._map is not None
        yield from _tasks.carried_out(self._map, work, tasks)

    def _check(self, one: Pass) -> bool:
        """Refuse a pass whose results depend on padding; return whether there was some that could tell."""
        groups, whole, own = self._call.groups, self._program.whole(self._chunks[0].lengths), dict[int, Any]()
        operations = [whole.operations[n].eqn for n in one.operations]
        bodies = [body for eqn in operations for body in jax_api.jaxprs_in_params(eqn.params)]
        if any(map(jax_api.has_effects, operations)) or any(map(jax_api.calls_back, bodies)):
            return True  # rows in an order that no element has may be an error to who is called
        for n, x in enumerate(self._rows(one, 0)):
            if isinstance(x, Leaf) and groups[x.place]._form.padded[x.number]:
                own[n] = x.place, groups[x.place].lengths
        telling = [  # how many elements have two rows, and two of padding
            sum(((x[c.numbers] > 1) & (x[c.numbers] < c.lengths[place] - 1)).sum() for place, x in own.values())
            for c in self._chunks
        ]
        at = int(np.argmax(telling))
        if not telling[at]:
            return not own
        chunk = self._chunks[at]
        wrong = _padding.counted(
            lambda values, rows: self._compute(one, chunk, values, self._laid_rows(one, rows)),
            [self._values[chunk.lengths][v] for v in one.shared],
            chunk.read(groups, self._rows(one, at)),
            {n: x[chunk.numbers] for n, (_, x) in own.items()},
        )
        if wrong is not None:
            name = re.split(r"\W", whole.closed.jaxpr.debug_info.arg_names[one.rows[min(own)]] or "data")[0]
            raise AxisError(
                f"Stream: {self._plan.line(one.results[wrong])}: the result depends on rows that only pad the elements "
                f"of {name}. Use the mask for all that is computed over an element's rows: jnp.mean(x, "
                f"where={name}.mask), or jnp.sum(jnp.where({name}.mask, x, 0)) / {name}.count"
            )
        return True
