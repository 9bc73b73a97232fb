"""Rows of a table: read a chunk at a time, in passes that Python makes, with one compiled function for each chunk.

Only ``X`` stays on disk. What has a few numbers for each row (targets, weights, predictions) lies on the devices, so a
line search reads nothing; each device has its rows of all chunks, one after the other.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import arrays, placing
from paraxis._core.placing import Axis
from paraxis._host import reading
from paraxis._tables import Table
from paraxis.errors import AxisError, DataError, DeviceError

_KEPT = 8  # numbers by row that a solver holds beside X: targets, weights, predictions, steps of these
_ROWS_PER_FEATURE = 6
# Columns up to which a matrix (d, d) is made: it is on every device, and inverted in (d, d, d) operations.
MAX_FEATURES = 4096


def while_loop(in_python: bool, go_on: Callable[[Any], Any], body: Callable[[Any], Any], carry: Any) -> Any:
    """Loop as ``jax.lax.while_loop``, or, around passes over a table, in Python."""
    if not in_python:
        return jax.lax.while_loop(go_on, body, carry)
    while bool(go_on(carry)):
        carry = body(carry)
    return carry


@contextlib.contextmanager
def saved(options: str, begin: Any, arguments: Any) -> Iterator[tuple[Any, Callable[[Any], None]]]:
    """Give where a run begins or was saved, a pytree, and a function that saves another: over a table, into its folder.

    A saved run is this one if options, arguments and ``begin`` are. When it is done, nothing is left there.
    """
    rows = next((x for x in jax.tree.leaves(arguments) if isinstance(x, TableRows)), None)
    if rows is None or rows.engine.checkpoint is None:
        yield begin, lambda _: None
        return
    leaves, structure = jax.tree.flatten(begin)
    values = [x for x in jax.tree.leaves((arguments, leaves, rows.shift)) if not isinstance(x, TableRows)]
    chunks = f"{rows.num_rows} rows, {rows.blocks.size} devices, {rows.length} rows at once, of {rows.table.columns}"
    with rows.engine.saved(lambda: [options, chunks, *map(jnp.asarray, values)]) as journal:

        def laid(x: np.ndarray, like: Any) -> Any:
            if isinstance(like, jax.Array):
                return jax.device_put(x, like.sharding if like.committed else None)
            return x if isinstance(like, np.ndarray) else type(like)(x)

        begin = begin if (state := journal.state) is None else structure.unflatten(map(laid, state, leaves))
        yield begin, lambda tree: journal.keep(lambda: jax.tree.leaves(tree))


def sample_of(count: Any, num_rows: int, num_features: int) -> Any:
    """Return the numbers of the rows that tell a Gram matrix, each of its own part of the first ``count``.

    Where in its part a row stands is random, once for all: what returns in equal steps is not always met, or never.
    If there are fewer than that tell it, further numbers follow.
    """
    xp, most = jnp if isinstance(count, jax.Array) else np, min(num_rows, _ROWS_PER_FEATURE * num_features)
    num = xp.clip(count, 1, max(1, most))
    starts = np.arange(most + 1)
    starts = starts * (count // num) + starts * (count % num) // num
    widths = starts[1:] - starts[:-1]
    draws = xp.asarray(np.random.default_rng(0).random(most), jax.dtypes.canonicalize_dtype(float))
    within = (draws * widths.astype(draws.dtype)).astype(widths.dtype)
    return starts[:-1] + xp.minimum(within, widths - 1)


class TableRows:
    """A table's rows as an objective takes them for ``X``, ``(num_padded, d)``; made by :func:`paraxis.solve.rows`.

    The table is read once when this is made, for what does not stay on disk.

    Attributes:
        shape, dtype: those of ``X`` on the devices, with padding; float32 unless JAX has float64.
        num_rows, num_passes: of the table; how often it was read so far.
        expected_passes: how often it will have been read, if a solver expects that.
        y, means, shift: targets ``(n,)`` in the table's order; of each column, ``(d,)``, and what is subtracted.
        sampled, some: numbers of some rows, and these, ``(num, d)``.
    """

    shift: Any = None
    expected_passes: int | None = None
    ndim = 2

    def __init__(self, who: str, table: Table, y: Any, engine: Any, axis: Axis | None) -> None:
        if y is not None:
            raise TypeError(f"{who}: y must be left out, as the table has it")
        if isinstance(engine, type) or not hasattr(engine, "rows_at_once"):
            raise TypeError(f"{who}: a table is read in parts; write engine=px.Stream(memory='2GB'), not {engine!r}")
        self.table, self.engine = table, engine
        self.num_rows, num_features = table.shape
        if not self.num_rows:
            raise DataError(f"{who}: the table must have at least one row, got {table!r}")
        self.dtype = np.dtype(jax.dtypes.canonicalize_dtype(table.dtype))
        self.sampled = sample_of(self.num_rows, *(table.shape if num_features <= MAX_FEATURES else (0, 0)))
        placement = placing.place(Axis("rows", self.num_rows) if axis is None else axis)
        if placement.spans_processes:
            raise DeviceError(f"{who}: a table is read by one process; write it without px.initialize()")
        if placement.is_explicit:
            raise AxisError(f"{who}: a table's rows are laid over Auto mesh axes; leave out jax.set_mesh(…)")
        self.blocks = placement.holding(placement.num_devices)
        kept_bytes = self.dtype.itemsize * (_KEPT * self.num_rows + len(self.sampled) * num_features)
        row_bytes, devices = self.dtype.itemsize * num_features, self.blocks.size
        most = engine.rows_at_once(row_bytes=row_bytes, kept_bytes=kept_bytes, num_devices=devices)
        self.length = -(-self.num_rows // (-(-self.num_rows // most) * devices))
        self.at_once = self.length * devices
        self.count = -(-self.num_rows // self.at_once)
        self.shape = self.count * self.at_once, num_features
        self.num_passes = 0
        self._show: Callable[[int, int, int, int | None], None] | None = None
        targets, some, sums = [], [], np.zeros(num_features)
        for number, (X, y) in enumerate(self._shown(table.blocks(self.at_once))):
            sums += np.ones(len(X), X.dtype) @ X
            within = self.sampled - number * self.at_once
            some.append(X[within[(within >= 0) & (within < len(X))]])
            targets.append(y)
        self.y = np.concatenate(targets)
        self.means = (sums / self.num_rows).astype(self.dtype)
        self.some = np.concatenate(some).astype(self.dtype, copy=False)

    def mapped(self, fn: Callable[..., Any], static: tuple[Any, ...], targets: Any, shared: Any, rows: Any) -> Any:
        """Read all rows once: ``fn(*static, X, targets, shared, rows)`` of each chunk.

        The function returns what is kept by row, ``(..., n)``, and what is summed; targets, a tree, are ``(n, ...)``
        and rows ``(..., n)``, in the order of the devices. It is compiled once for the same function and static values.
        """
        everywhere = arrays.sharding(self.blocks, ())
        shift, shared = arrays.device_put((self.shift, shared), everywhere)
        of_chunk, operands = functools.partial(_of_chunk, fn, static, self.blocks.size), (shift, shared, targets, rows)
        X = jax.ShapeDtypeStruct((self.at_once, self.shape[1]), self.dtype)
        by_row, sums = jax.eval_shape(of_chunk, np.int32(0), X, *operands)

        def zeros(x: Any) -> jax.Array:
            return jnp.zeros((*x.shape[:-1], self.shape[0]), x.dtype, device=arrays.sharding(self.blocks, x.ndim - 1))

        totals = arrays.device_put(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), sums), everywhere)
        carry, before = (jax.tree.map(zeros, by_row), totals), None
        for number, chunk in enumerate(self._shown(self._on_devices())):
            carry, done = _chunk(fn, static, self.blocks.size, carry, np.int32(number), chunk, *operands)
            jax.block_until_ready(before)  # where work is sent ahead, one chunk computes, and one waits
            before = done
        return carry

    def _on_devices(self) -> Iterator[jax.Array]:
        """Yield the chunks, all of the same number of rows."""
        for rows, _ in self.table._blocks(self.at_once):
            X = arrays.repeat_last(rows.astype(self.dtype, copy=False), self.at_once)
            with jax.enable_x64(self.dtype == np.float64):  # which holds for a thread
                chunk = arrays.device_put(X, arrays.sharding(self.blocks))
            yield chunk

    def _shown(self, chunks: Iterator[Any]) -> Iterator[Any]:
        """Yield the chunks of a pass, read ahead; tell of each that was used."""
        self.num_passes += 1
        with self.shown() as show, contextlib.closing(reading.items_ahead(chunks, 1)) as ahead:
            for number, chunk in enumerate(ahead, 1):
                yield chunk
                done, expected = min(number * self.at_once, self.num_rows), self.expected_passes
                show(done, self.num_rows, self.num_passes, expected and max(expected, self.num_passes))

    @contextlib.contextmanager
    def shown(self) -> Iterator[Callable[[int, int, int, int | None], None]]:
        """Within, all passes are shown in one place."""
        outer = self._show
        with self.engine.rows_shown() if outer is None else contextlib.nullcontext(outer) as show:
            self._show = show
            try:
                yield show
            finally:
                self._show = outer

    def laid(self, x: np.ndarray, *, is_weight: bool = False) -> jax.Array:
        """Return values by row ``(n, ...)``, padded, on the devices in their order; weights with zeros."""
        padded = np.pad(x, (0, self.shape[0] - len(x))) if is_weight else arrays.repeat_last(x, self.shape[0])
        parts = padded.reshape(self.count, self.blocks.size, self.length, *x.shape[1:]).swapaxes(0, 1)
        return arrays.device_put(np.ascontiguousarray(parts).reshape(padded.shape), arrays.sharding(self.blocks))

    def places(self, numbers: np.ndarray) -> np.ndarray:
        """Return where rows are in the order of the devices."""
        chunk, rest = np.divmod(numbers, self.at_once)
        block, within = np.divmod(rest, self.length)
        return (block * self.count + chunk) * self.length + within


def _of_chunk(
    fn: Any, static: Any, devices: int, number: Any, X: jax.Array, shift: Any, shared: Any, targets: Any, rows: Any
) -> Any:
    """Return what the function gives for a chunk."""

    def chunk(x: jax.Array, dim: int) -> jax.Array:
        dim %= x.ndim
        parts = x.reshape(*x.shape[:dim], devices, -1, len(X) // devices, *x.shape[dim + 1 :])
        part = jax.lax.dynamic_index_in_dim(parts, number, dim + 1, keepdims=False)
        return part.reshape(*x.shape[:dim], len(X), *x.shape[dim + 1 :])

    targets, rows = jax.tree.map(lambda x: chunk(x, 0), targets), jax.tree.map(lambda x: chunk(x, -1), rows)
    return fn(*static, X if shift is None else X - shift, targets, shared, rows)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=3)
def _chunk(fn: Any, static: Any, devices: int, carry: Any, number: Any, *operands: Any) -> Any:
    """Return what is kept, and the sums, with one more chunk in them; and the next number."""

    def put(whole: jax.Array, x: jax.Array) -> jax.Array:
        part = x.reshape(*x.shape[:-1], devices, 1, -1)
        parts = whole.reshape(*whole.shape[:-1], devices, -1, part.shape[-1])
        return jax.lax.dynamic_update_slice_in_dim(parts, part, number, parts.ndim - 2).reshape(whole.shape)

    values, sums = _of_chunk(fn, static, devices, number, *operands)
    return (jax.tree.map(put, carry[0], values), jax.tree.map(jnp.add, carry[1], sums)), number + 1
