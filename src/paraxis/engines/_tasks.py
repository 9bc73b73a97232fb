"""The work of another process for an engine: blocks of chunks, by programs that came as bytes.

once a pass: programs, shared values, sources; for each task: elements' numbers  →  parts of reductions, rows
"""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._jax import dtypes, jax_api, structure
from paraxis.engines._groups import Groups
from paraxis.engines._job import Length, Saved, loaded
from paraxis.engines._padding import Probe
from paraxis.engines._run import Pass
from paraxis.engines._sums import Totals


@dataclasses.dataclass(frozen=True)
class Held:
    """The results of a task but rows: parts of reductions, and whether a chunk was checked, as in :class:`Block`."""

    totals: list[list[np.ndarray] | None]
    is_checked: bool


Given = tuple[Held, list[list[Any]]]
"""The results of a task, and the rows of each of its chunks."""

_BLOCKS = 64
"""At least so many tasks are made of a pass, if it has so many chunks; less than twice as many in any case."""

_programs: structure.Recent[Any] = structure.Recent(64)


@dataclasses.dataclass(frozen=True)
class Work:
    """The common needs of all tasks of a pass.

    Attributes:
        programs: by the length of elements and their number in a chunk.
        shared: the values that are given whole, for each length; random keys as numbers.
        sources: what is read where the task is done.
        reads: for each length and each of the pass's rows, a source and a leaf of its elements; ``None``: the task has
            them.
        folded, kept, kinds: as in :class:`Pass`.
        wide: whether 64-bit numbers are in force.
        spill: a folder for rows, if they are kept in files.
    """

    programs: dict[tuple[Length, int], bytes]
    shared: dict[Length, list[np.ndarray]]
    sources: list[Groups]
    reads: dict[Length, list[tuple[int, int] | None]]
    folded: Sequence[int]
    kept: Sequence[int]
    kinds: Sequence[str]
    wide: bool
    spill: Path | None


@dataclasses.dataclass(frozen=True)
class Part:
    """A chunk of a task: its elements' numbers, their length, and the rows that are not read from a source.

    ``probe``: it is to be run with other padding as well.
    """

    numbers: np.ndarray
    length: Length
    rows: list[Any]
    probe: Probe | None = None


@dataclasses.dataclass(frozen=True)
class Task:
    """Chunks that one process runs one after the other. ``name`` is its own among those of the whole run."""

    name: str
    parts: list[Part]


def work_of(of: Pass) -> Work:
    """Return what other processes need to know about a pass."""
    sources: list[Groups] = []
    reads: dict[Length, list[tuple[int, int] | None]] = {}
    programs: dict[tuple[Length, int], bytes] = {}
    for length, count in {(chunk.length, len(chunk.numbers)) for chunk in of.chunks}:
        programs[length, count] = of.stage(length).exported(of.shared[length], count)
    for length, cut in of.cuts.items():
        reads[length] = []
        for v in of.stage(length).rows:
            where = cut.rows[v]
            if isinstance(where, tuple) and where[0]._can_be_sent:
                if where[0] not in sources:
                    sources.append(where[0])
                reads[length].append((sources.index(where[0]), where[1]))
            else:
                reads[length].append(None)
    shared = {length: [_plain(x) for x in values] for length, values in of.shared.items()}
    return Work(programs, shared, sources, reads, of.folded, of.kept, of.kinds, dtypes.is_wide(), of.spill)


def tasks_of(of: Pass, work: Work, begin: int) -> Iterator[Task]:
    """Yield the tasks of a pass from a chunk on; which chunks go together does not depend on who does them."""
    each = 1 << max(0, (len(of.chunks) // _BLOCKS).bit_length() - 1)
    each = max([each, *(groups._together for groups in of.job.groups)])
    for start in range(begin, len(of.chunks), each):
        together = range(start, min(start + each, len(of.chunks)))
        yield Task(f"{of.number}-{start}", [_part(of, work, at) for at in together])


def _part(of: Pass, work: Work, at: int) -> Part:
    chunk = of.chunks[at]
    sent = [where is None for where in work.reads[chunk.length]]
    probe = of.probe if of.probe is not None and of.probe.at == at else None
    return Part(chunk.numbers, chunk.length, of.rows(at, sent), probe)


def perform(work: Work, task: Task) -> Given:
    """Do a task. The next chunk is read while one is computed."""
    totals, rows, is_checked = Totals(work.kinds), list[list[Any]](), False

    def take(found: Sequence[Any]) -> None:
        totals.add([found[at] for at in work.folded])
        kept = [np.asarray(found[at]) for at in work.kept]
        if work.spill is not None:
            kept = [Saved.of(x, work.spill / f"{task.name}-{len(rows)}-{n}") for n, x in enumerate(kept)]
        rows.append(kept)

    with jax.enable_x64(work.wide):
        shared = {length: [jnp.asarray(x) for x in work.shared[length]] for length in {p.length for p in task.parts}}
        under_way = None
        for part in task.parts:
            run = functools.partial(_run, _program(work.programs[part.length, len(part.numbers)]), shared, part)
            given = _rows(work, part)
            found = run(given)
            if part.probe is not None:
                is_checked = part.probe.look(run, given, found)
            if under_way is not None:
                take(under_way)
            under_way = found
        assert under_way is not None
        take(under_way)
        return Held([None if part is None else [np.asarray(x) for x in part] for part in totals.held], is_checked), rows


def _run(program: Any, shared: dict[Length, list[Any]], part: Part, rows: Sequence[Any]) -> Any:
    return program(*shared[part.length], *rows, jnp.asarray(part.numbers, jnp.int32))


def _rows(work: Work, part: Part) -> list[Any]:
    read: dict[int, list[Any]] = {}
    sent, found = iter(part.rows), []
    for where in work.reads[part.length]:
        if where is None:
            found.append(_plain(loaded(next(sent))))
            continue
        source, leaf = work.sources[where[0]], where[1]
        if where[0] not in read:
            length = part.length if source.lengths is not None else None
            read[where[0]] = jax.tree.leaves(source._for_devices(part.numbers, length))
        found.append(read[where[0]][leaf])
    return found


def _program(blob: bytes) -> Any:
    return _programs.get(hashlib.sha256(blob).digest(), lambda: jax_api.imported(blob))


def _plain(x: Any) -> Any:
    """Return an array as numbers: the data of random keys."""
    x = x if hasattr(x, "dtype") else np.asarray(x, jax_api.struct(x).dtype)
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.extended) else x)


# --- a task that ends its process --------------------------------------------------------------------------------


def halves(task: Task) -> Iterator[Task]:
    """Yield a task's two halves, of fewer chunks, or of fewer elements, which are repeated to fill up a chunk."""
    if len(task.parts) > 1:
        middle = len(task.parts) // 2
        yield Task(f"{task.name}a", task.parts[:middle])
        yield Task(f"{task.name}b", task.parts[middle:])
        return
    (part,) = task.parts
    count, different = len(part.numbers), list(dict.fromkeys(part.numbers.tolist()))
    middle = len(different) // 2
    for name, numbers in (("a", different[:middle]), ("b", different[middle:])):
        places = [part.numbers.tolist().index(n) for n in itertools.islice(itertools.cycle(numbers), count)]
        rows = [loaded(x)[np.asarray(places)] for x in part.rows]
        yield Task(f"{task.name}{name}", [Part(part.numbers[np.asarray(places)], part.length, rows)])


def elements_of(task: Task) -> list[int]:
    """Return the numbers of a task's elements, each once."""
    return sorted({int(n) for part in task.parts for n in part.numbers})
