"""The elements of an axis streamed through one machine, in bounded memory."""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._axes import arrays, placing
from paraxis._calls import arguments
from paraxis._host import memory, reading
from paraxis._jax import dtypes
from paraxis.engines._job import Chunk, Job, Saved, on_host
from paraxis.engines._plan import Keep, Plan
from paraxis.engines._progress import Progress
from paraxis.engines._run import Block, Pass, temporary
from paraxis.engines._stage import Stage
from paraxis.engines._tables import ENOUGH, OfTables
from paraxis.errors import DataError

_COPIES = 6  # of rows of a table: being read, put together, waiting, on their way to the devices, being computed with


@arguments.options(workers="readers", num_workers="readers")
@dataclasses.dataclass(frozen=True)
class Stream(OfTables):
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
            the data, ``"memory"`` keeps them, ``"disk"`` in temporary files. What is compared with a maximum or
            minimum over the elements, or meets it where the last bits matter, factors of a product that is
            differentiated, and what has effects, are always kept, since computed again they might be others.
        readers: threads that read elements ahead.
        folder: where a run saves what it has done, so that the same call goes on after it was killed, to the same
            bits. It is made if it is not there, is for one run at a time, and goes when the run is done.
        save_every: seconds between two savings in ``folder``.
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
    keep: Keep = "recompute"
    readers: int = 2
    folder: str | Path | None = None
    save_every: float = 10.0
    verbose: bool | Callable[[Progress], Any] = False
    not_of_tables: ClassVar = {**OfTables.not_of_tables, "readers": "one thread reads its files in order"}

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
        self._require_options()

    def _running(self) -> contextlib.AbstractContextManager[Path | None]:
        return temporary() if self.keep == "disk" else contextlib.nullcontext()

    def _chunk_size(self, job: Job) -> int:
        if self.at_once is not None:
            return self.at_once * job.placement.num_devices
        return job.remembered(f"memory={self.memory}", functools.partial(self._fitting, job))

    def rows_at_once(self, *, row_bytes: int, kept_bytes: int, num_devices: int) -> int:
        """Return how many rows of a :class:`px.Table` a solver reads at once; it asks, users need not.

        Args:
            row_bytes: of one row.
            kept_bytes: that the solver keeps beside the rows that are read.
            num_devices: over which they are laid.

        Raises:
            DataError: if ``memory`` is too little.
            ValueError: if an option is given that tables do not have.
        """
        size = f"at_once={self.at_once}" if self.memory is None else f"memory={self.memory}"
        self._require_for_tables(f"px.Stream({size})")
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
        return max(num_devices, min(found, max(ENOUGH, num_devices << 20) // row_bytes))

    def _fitting(self, job: Job) -> int:
        """Return how many elements fit into memory: what a pass needs grows linearly with them."""
        assert isinstance(self.memory, int)
        plan, devices = job.cut(job.longest).plan, job.placement.num_devices
        few, more = devices, 3 * devices
        ahead = self.readers + (1 if job.ragged is None else 2)  # once, a chunk is there with other padding, too

        def needed(count: int) -> int:
            stages = [Stage.of(one, level) for one in _plans(plan) for level in range(one.num_levels)]
            return max(s.bytes_for(count) + ahead * s.bytes_of_rows(count) for s in stages if not s.is_empty)

        least, later = needed(few), needed(more)
        each = max(1, (later - least) // (more - few))
        count = few + (self.memory - least) // each
        if count < 1:
            raise ValueError(
                f"{job.who}: memory must be at least {least:,} bytes, which one element on each of {devices} devices "
                f"takes, got {self.memory:,}; write px.Stream(memory={2 * least})"
            )
        return min(max(1, count // devices) * devices, job.axis.size)

    def _blocks(self, work: Pass, begin: int) -> Generator[Block, None, None]:
        before, wide = None, dtypes.is_wide()  # a thread does not see the width that is in force where it is started

        def rows_of(at: int) -> list[Any]:
            with jax.enable_x64(wide):
                return _laid_out(work, at, work.rows(at))

        shared = {id(x): x for values in work.shared.values() for x in values}  # those of other lengths are the same
        laid = dict(zip(shared, _everywhere(work, shared.values()), strict=True))
        calls = (functools.partial(rows_of, at) for at in range(begin, len(work.chunks)))
        with contextlib.closing(reading.ahead(calls, self.readers, self.readers)) as read:
            for at, rows in enumerate(read, begin):
                chunk = work.chunks[at]
                shared, count = [laid[id(x)] for x in work.shared[chunk.length]], len(chunk.numbers)
                run = work.stage(chunk.length).compiled(shared, rows[:-1], count)
                with _named(work, chunk):
                    found = arrays.ready(run(*arrays.ready([*shared, *rows])))
                is_checked = work.probe is not None and work.probe.at == at and _looked(work, run, shared, rows, found)
                kept = _kept(work, chunk, [found[at] for at in work.kept])
                yield Block([[found[at] for at in work.folded]], [kept], is_checked)
                jax.block_until_ready(before)  # where work is sent ahead, one chunk computes, and one waits
                before = found
                if self.memory is not None:
                    memory.give_back()


@contextlib.contextmanager
def _named(work: Pass, chunk: Chunk) -> Generator[None, None, None]:
    """Say of which elements a result is not finite, where ``jax.debug_nans`` looks."""
    try:
        yield
    except FloatingPointError as error:
        first, *others = sorted(dict.fromkeys(map(int, chunk.numbers)))
        which = f"of element {first}" if not others else f"of {len(others) + 1} elements, {first} to {others[-1]},"
        error.add_note(f"{work.job.who}: a value {which} is not finite")
        raise


def _everywhere(work: Pass, values: Iterable[Any]) -> list[Any]:
    """Return values whole on each device, if they are bound to none: else each chunk copies them there."""
    target = arrays.whole_sharding(work.job.placement)
    if target is None:
        return list(values)
    return [x if isinstance(x, jax.Array) and x.committed else arrays.put(x, target) for x in values]


def _looked(
    work: Pass, run: Callable[..., list[Any]], shared: Sequence[Any], rows: Sequence[Any], found: Sequence[Any]
) -> bool:
    """Run a chunk with other padding; return whether it had any."""
    assert work.probe is not None
    at = work.probe.at
    return work.probe.look(
        lambda rows: arrays.ready(run(*arrays.ready([*shared, *_laid_out(work, at, rows)]))), rows[:-1], found
    )


def _kept(work: Pass, chunk: Chunk, rows: Sequence[Any]) -> list[Any]:
    """Return rows of a chunk in the host's memory, or in files. Random keys stay where they are."""
    found = [on_host(x) for x in rows]
    if work.spill is None:
        return found
    name = f"{work.number}-{chunk.numbers[0]}"
    paths = [work.spill / f"{name}-{number}" for number in range(len(found))]
    return [Saved.of(x, path) if isinstance(x, np.ndarray) else x for x, path in zip(found, paths, strict=True)]


def _laid_out(work: Pass, at: int, found: Sequence[Any]) -> list[Any]:
    """Return the rows that a pass needs of a chunk, and the elements' numbers, on the devices."""
    chunk = work.chunks[at]
    cut, placement = work.cuts[chunk.length], work.job.placement.holding(len(chunk.numbers))
    dims = [cut.plan.dims[v] or 0 for v in work.stage(chunk.length).rows]
    rows = [_laid(x, dim, placement) for x, dim in zip(found, dims, strict=True)]
    return arrays.ready([*rows, *_everywhere(work, [chunk.numbers.astype(np.int32)])])


def _plans(plan: Plan) -> Iterator[Plan]:
    """Yield a plan, and those of loops in it around passes."""
    yield plan
    for step, loop in plan.loops.items():
        if plan.kinds[step] == "loop":
            for body in loop.bodies:
                yield from _plans(body)


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
