"""Batches out of a source: in an order that the seed decides, read ahead, and laid out over the devices."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Generator, Iterator
from typing import Any, Protocol

import jax
import numpy as np

from paraxis._calls import arguments
from paraxis._core import placing
from paraxis._core.axis import Axis
from paraxis.errors import DataError
from paraxis.train import _batches
from paraxis.train._batches import Batch
from paraxis.train.data._arguments import integer, order_of, seed_of
from paraxis.train.data._host import for_devices
from paraxis.train.data._order import Order
from paraxis.train.data._parts import Part, naming, one_pass, passes
from paraxis.train.data._read_ahead import ReadAhead
from paraxis.train.data._sources import Arrays, Batches, Dataset, source_of
from paraxis.train.data._transform import Transform


@arguments.named(workers="read_ahead", prefetch="read_ahead", num_workers="read_ahead")
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
) -> "Loader":
    """Batches of rows, shuffled by a seed, read ahead by a thread and laid out over the devices.

    Which rows a batch has depends on the seed, the batch size and the number of the batch, and on nothing else: not on
    the devices, the processes or what was read before. So the number of batches taken is all that has to be saved to go
    on later. Each process reads the rows of its own devices only.

    The source is one of these:

    * a tree of arrays ``(num_rows, ...)``: of NumPy, JAX or PyTorch, or in a file (``np.load(path, mmap_mode="r")``,
      HDF5), of which only the rows in question are read;
    * an object that gives one row, a tree, by number: with ``__len__`` and ``__getitem__``, such as a PyTorch
      ``Dataset``, a Grain data source or a Grain ``MapDataset``; if it has ``__getitems__``, that is called once per
      batch instead;
    * an iterable of batches that can be gone through again: a PyTorch or Grain ``DataLoader``, a Grain ``IterDataset``
      that ends in ``batch(…)``. It keeps its own batches, of any size, and its own order: leave out ``batch_size``.
      Each process goes through all batches and takes its rows, so the order must be the same in all of them; and to
      go on at a later batch, those before are read and dropped. If its dataset gives rows by number, hand over that
      instead: ``px.loader(data_loader.dataset, 32)``;
    * a function that gives such an iterable: ``source(epoch)``, or ``source()``. If what ``source(epoch)`` gives has a
      length, later epochs begin without going through those before.

    Args:
        source: where the rows come from.
        batch_size: rows of a batch, over all devices together. It need not divide by anything.
        axis: the axis that the rows lie on: its name, or a ``px.Axis`` with a mesh, whose size does not count.
        shuffle: whether each epoch has an order of its own, or the rows come as they are. Default: they are shuffled.
        seed: of the order and of ``random``, at least 0.
        drop_last: whether the rows that are left over, fewer than ``batch_size``, are left out in this epoch.
        read_ahead: batches made before they are asked for; 0: none, and no thread.
        transform: a function of the rows read, a tree of NumPy arrays ``(rows, ...)``, to a tree of such arrays. It
            must do the same to a row whatever the others are, since a process sees its own rows only; on the first
            rows that is tried. It may have a parameter ``random``: a sequence with a ``numpy.random.Generator`` for
            each row, keyed by (seed, epoch, row). It is run by the thread.

    Returns:
        A :class:`Loader`.

    Raises:
        DataError: if the source is nothing to read, or an argument does not go with it. While reading: naming the
            batch, and the row where there is one, if the source or ``transform`` raises or gives what is no batch.
        ShapeError: if leaves or rows do not fit together, likewise.

    Communicates: sends each device its rows; nothing between devices or processes.

    Example:
        >>> import numpy as np, paraxis as px
        >>> data = px.loader({"x": np.ones((10, 3)), "y": np.arange(10)}, 4, seed=1)
        >>> len(data), [batch.num_rows for batch in data.epoch(0)]
        (3, [4, 4, 2])
        >>> bool((np.sort(np.concatenate([data.rows(k) for k in range(3)])) == np.arange(10)).all())
        True
    """
    if shuffle is not None:
        arguments.flag("px.loader", "shuffle", shuffle)
    arguments.flag("px.loader", "drop_last", drop_last)
    found = source_of(source)
    seed = seed_of(seed)
    order = order_of(found, batch_size, shuffle, drop_last, seed)
    if transform is not None and not callable(transform):
        raise DataError(
            f"px.loader: transform must be a function of a batch, got {type(transform).__name__}; write "
            "transform=lambda batch: batch | {'x': batch['x'] / 255}"
        )
    axis = _batches.axis_of("px.loader", axis)
    return Loader(found, order, axis, seed, integer("read_ahead", read_ahead, least=0), transform)


class Closable(Iterator[Batch], Protocol):
    """Batches one after the other, until there are no more, or until :meth:`close`."""

    def close(self) -> None: ...


class Loader:
    """Batches out of a source, as :func:`loader` describes them. Holds no position: it may be used in many places."""

    def __init__(
        self,
        source: Arrays | Dataset | Batches,
        order: Order | None,
        axis: Axis,
        seed: int,
        read_ahead: int,
        transform: Callable[..., Any] | None,
    ) -> None:
        self._source = source
        self._order = order
        self._axis = axis
        self._seed = seed
        self._read_ahead = read_ahead
        self._transform = Transform(transform, seed) if transform is not None else None

    def __len__(self) -> int:
        """Batches of an epoch.

        Raises:
            DataError: if the source gives batches and does not say how many.
        """
        if isinstance(self._source, Batches):
            if self._source.num_batches is None:
                raise DataError(
                    "px.loader: the source does not say how many batches an epoch has; count steps instead of epochs"
                )
            return self._source.num_batches
        assert self._order is not None
        return len(self._order)

    def __iter__(self) -> Iterator[Batch]:
        """Refused: it would be the same epoch each time."""
        raise DataError(
            "px.loader: say which batches are meant: `for batch in data.epoch(0)`, or `data.batches()`, which does not "
            "end"
        )

    def __repr__(self) -> str:
        return (
            f"Loader({', '.join(f'{name}={value!r}' for name, value in self.describe().items() if name != 'leaves')})"
        )

    @property
    def by_epoch(self) -> bool:
        """Whether an epoch's batches depend on its number only, not on how often the source was gone through."""
        return not isinstance(self._source, Batches) or self._source.by_epoch

    def batches(self, start: int = 0) -> Closable:
        """Batches without end, epoch after epoch, from batch number ``start`` on, counted from the first epoch's.

        Its thread ends with ``close()``, when it is not used any more, and with the program.
        """
        return self._laid_out(self._parts(arguments.count("px.loader", "start", start, least=0, error=DataError)))

    def epoch(self, number: int) -> Closable:
        """Return the batches of one epoch. Of a source of batches that knows no epochs: of its next pass."""
        number = arguments.count("px.loader", "number", number, least=0, error=DataError)
        if isinstance(self._source, Batches):
            return self._laid_out(one_pass(self._source, number))
        return self._laid_out(self._parts(number * len(self), (number + 1) * len(self)))

    def rows(self, number: int) -> np.ndarray:
        """Return a batch's rows ``(num_rows,)``, int64, by its number, counted from the first epoch's first.

        Raises:
            DataError: if the source gives batches: it does not tell.
        """
        if self._order is None:
            raise DataError("px.loader: the source gives batches, and does not tell which rows are in them")
        return self._order.rows(arguments.count("px.loader", "number", number, least=0, error=DataError))

    def describe(self) -> dict[str, Any]:
        """Return what the data are, as far as can be said without reading them, and their order: for JSON.

        Two loaders of which this is equal give the same rows in the same batches, if the rows are the same.
        """
        order = {"order": "given", "seed": self._seed} if self._order is None else self._order.describe()
        return {**order, **self._source.describe()}

    def depends_on(self) -> dict[str, Any]:
        """Return the values behind :meth:`describe`: arrays, or the object or function that they are asked of."""
        found = self._source
        rows = found.tree if isinstance(found, Arrays) else found.rows if isinstance(found, Dataset) else found.source
        return {"data": rows, "transform": None if self._transform is None else self._transform.function}

    def _parts(self, start: int, stop: int | None = None) -> Generator[Part, None, None]:
        """Yield what is to be made, batch after batch, from number ``start`` on."""
        source = self._source
        if isinstance(source, Batches):
            yield from passes(source, start)
            return
        for number in itertools.count(start) if stop is None else range(start, stop):
            epoch, k = divmod(number, len(self))
            rows = self.rows(number)
            yield Part(epoch, k, rows, lambda at, rows=rows, epoch=epoch: source.read(rows[at], epoch))

    def _laid_out(self, parts: Generator[Part, None, None]) -> Closable:
        # A thread does not see the mesh, nor the width of numbers, that are in force where it is started.
        made = self._made(parts, placing.settled(self._axis), _is_wide())
        return ReadAhead(made, self._read_ahead) if self._read_ahead else made

    def _made(self, parts: Generator[Part, None, None], axis: Axis, wide: bool) -> Generator[Batch, None, None]:
        with contextlib.closing(parts):
            for part in parts:
                with jax.enable_x64(wide), naming(part.epoch, part.number):
                    placement = placing.on_auto(placing.place(axis).holding(len(part.ids)))
                    batch = _batches.read(functools.partial(self._read, part), placement)
                yield batch
                del batch, part  # no more of them stays in memory than asked for

    def _read(self, part: Part, positions: np.ndarray) -> Any:
        """Return some of the rows of a batch, ready for devices."""
        found = part.read(positions)
        if self._transform is not None:
            found = self._transform(found, part.epoch, part.ids[positions])
        is_new = self._transform is None and not isinstance(self._source, Batches)
        return for_devices(found, len(positions), copy=not is_new)


def _is_wide() -> bool:
    """Return whether 64-bit numbers are in force, in this thread."""
    return jax.dtypes.canonicalize_dtype(np.float64) == np.float64
