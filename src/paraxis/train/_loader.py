"""Batches out of a source: in an order that the seed decides, read ahead, and laid out over the devices."""

import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Generator, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import check, jax_api, pytrees
from paraxis._core.placing import Axis
from paraxis._host import reading
from paraxis.errors import DataError
from paraxis.train import _batches, _sources
from paraxis.train._sources import Batches, Order, Position, Rows, generators, noted, source_of, to_host


def loader(
    source: Any,
    batch_size: int | None = None,
    *,
    axis: str | Axis = "batch",
    shuffle: bool | None = None,
    seed: int = 0,
    drop_last: bool = False,
    read_ahead: int = 2,
    transform: Callable[..., Any] | None = None,
    rows: Any = None,
    weights: Any = None,
    threads: int = 1,
) -> "Loader":
    """Return batches of rows, shuffled with a seed, read ahead by a thread and distributed over the devices.

    The rows of a batch depend only on the seed, the batch size and the number of the batch, not on the devices, the
    processes or earlier reads. So to resume later, it is enough to save the number of batches taken. Each process reads
    only the rows of its own devices.

    The source is one of these:

    * a tree of arrays ``(num_rows, ...)``: of NumPy, JAX or PyTorch, or in a file (``np.load(path, mmap_mode="r")``,
      HDF5), of which only the rows of the batch are read;
    * an object with ``__len__`` and ``__getitem__``, which returns a row, a tree, by its number, such as a PyTorch
      ``Dataset`` or a Grain ``MapDataset``; if it has ``__getitems__``, that is called once per batch instead;
    * an iterable of batches that can be iterated again, such as a PyTorch ``DataLoader``. Its batches, of any size, and
      their order are kept: leave out ``batch_size``. Each process iterates over all batches and takes its rows, so the
      order must be the same in all; to resume, earlier batches are read and dropped;
    * a function that returns such an iterable: ``source(epoch)``, whose earlier epochs are not read, or ``source()``.

    Args:
        source: where the rows come from.
        batch_size: rows of a batch, over all devices together. It need not be a multiple of anything.
        axis: the axis of the rows: its name, or a ``px.Axis`` with a mesh, whose size does not matter.
        shuffle: whether each epoch has its own random order. The default is yes, unless the source yields batches.
        seed: seed of the order and of ``random``, at least 0.
        drop_last: whether to skip the last rows of an epoch if they are fewer than ``batch_size``.
        read_ahead: number of batches to prepare in advance; 0: none, and no thread. Those of arrays in memory, of less
            than 1 MiB and without a transform, are read when they are needed, which is faster.
        transform: a function of a tree of NumPy arrays ``(rows, ...)`` to another with as many rows, run by the thread.
            It may have a parameter ``random``: a ``numpy.random.Generator`` for each row, keyed by (seed, epoch, row).
            With several processes, it must treat each row by itself, which is tried on the first rows.
        rows: numbers of the source's rows, ``(m,)``, which are then all; or ``(size, m)``, of arrays in memory: those
            of each member of an ensemble, as for bagging.
        weights: of the rows, ``(num_rows,)``: an epoch has as many, drawn by their weights with replacement.
        threads: number of threads that make batches, for rows that are slow to read or transform; as many batches are
            prepared in advance. All of them call the source and ``transform``.

    Returns:
        A :class:`Loader`. Its batches are trees like the rows: of arrays over the devices; or, of a batch whose rows
        do not divide by the devices, on the host, where the step pads them.

    Raises:
        DataError: if the source cannot be read, an argument does not fit it, or leaves or rows do not fit together.
            While reading, errors name the batch and, if possible, the row.

    Communicates: sends each device its rows; nothing between devices or processes.

    Example:
        >>> import numpy as np, paraxis as px
        >>> data = px.loader({"x": np.ones((10, 3)), "y": np.arange(10)}, 4, seed=1)
        >>> len(data), [len(batch["y"]) for batch in data.epoch(0)]
        (3, [4, 4, 2])
    """
    batches = source_of(source)
    seed = operator.index(seed)
    if isinstance(batches, tuple):
        write = "px.loader(source, 32); a list of batches is data for px.fit as it is"
        size = check.count("px.loader", "batch_size", batch_size, write=write, error=DataError)
        num_rows, read, leaves, tree = batches
        if rows is not None:
            rows = np.asarray(rows)
            if rows.dtype.kind not in "iu" or rows.ndim not in (1, 2) or not np.isin(rows, range(num_rows)).all():
                raise DataError(f"px.loader: rows must be numbers of the source's {num_rows} rows, (m,) or (size, m)")
            num_rows = rows.shape[-1]
        if weights is not None:
            weights = np.asarray(weights, float)
            is_share = weights.shape == (num_rows,) and bool((weights >= 0).all()) and 0 < weights.sum() < np.inf
            if not is_share or shuffle is False:
                raise DataError(
                    f"px.loader: weights must be ({num_rows},) numbers of at least 0, not all 0, and come without "
                    f"shuffle=False; got {check.described(weights)}"
                )
            weights = np.cumsum(weights)
        order = Order(num_rows, size, shuffle is not False, bool(drop_last), seed, weights)
        batches = Rows(order, read, leaves, rows)
        if not batches.length:
            raise DataError(f"px.loader: with drop_last there is no batch of {size}, as source has {num_rows} rows")
        plain = [leaf for leaf in leaves.values() if type(leaf) is np.ndarray and transform is None]
        if plain and len(plain) == len(leaves):
            nbytes = sum(leaf.nbytes for leaf in plain)
            batches.arrays = tree if rows is not None or nbytes <= 2**30 else None
            batches.is_kept = all(leaf.dtype in _KEPT for leaf in plain)
            read_ahead = read_ahead if nbytes * size > _QUICK * len(plain[0]) else 0
    elif batch_size is not None or shuffle or drop_last or rows is not None or weights is not None or threads > 1:
        raise DataError("px.loader: source gives batches; leave batch_size and what follows out, or pass its .dataset")
    return Loader(batches, _batches.axis_of("px.loader", axis), seed, read_ahead, transform, threads)


class Loader(Batches):
    """Batches from a source, described by :func:`loader`. It holds no position, so many loops can share it."""

    def __init__(self, source: Batches, axis: Axis, seed: int, read_ahead: int, transform: Any, threads: int) -> None:
        self.length, self.leaves = source.length, source.leaves
        self.source, self._axis, self._seed = source, axis, seed
        self._read_ahead, self._transform, self._threads = read_ahead, transform, threads
        self._draws = transform is not None and "random" in inspect.signature(transform).parameters
        self._is_tried = jax.process_count() == 1

    def __len__(self) -> int:
        """Batches of an epoch; a TypeError if the source gives batches and does not say how many."""
        if self.length is None:
            raise TypeError("px.loader: the source does not say how many batches an epoch has; count steps instead")
        return self.length

    def batches(self, start: int = 0) -> Generator[Any, None, None]:
        """Yield batches without end, epoch after epoch, from batch number ``start``, counted from the first epoch.

        The thread ends with ``close()``, when the iterator is no longer used, and with the program.
        """
        return (batch for _, batch in self.steps(Position.of(start, self.length)))

    def epoch(self, number: int) -> Generator[Any, None, None]:
        """Return the batches of one epoch; for a source of batches that has no epochs, those of its next pass."""
        numbered = ((Position(k, number, k), batch) for k, batch in enumerate(self.source.epoch(number)))
        return (batch for _, batch in self._laid_out(numbered))

    def steps(self, start: Position) -> Generator[tuple[Position, Any], None, None]:
        """Yield batches without end with their positions, from one on."""
        return self._laid_out(self.source.steps(start))

    def rows(self, number: int) -> np.ndarray:
        """Return the row numbers of a batch, int64 ``(num_rows,)``; batches are counted from the first epoch.

        Raises:
            DataError: if the source gives batches, whose rows are not known.
        """
        if not isinstance(self.source, Rows):
            raise DataError("px.loader: the source gives batches, and does not tell which rows are in them")
        return self.source.order.rows(number)

    def describe(self) -> dict[str, Any]:
        """Return a JSON description of the data, as far as it is known without reading them, and of their order.

        Two loaders with equal descriptions have the same rows in the same batches. Arrays have digests, large ones of
        64 of their rows; of other sources, the rows are not compared.
        """
        return {"order": "given", "seed": self._seed, **self.source.describe()}

    def _laid_out(self, numbered: Iterator[tuple[Position, Any]]) -> Generator[tuple[Position, Any], None, None]:
        if isinstance(self.source, Rows) and self.source.chosen is not None and self.source.chosen.ndim == 2:
            raise DataError("px.loader: rows (size, m) are for ens.fit, of arrays in memory; else write rows=rows[0]")
        # A thread does not see the mesh, nor the width of numbers, that are in force where it is started.
        make = functools.partial(self._assembled, _batches.devices_of(self._axis), jax_api.is_wide())
        if self._threads > 1:
            calls = (functools.partial(make, position, batch) for position, batch in numbered)
            return reading.ahead(calls, self._threads, max(self._threads, self._read_ahead))
        laid = itertools.starmap(make, numbered)
        return reading.items_ahead(laid, self._read_ahead) if self._read_ahead else (each for each in laid)

    def _assembled(self, devices: _batches.Devices, wide: bool, position: Position, batch: Any) -> tuple[Position, Any]:
        with noted(f"px.loader: raised when batch {position} was made"):
            ids, read = batch if isinstance(self.source, Rows) else _by_number(position, batch)
            at = devices.local_rows(len(ids))
            if isinstance(self.source, Rows) and self.source.is_kept:
                return position, devices.assemble(read(at), len(ids))
            with jax.enable_x64(wide):
                rows = self._transformed(read(at), position.epoch, ids[at])
                # A transform may write into its result for the next batch.
                numbers = _numbers(rows, len(ids[at]), copy=self._transform is not None)
                return position, devices.assemble(numbers, len(ids))

    def _transformed(self, rows: Any, epoch: int, ids: np.ndarray) -> Any:
        """Apply the user's transform; with several processes, try on the first row whether it takes each alone."""
        if self._transform is None:
            return rows
        keywords = [{"random": generators(self._seed, epoch, at)} if self._draws else {} for at in (ids, ids[:1])]
        if self._is_tried or len(ids) < 2:
            return self._transform(rows, **keywords[0])
        self._is_tried = True
        first = jax.tree.map(lambda x: to_host(x)[:1].copy(), rows)  # the transform may write into its rows
        transformed, alone = self._transform(rows, **keywords[0]), self._transform(first, **keywords[1])
        for x, one in zip(*(map(to_host, jax.tree.leaves(each)) for each in (transformed, alone)), strict=True):
            x, is_inexact = x[:1], x.dtype.kind in "fc"
            if not (np.allclose(x, one, 1e-3, 1e-5, equal_nan=True) if is_inexact else np.all(x == one)):
                raise DataError(
                    "transform gives something else for a row alone than among others. With several processes it must "
                    "treat each row by itself, and draw by its generator: def f(batch, random): … random[i].normal()"
                )
        return transformed


def batches_of(what: str, data: Any) -> Batches:
    """Return the batches that data are: those of a loader, a random key for each step, or given ones."""
    is_key = isinstance(data, jax.Array) and jnp.issubdtype(data.dtype, jax.dtypes.prng_key) and data.ndim == 0
    return data if isinstance(data, Loader) else _sources.Keys(data) if is_key else _sources.GivenBatches(what, data)


def _by_number(position: Position, batch: Any) -> tuple[np.ndarray, Callable[[Any], Any]]:
    """Return numbers of a whole batch's rows, by which their randomness is keyed, and a reader of some of them."""
    ids = position.within * 2**32 + np.arange(_batches.num_rows("px.loader", "batch", batch))
    return ids, lambda at: jax.tree.map(lambda x: to_host(x) if isinstance(at, slice) else to_host(x)[at], batch)


_QUICK = 2**20  # bytes: a smaller batch of arrays in memory is read before a thread could hand it over
_KEPT = frozenset(map(np.dtype, "?bBhHiIef"))  # by JAX, whether numbers of 64 bits are in force or not


def _numbers(batch: Any, num_rows: int, *, copy: bool) -> Any:
    """Return a batch's leaves as arrays of dtypes that devices have."""

    def one(path: Any, leaf: Any) -> np.ndarray:
        name, array = pytrees.name("batch", path), to_host(leaf)
        if array.ndim == 0 or len(array) != num_rows:
            raise DataError(f"{name} has shape {array.shape}, but each leaf must start with the {num_rows} rows")
        if not (jnp.issubdtype(array.dtype, jnp.number) or array.dtype == np.bool_):
            raise DataError(f"{name} is of {array.dtype}, not of numbers; leave it out, or encode it in transform=")
        check.leaves("px.loader", name, array)
        return np.array(array, jax.dtypes.canonicalize_dtype(array.dtype.newbyteorder("=")), copy=copy or None)

    return jax.tree_util.tree_map_with_path(one, batch)
