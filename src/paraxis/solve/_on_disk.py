"""Rows that stay on disk: read a chunk at a time, in passes that a program contains as one operation each.

Only ``X`` stays there. What has a few numbers for each row (targets, weights, predictions) lies on the devices in
whole, so a line search reads nothing. The rows of a chunk are laid over all devices in blocks; a device has its blocks
of all chunks, one after the other. That is the order of all arrays by row, which so are in blocks like any rows.
"""

import contextlib
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._axes import arrays, layout, placing
from paraxis._axes.axis import Axis
from paraxis._axes.placing import Placement
from paraxis._calls import arguments
from paraxis._core import maps
from paraxis._host import memory, reading
from paraxis._host.records import Described
from paraxis._jax import jax_api
from paraxis._tables import Blocks, Table
from paraxis.errors import AxisError, DataError, DeviceError, LoweringError
from paraxis.solve import _blocks as in_blocks
from paraxis.solve._blocks import OfBlock
from paraxis.solve._cut import PASS

_T = TypeVar("_T")

_AHEAD = 1  # chunks that wait, read
_TOGETHER = 16  # of so many rows, large blocks are multiples: so each begins where a CPU may use it without a copy
_BETWEEN_TRIMS = 8  # chunks: trimming takes about a third of what a small chunk does
_KEPT = 8  # numbers by row that a solver holds beside X: targets, weights, predictions, steps of these
_ROWS_PER_FEATURE = 8

MAX_FEATURES = 4096
"""Columns up to which a matrix ``(d, d)`` is made: it is on every device, and factored in ``(d, d, d)`` operations."""


class Engine(Protocol):
    """An engine as it is asked here, such as ``px.Stream``."""

    def rows_at_once(self, *, row_bytes: int, kept_bytes: int, num_devices: int) -> int:
        """Return how many rows of a table are read at once, of so many bytes each, beside what is kept."""
        ...

    def rows_shown(self) -> contextlib.AbstractContextManager[Callable[[int, int, int], None]]:
        """Give what is called with the rows that are done, the number of all, and that of the pass."""
        ...

    def rows_saved(self, described: Described) -> contextlib.AbstractContextManager["Journal | None"]:
        """Give where a run is saved that depends on these texts and arrays, if it is."""
        ...


class Journal(Protocol):
    """The place where a run is saved."""

    def state(self) -> tuple[list[int], list[Any]] | None:
        """Return what was saved last."""
        ...

    def save_state(self, numbers: Sequence[int], arrays: Sequence[Any], *, now: bool = False) -> None:
        """Save the run's whole state, if it is time."""
        ...


def blocks_of(who: str, table: Table, engine: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield a table's rows and targets once, in blocks on the host, as many at once as the engine says; tell how far.

    Raises:
        TypeError: if the engine does not say.
        ValueError: if it is to save what is not saved.
    """
    _require_engine(who, engine)
    if getattr(engine, "folder", None) is not None:
        raise ValueError(
            f"{who}: a table is read only once for that, and nothing is saved, got engine.folder={engine.folder!r}; "
            f"write engine=px.Stream(memory='2GB')"
        )
    if not len(table):
        yield np.zeros(table.shape, table.dtype), np.zeros(0)
        return
    size = engine.rows_at_once(row_bytes=table.dtype.itemsize * table.shape[1], kept_bytes=0, num_devices=1)
    done = 0
    with engine.rows_shown() as show:
        for X, y in table.blocks(size):
            yield X, y
            done += len(X)
            show(done, len(table), 1)


def _require_engine(who: str, engine: Any) -> None:
    if isinstance(engine, type) or not hasattr(engine, "rows_at_once"):
        raise TypeError(
            f"{who}: a table is read in turns, and engine must say how, got {arguments.described(engine)}; write "
            f"engine=px.Stream(memory='2GB')"
        )


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The plan by which rows are dealt out to chunks and devices.

    Args:
        num_rows: how many are real; padding is behind them.
        count: of the chunks.
        length: of a chunk's block on each device, in rows.
        blocks: where these lie.
    """

    num_rows: int
    count: int
    length: int
    blocks: Placement

    @property
    def at_once(self) -> int:
        return self.blocks.size * self.length

    def dealt(self, x: np.ndarray) -> np.ndarray:
        """Return padded values ``(count * at_once, ...)`` of the rows in the order in which the devices have them."""
        parts = x.reshape(self.count, self.blocks.size, self.length, *x.shape[1:])
        return np.ascontiguousarray(parts.swapaxes(0, 1)).reshape(x.shape)

    def by_block(self, x: Any, dim: int) -> np.ndarray:
        """Return values by row, in the order of the devices, by block, in that of the rows.

        ``(..., n, ...)``, ``n`` at ``dim`` → ``(count * num_devices, ..., length, ...)``.
        """
        x = np.asarray(x)
        dim %= x.ndim
        parts = x.reshape(*x.shape[:dim], self.blocks.size, self.count, self.length, *x.shape[dim + 1 :])
        return np.moveaxis(parts, (dim + 1, dim), (0, 1)).reshape(-1, *x.shape[:dim], self.length, *x.shape[dim + 1 :])

    def in_order(self, x: np.ndarray) -> np.ndarray:
        """Return values by block in the order of the devices: ``(count * num_devices, ..., length)`` → ``(..., n)``."""
        parts = x.reshape(self.count, self.blocks.size, *x.shape[1:])
        return np.moveaxis(parts, (1, 0), (-3, -2)).reshape(*x.shape[1:-1], -1)

    def places(self, numbers: np.ndarray) -> np.ndarray:
        """Return where rows are in that order."""
        chunk, rest = np.divmod(numbers, self.at_once)
        block, within = np.divmod(rest, self.length)
        return (block * self.count + chunk) * self.length + within


class Source:
    """A table's rows as passes read them. It is read once when it is made, for what does not stay on disk.

    Attributes:
        dtype: of the rows as devices have them: that of the table, unless JAX has no float64.
        y: targets ``(n,)``, in the order of the table.
        means: of the columns, ``(d,)``.
        num_passes: how often it was read so far.
        some: a sample of the rows, ``(num, d)``: those of :func:`sample_of`, if there are not too many columns.

    Raises:
        DataError: if the table has no rows, or one that cannot be used.
    """

    def __init__(self, who: str, table: Table, engine: Any, axis: Axis | None) -> None:
        _require_engine(who, engine)
        num_rows, num_features = table.shape
        if not num_rows:
            raise DataError(f"{who}: the table must have at least one row, got {table!r}")
        self.shape, self.dtype = table.shape, np.dtype(jax.dtypes.canonicalize_dtype(table.dtype))
        self._sampled = sample_of(num_rows if num_features <= MAX_FEATURES else 0, num_features)
        size = self.dtype.itemsize
        blocks = _blocks_over(who, Axis("rows", num_rows) if axis is None else axis)
        kept = size * (_KEPT * num_rows + len(self._sampled) * num_features)
        most = engine.rows_at_once(row_bytes=size * num_features, kept_bytes=kept, num_devices=blocks.size)
        count = -(-num_rows // min(most, num_rows))
        self.table, self.engine = table, engine
        self._show: Callable[[int, int, int], None] | None = None
        length = -(-num_rows // (count * blocks.size))
        length += -length % _TOGETHER if length >= 64 * _TOGETHER else 0
        self.chunks = Chunks(num_rows, -(-num_rows // (length * blocks.size)), length, blocks)
        self.num_passes = 0
        self._elsewhere: Any = None
        self._survey()

    def __len__(self) -> int:
        return self.shape[0]

    def _survey(self) -> None:
        targets, some = [], []
        sums, start = np.zeros(self.shape[1]), 0
        for X, y in self._shown(self._counted(checked=True)):
            sums += np.ones(len(X), X.dtype) @ X
            step = self._sampled.step
            some.append(X[-start % step :: step].copy() if self._sampled else X[:0])
            targets.append(y.copy())
            start += len(X)
        self.y = self.table._as_targets(np.concatenate(targets))
        self.means = (sums / len(self)).astype(self.dtype)
        self.some = np.concatenate(some).astype(self.dtype, copy=False)

    def weighted_means(self, weight: np.ndarray) -> np.ndarray:
        """Return the columns' means with weights ``(n,)``; if these differ, the rows are read once for that."""
        if np.all(weight == weight[0]):
            return self.means
        shares, sums, start = weight / weight.sum(dtype=np.float64), np.zeros(self.shape[1]), 0
        for X, _ in self._shown(self._counted(checked=False)):
            sums += shares[start : start + len(X)].astype(X.dtype) @ X
            start += len(X)
        return sums.astype(self.dtype)

    def read(self) -> Iterator[jax.Array]:
        """Yield the chunks on the devices, all of the same number of rows."""
        wide = self.dtype == np.float64

        def laid() -> Iterator[jax.Array]:
            for given, _ in self._counted(checked=False):
                X = given.astype(self.dtype, copy=False)
                with jax.enable_x64(wide):  # which holds for a thread
                    found = arrays.in_blocks(layout.repeat_last(X, self.chunks.at_once), self.chunks.blocks)
                yield found

        return self._shown(laid())

    def mapped(self, key: Any, fn: Callable[..., Any], *args: Any) -> Any:
        """Return ``fn(X, *args)`` of all blocks, where the engine has them; functions of one key are the same."""
        self.num_passes += 1
        chunks = self.chunks
        if self._elsewhere is None:
            blocks = Blocks(self.table, chunks.count * chunks.blocks.size, chunks.length, self.dtype)
            self._elsewhere = self.engine.of_blocks(blocks)
        with self.shown() as show:

            def show_rows(blocks: int) -> None:
                show(min(blocks * chunks.length, len(self)), len(self), self.num_passes)

            return self._elsewhere.mapped(key, fn, args, show_rows)

    def _shown(self, chunks: Iterator[_T]) -> Iterator[_T]:
        """Yield the chunks of a pass, read ahead; tell of each that was used."""
        with self.shown() as show, contextlib.closing(reading.items_ahead(chunks, _AHEAD)) as ahead:
            for number, chunk in enumerate(ahead, 1):
                yield chunk
                show(min(number * self.chunks.at_once, len(self)), len(self), self.num_passes)

    @contextlib.contextmanager
    def shown(self) -> Iterator[Callable[[int, int, int], None]]:
        """Within, all passes are shown in one place."""
        if self._show is not None:
            yield self._show
            return
        with self.engine.rows_shown() as show:
            self._show = show
            try:
                yield show
            finally:
                self._show = None

    def _counted(self, *, checked: bool) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        self.num_passes += 1
        count = 0
        for X, y in self.table._blocks(self.chunks.at_once, checked=checked):
            count += len(X)
            yield X, y
        if count != self.chunks.num_rows:
            raise DataError(
                f"Table: {self.table!r} gave {count:,} rows, and had {self.chunks.num_rows:,} when it was made; the "
                f"rows must stay the same for as long as it is used"
            )

    def padded(self, x: np.ndarray) -> jax.Array:
        """Return values by row, padded with the last, in the order of the devices, on these."""
        chunks = self.chunks
        found = chunks.dealt(layout.repeat_last(x, chunks.count * chunks.at_once))
        return arrays.in_blocks(found, chunks.blocks)

    def weights(self, weight: np.ndarray) -> jax.Array:
        """Return the same of weights: padding has none."""
        chunks = self.chunks
        found = chunks.dealt(layout.padded_weights(weight, chunks.count * chunks.at_once))
        return arrays.in_blocks(found, chunks.blocks)


def _blocks_over(who: str, axis: Axis) -> Placement:
    placement = placing.place(axis)
    if placing.spans_processes(placement):
        raise DeviceError(f"{who}: a table is read by one process; write it without px.initialize()")
    if placement.is_explicit:
        raise AxisError(f"{who}: a table's rows are laid over Auto mesh axes; leave out jax.set_mesh(…)")
    return placing.blocks(placement)


def sample_of(num_rows: int, num_features: int) -> range:
    """Return the numbers of rows that tell a Gram matrix. They do not depend on where the rows lie, nor on padding."""
    return range(0, num_rows, max(1, num_rows // (_ROWS_PER_FEATURE * num_features)))


_sources: weakref.WeakValueDictionary[int, Source] = weakref.WeakValueDictionary()
_tokens = itertools.count(1)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["token", "shift"], meta_fields=["shape", "dtype", "chunks"]
)
@dataclasses.dataclass(frozen=True)
class OnDisk:
    """A stand-in for ``X`` in programs, ``(num_padded, d)``: not the rows, but which they are.

    Args:
        token: the number of their source: a value, so that programs are the same for all tables of the same size.
        shift: what is subtracted from each column, ``(d,)``; or ``None``.
        shape, dtype: those of ``X``.
        chunks: how it is read.
    """

    token: Any
    shift: Any
    shape: tuple[int, int]
    dtype: np.dtype[Any]
    chunks: Chunks
    ndim = 2

    @classmethod
    def of(cls, source: Source, shift: np.ndarray | None) -> "OnDisk":
        """Return what stands for a source, which is there for as long as this is."""
        number = next(_tokens)
        chunks = source.chunks
        shape = chunks.count * chunks.at_once, source.shape[1]
        found = cls(np.int32(number), shift, shape, source.dtype, chunks)
        _sources[number] = source
        object.__setattr__(found, "_source", source)
        return found

    @property
    def source(self) -> Source:
        return _source(self.token)

    def __repr__(self) -> str:
        return f"<on disk: {self.dtype} {self.shape}>"


def tells_in_type(design: Any) -> bool:
    """Return whether rows are an array whose type says how it lies, on an Explicit mesh."""
    return not isinstance(design, OnDisk) and layout.tells_in_type(design)


def _source(token: Any) -> Source:
    try:
        return _sources[int(token)]
    except KeyError:
        raise DataError(
            "rows: the table of these rows is gone; keep what px.solve.rows(table, engine=…) returned"
        ) from None


@contextlib.contextmanager
def shown(operands: Any) -> Iterator[None]:
    """Within, all passes over rows on disk that are among the operands are shown in one place."""
    with contextlib.ExitStack() as stack:
        for design in _designs(operands):
            stack.enter_context(design.source.shown())
        yield


@contextlib.contextmanager
def saved(start: Any, operands: Any, solver: str) -> Iterator[Journal | None]:
    """Give where a run over rows on disk is saved, if it is to be; when it is done, nothing is left there.

    Args:
        start: the run's state before the first iteration. It was computed from all rows, and so tells them.
        operands: what else is given to each iteration, rows on disk among them.
        solver: its options.
    """
    designs = _designs(operands)
    if not designs or getattr(designs[0].source.engine, "folder", None) is None:
        yield None
        return
    others = [x for x in jax.tree.leaves(operands, is_leaf=_is_on_disk) if not _is_on_disk(x)]
    rows = [x for design in designs for x in (str(design.source.table.columns), *jax.tree.leaves(design.shift))]
    rows += [f"{x.chunks.count} {x.chunks.length} {x.chunks.blocks.size}" for x in designs[1:]]
    chunks, values = designs[0].chunks, list(map(jnp.asarray, others))
    of_rows = [x.ndim > 0 and chunks.num_rows <= max(x.shape) for x in values]
    described: Described = {
        "chunks": {
            "the number of rows": chunks.num_rows,
            "the number of devices": chunks.blocks.size,
            "at_once, per device": chunks.length,
        },
        "options of the solver": [solver],
        "targets and weights": [x for x, is_of in zip(values, of_rows, strict=True) if is_of],
        "arguments": [x for x, is_of in zip(values, of_rows, strict=True) if not is_of],
        "rows": [*rows, *map(jnp.asarray, jax.tree.leaves(start))],
    }
    with designs[0].source.engine.rows_saved(described) as journal:
        yield journal


def _designs(operands: Any) -> list[OnDisk]:
    return [x for x in jax.tree.leaves(operands, is_leaf=_is_on_disk) if _is_on_disk(x)]


def _is_on_disk(x: Any) -> bool:
    return isinstance(x, OnDisk) and not arrays.is_traced(x.token)


def passed(fn: OfBlock, design: OnDisk, targets: Any, shared: Any, rows: Any) -> tuple[Any, Any]:
    """Return what a function of blocks keeps and sums, as :func:`_blocks.mapped`, of rows that are read for it.

    Args:
        fn: of ``(shared, (X, targets), rows)``. It is compiled once: the same function each time.
        design: the rows.
        targets: by row, ``(n, ...)``.
        shared: the same for all rows.
        rows: by row, ``(..., n)``.
    """
    operands, structure = jax.tree.flatten((design.shift, targets, shared, rows))
    params = {"fn": fn, "structure": structure, "num_features": design.shape[1], "chunks": design.chunks}
    params["dtype"] = design.dtype
    found = _pass_p.bind(design.token, *operands, **params)
    return jax.tree.unflatten(jax.tree.structure(_results(*operands, **params)), found)


def _results(*operands: Any, fn: OfBlock, structure: Any, chunks: Chunks, num_features: int, dtype: Any) -> Any:
    """Return the types of what a pass keeps, ``(..., n)``, and sums."""
    _, targets, shared, rows = jax.tree.unflatten(structure, [_struct(x) for x in operands])
    X = jax.ShapeDtypeStruct((chunks.length, num_features), dtype)
    of_block = functools.partial(_with_length, chunks.length)
    first = X, jax.tree.map(lambda x: of_block(x, 0), targets)
    kept, sums = jax.eval_shape(fn, shared, first, jax.tree.map(lambda x: of_block(x, -1), rows))
    total = chunks.count * chunks.at_once
    return jax.tree.map(lambda x: _with_length(total, x, -1), kept), sums


def _struct(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))


def _with_length(length: int, x: Any, dim: int) -> jax.ShapeDtypeStruct:
    shape = [*x.shape]
    shape[dim] = length
    return jax.ShapeDtypeStruct(tuple(shape), x.dtype)


def _avals(token: Any, *operands: Any, **params: Any) -> list[Any]:
    return [jax_api.ShapedArray(x.shape, x.dtype) for x in jax.tree.leaves(_results(*operands, **params))]


def _evaluated(token: Any, *operands: Any, fn: OfBlock, structure: Any, chunks: Chunks, **kind: Any) -> list[Any]:
    """Read all rows once."""
    source = _source(token)
    shift, targets, shared, rows = jax.tree.unflatten(structure, operands)
    if hasattr(source.engine, "of_blocks"):
        return _elsewhere(source, fn, structure, shift, targets, shared, rows)
    shift, shared = arrays.everywhere((shift, shared), chunks.blocks)
    results = _results(*operands, fn=fn, structure=structure, chunks=chunks, **kind)
    kinds = tuple(tuple((x.shape, x.dtype) for x in jax.tree.leaves(part)) for part in results)
    kept, sums = _nothing(chunks.blocks, kinds, targets)
    lost, before = [jnp.zeros_like(x) for x in sums], ()
    for number, X in enumerate(source.read()):
        given = arrays.ready((np.int32(number), X, shift, shared, targets, rows, kept, sums, lost))
        kept, sums, lost, done = _chunk(fn, chunks.length, chunks.blocks, *given)
        jax.block_until_ready(before)  # where work is sent ahead, one chunk computes, and one waits
        before = done
        if number % _BETWEEN_TRIMS == 0:
            memory.give_back()
    return [*kept, *sums]


def _elsewhere(
    source: Source, fn: OfBlock, structure: Any, shift: Any, targets: Any, shared: Any, rows: Any
) -> list[Any]:
    """Read all rows once, where the engine does: each device's block of each chunk is an element of an axis."""
    chunks = source.chunks
    axis = Axis("blocks", chunks.count * chunks.blocks.size)

    def of_block(shared: Any, own: Any) -> Any:
        (shift, shared), (X, targets, rows) = shared, own
        return fn(shared, (X if shift is None else X - shift, targets), rows)

    def of_blocks(X: Any, shift: Any, targets: Any, shared: Any, rows: Any) -> Any:
        return maps.map_and_sum(of_block, (shift, shared), (X, targets, rows), placing.place(axis))

    own = jax.tree.map(lambda x: chunks.by_block(x, 0), targets), jax.tree.map(lambda x: chunks.by_block(x, -1), rows)
    found, sums = source.mapped((fn, structure), of_blocks, shift, own[0], shared, own[1])
    kept = [chunks.in_order(x) for x in jax.tree.leaves(found)]
    laid = _laid(chunks.blocks, kept) if kept else []
    return [*laid, *arrays.everywhere(jax.tree.leaves(sums), chunks.blocks)]


@functools.partial(jax.jit, static_argnums=0)
def _laid(blocks: Placement, kept: list[Any]) -> list[Any]:
    """Return values by row as they lie where they are computed."""
    return in_blocks.mapped(lambda shared, first, last: (last, ()), blocks, (), (), kept)[0]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _nothing(blocks: Placement, kinds: Any, rows: Any) -> tuple[list[Any], list[Any]]:
    """Return zeros that lie as what is kept and summed will."""

    def of_block(shared: Any, first: Any, last: Any) -> Any:
        of_rows, sums = kinds
        kept = [jnp.zeros((*shape[:-1], shape[-1] // blocks.size), dtype) for shape, dtype in of_rows]
        return kept, [jnp.zeros(shape, dtype) for shape, dtype in sums]

    return in_blocks.mapped(of_block, blocks, (), rows, ())


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=(9, 10, 11))
def _chunk(
    fn: OfBlock,
    length: int,
    blocks: Placement,
    number: Any,
    X: Any,
    shift: Any,
    shared: Any,
    targets: Any,
    rows: Any,
    kept: list[Any],
    sums: list[Any],
    lost: list[Any],
) -> tuple[list[Any], list[Any], list[Any], Any]:
    """Return what is kept, and the sums, with one more chunk in them; ``lost`` is what rounding took from these."""

    def of_block(given: Any, first: Any, last: Any) -> Any:
        number, shift, shared = given
        X, targets = first
        rows, kept = last
        start = number * length

        def own(x: Any, dim: int) -> Any:
            return jax.lax.dynamic_slice_in_dim(x, start, length, dim % x.ndim)

        X = X if shift is None else X - shift
        first = X, jax.tree.map(lambda x: own(x, 0), targets)
        found, parts = fn(shared, first, jax.tree.map(lambda x: own(x, -1), rows))
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=start)
        kept = [put(whole, x, axis=x.ndim - 1) for whole, x in zip(kept, jax.tree.leaves(found), strict=True)]
        return kept, jax.tree.leaves(parts)

    kept, parts = in_blocks.mapped(of_block, blocks, (number, shift, shared), (X, targets), (rows, kept))
    rest = [x - gone for x, gone in zip(parts, lost, strict=True)]  # Kahan's summation
    new = [total + x for total, x in zip(sums, rest, strict=True)]
    lost = [(one - total) - x for one, total, x in zip(new, sums, rest, strict=True)]
    return kept, new, lost, number + 1


def _refused() -> Any:
    raise LoweringError(
        "rows on disk are read by Python, outside of programs: they cannot be used within jax.jit, jax.grad or "
        "jax.vmap; write solver.run(params, data) as it is"
    )


_pass_p = jax_api.define_outside(PASS, _avals, _evaluated, _refused)
