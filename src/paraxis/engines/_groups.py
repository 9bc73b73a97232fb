"""Elements of an axis that are read when they are needed: clients' data on disk, say."""

import functools
import io
import itertools
import operator
import pickle
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from paraxis._calls import arguments
from paraxis._host import archives, mapped
from paraxis._jax import dtypes
from paraxis._tables import Unchanged
from paraxis.engines._federated import source_of
from paraxis.engines._parquet import Parquet
from paraxis.errors import DataError, ShapeError

_NUM_SHAPES = 12


class Groups:
    """The elements of an axis, each a pytree of arrays, read when they are needed.

    In place of an array ``(size, ...)`` among the arguments of :meth:`px.Stream.run`, it stands for one whose rows
    are its elements. On the mesh, :meth:`arrays` gives that array.

    **Elements of different length** (``lengths`` is given, or the source knows them): arrays whose first dimension
    is the element's length are filled up to a common one, by repeating the last row, and the mapped function gets an
    :class:`Padded` element: ``data.x`` with ``data.mask``, which says what is real, and ``data.count``. Whatever it
    computes over rows must use the mask; an engine raises where what comes out depends on padding.

    Args:
        source: has a length, and gives element ``i`` by ``source[i]``: a list, a Grain source, a PyTorch or Hugging
            Face dataset, anything of your own. Or federated data of FedJAX, TensorFlow Federated or Flower, whose
            clients are the elements, each a dict of arrays of its examples. If it has ``__getitems__(indices)``, many
            are read at once. It is read from several threads.
        lengths: number of rows of each element, integers ``(size,)``; default: the source's own ``lengths``, if it
            has some, otherwise all elements have the same shapes.
        ids: a name for each element, for errors; default: the source's own ``ids``, or numbers.
        num_shapes: into how many lengths elements are filled up at most; each is compiled once.

    Raises:
        DataError: if there are no elements, or lengths that are no lengths.

    Example:
        >>> import numpy as np, paraxis as px
        >>> rng = np.random.default_rng(0)
        >>> clients = px.Groups([{"x": rng.normal(size=(n, 3))} for n in (4, 2, 7)], lengths=[4, 2, 7])
        >>> len(clients), clients[2]["x"].shape
        (3, (7, 3))
    """

    @arguments.named(length="lengths", names="ids")
    def __init__(
        self, source: Any, *, lengths: Any = None, ids: Iterable[Any] | None = None, num_shapes: int = _NUM_SHAPES
    ) -> None:
        source = source_of(source)
        try:
            count = len(source)
        except TypeError:
            count = None
        if count is None or not hasattr(source, "__getitem__") or isinstance(source, (dict, str, bytes)):
            raise DataError(
                f"Groups: source must have a length and give elements by number, got {arguments.described(source)}; "
                f"write px.Groups([{{'x': x, 'y': y}} for x, y in clients]), or px.Groups.of_arrays(tree)"
            )
        if not count:
            raise DataError("Groups: source has no elements; give at least one")
        self._source = source
        self._numbers = np.arange(count)
        lengths = getattr(source, "lengths", None) if lengths is None else lengths
        self._lengths = None if lengths is None else _lengths(lengths, count)
        own = getattr(source, "ids", None)
        ids = own if ids is None and not callable(own) else ids
        self._ids = None if ids is None else _ids(ids, count)
        self._shapes: dict[int, np.ndarray] = {}
        self._known: dict[Any, Any] = {}
        self._most = _num_shapes(num_shapes)
        if self._lengths is None and self._most != _NUM_SHAPES:
            write = f"px.Groups(source, lengths=[len(y) for x, y in source], num_shapes={self._most})"
            arguments.of_no_use("Groups", "num_shapes", self._most, "lengths", write)

    @classmethod
    def of_arrays(cls, tree: Any) -> "Groups":
        """Return the rows of arrays as elements: a pytree of ``(size, ...)``, in memory or memory-mapped.

        Raises:
            ShapeError: if they are not equally many.

        Example:
            >>> import numpy as np, paraxis as px
            >>> len(px.Groups.of_arrays({"x": np.zeros((5, 3)), "y": np.zeros(5)}))
            5
        """
        return cls(_Rows(tree))

    @classmethod
    def npz(cls, folder: str | Path, *, num_shapes: int = _NUM_SHAPES, readable: bool = False) -> "Groups":
        """Return the ``.npz`` files of a folder as elements, in the order of their names.

        Lengths are read from the files' headers: an element has as many rows as the first dimension that its arrays
        have in common, those without any apart. If it is the same in all files, elements are not padded.

        Args:
            folder: with files of ``np.savez`` or ``np.savez_compressed``, one for each element.
            num_shapes: into how many lengths elements are filled up at most.
            readable: leave out files that cannot be read; each is read once. ``len`` says how many are left.

        Raises:
            DataError: if there are no such files, or one is damaged; the message names it.

        Example:
            >>> import pathlib, tempfile, numpy as np, paraxis as px
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     for name, n in [("anna", 4), ("ben", 2)]:
            ...         np.savez(pathlib.Path(folder, name), x=np.ones((n, 3)), y=np.ones(n))
            ...     clients = px.Groups.npz(folder)
            >>> clients, clients.ids
            (<Groups: 2 elements, 2 to 4 rows each>, ['anna', 'ben'])
        """
        arguments.path("Groups.npz", "folder", folder, write="px.Groups.npz('clients')")
        arguments.flag("Groups.npz", "readable", readable)
        source, shapes = _Files(Path(folder), readable), _num_shapes(num_shapes)
        lengths = source.lengths
        if lengths is None or len(set(lengths)) == 1:
            return cls(source, ids=source.ids)
        return cls(source, lengths=lengths, ids=source.ids, num_shapes=shapes)

    @classmethod
    def parquet(cls, folder: str | Path, *, by: str, num_shapes: int = _NUM_SHAPES) -> "Groups":
        """Return the rows of Parquet files that have the same value in one column as elements.

        An element is a dict of the other columns: numbers, or lists of equal length, which become a second dimension.
        Files that are sorted by the column are read once in each pass; others, as often as an element lies elsewhere.

        Args:
            folder: a folder of ``.parquet`` files, or one such file.
            by: the column. Its values are the elements' ids.
            num_shapes: as above.

        Raises:
            DataError: if there are no such files, or one has no such column, or cannot be read; the message names it.
            ModuleNotFoundError: if pyarrow is missing; the extra ``fit`` brings it.
        """
        arguments.path("Groups.parquet", "folder", folder, write="px.Groups.parquet('clients', by='user')")
        arguments.text("Groups.parquet", "by", by, "px.Groups.parquet('clients', by='user')")
        source, shapes = Parquet(Path(folder), by), _num_shapes(num_shapes)
        if len(set(source.lengths)) == 1:
            return cls(source)
        return cls(source, lengths=source.lengths, num_shapes=shapes)

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> Any:
        """Return one element as it is in the source, a pytree of arrays."""
        try:
            number = _integer(number)
        except TypeError:
            got = arguments.described(number)
            raise TypeError(f"Groups: number must be an integer, got {got}; write groups[0]") from None
        if not -len(self) <= number < len(self):
            raise IndexError(f"Groups: number must be at most {len(self) - 1}, got {number}; there are {len(self)}")
        return self._element(int(self._numbers[number]))

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise DataError(
            "Groups: its elements are read when they are needed, and it is no array; write px.Stream(at_once=64).run("
            "loss, w, groups), or on the mesh loss(w, groups.arrays())"
        )

    @property
    def __jax_array__(self) -> Any:  # asked for by jit and other transformations, before they raise what says less
        return self.__array__()

    @property
    def ids(self) -> list[Any]:
        """Return the names of the elements; numbers, if the source has none."""
        return [self._name(int(number)) for number in self._numbers]

    @property
    def lengths(self) -> np.ndarray | None:
        """Return the number of rows of each element, ``(size,)``; ``None``: all have the same shapes."""
        return None if self._lengths is None else self._lengths[self._numbers]

    def sample(self, count: int, *, seed: int | Sequence[int]) -> "Groups":
        """Return so many elements, drawn without replacement: a cohort. It is the same for the same seed anywhere.

        Args:
            count: how many.
            seed: an integer, or several, such as ``(seed, round)``.

        Raises:
            ValueError: if there are not so many.

        Example:
            >>> import numpy as np, paraxis as px
            >>> clients = px.Groups.of_arrays(np.arange(10))
            >>> [int(client) for client in px.Groups.sample(clients, 3, seed=(0, 1))]
            [1, 5, 6]
        """
        write = f"groups.sample({min(8, len(self))}, seed=(0, round))"
        count = arguments.count("Groups.sample", "count", count, write=write)
        if count > len(self):
            raise ValueError(f"Groups.sample: count must be at most {len(self)}, the elements there are, got {count}")
        try:
            seeds = [_integer(part) for part in (seed if isinstance(seed, (tuple, list)) else (seed,))]
            random = np.random.Generator(np.random.Philox(np.random.SeedSequence(seeds)))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"Groups.sample: seed must be a non-negative integer, or several, got {arguments.described(seed)}; "
                f"write {write}"
            ) from error
        drawn = random.permutation(len(self))[:count]
        return self._some(self._numbers[drawn])

    def arrays(self) -> Any:
        """Return all elements in memory, ``(size, ...)`` each; of different length, as one :class:`Padded`.

        This is how a cohort goes into a program on the mesh: ``program(w, groups.sample(100, seed=0).arrays())``.
        """
        length = None if self.lengths is None else rounded_up(int(self.lengths.max()), self._shapes_of(1))
        return self._read(np.arange(len(self)), length)

    def readable(self) -> "Groups":
        """Return the elements that can be read: each is read once. ``len`` says how many are left."""
        good, first = [], None
        for number in self._numbers:
            try:
                self._element(int(number))
            except DataError as error:
                first = first or error
                continue
            good.append(number)
        if not good:
            raise DataError(f"Groups.readable: none of {len(self)} elements can be read. {first}") from first
        return self._some(np.asarray(good))

    def __repr__(self) -> str:
        lengths = self.lengths
        rows = "" if lengths is None else f", {int(lengths.min())} to {int(lengths.max())} rows each"
        return f"<Groups: {len(self)} elements{rows}>"

    def _some(self, numbers: np.ndarray) -> "Groups":
        other = object.__new__(Groups)
        other.__dict__.update(self.__dict__, _numbers=numbers, _known={})
        return other

    def _name(self, number: int) -> Any:
        return number if self._ids is None else self._ids[number]

    # --- for engines -------------------------------------------------------------------------------------------

    @functools.cached_property
    def _can_be_sent(self) -> bool:
        """Return whether another process can read the elements: the source is small, and of a module that it has."""
        try:
            _Portable(_Limited(_MOST_SENT), pickle.HIGHEST_PROTOCOL).dump(self)
        except DataError:  # of a file that was cut off, which to read here would end this process
            raise
        except Exception:  # whatever a source's own pickling raises
            return False
        return True

    @property
    def _together(self) -> int:
        """The number of elements in a row that one process had best read: a power of two."""
        return 1

    def _shapes_of(self, count: int) -> np.ndarray:
        """Return the few lengths to which elements are filled up, where ``count`` go together, the longest first.

        All samples of the same size have the same ones: what counts is how long elements are in the whole source.
        """
        assert self._lengths is not None
        together = max(1, round(count * len(self._lengths) / len(self)))
        if together not in self._shapes:
            order = np.sort(self._lengths)[::-1]
            heads = np.arange(len(order)) // together * together
            self._shapes[together] = fewest(order[heads], self._most)
        return self._shapes[together]

    @property
    def _first(self) -> Any:
        """The first element, which says what all of them look like. It is read once for each width of numbers."""
        key = "first", dtypes.is_wide()
        if key not in self._known:
            self._known[key] = self._element(int(self._numbers[0]))
        return self._known[key]

    def _is_filled(self, leaf: int) -> bool:
        """Return whether a leaf of the elements, filled up, has rows: mask and count are the last two."""
        return self._lengths is not None and leaf < len(self._long) and self._long[leaf]

    def _structs(self, length: int | None) -> Any:
        """Return what all elements together look like: shapes ``(size, ...)``, padded to this length."""
        one = self._first
        if length is not None:
            leaves, structure = jax.tree.flatten(one)
            filled = [_filled(x[:1], length) if is_long else x for x, is_long in zip(leaves, self._long, strict=True)]
            one = Padded(jax.tree.unflatten(structure, filled), np.zeros(length, bool), np.int32())
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct((len(self), *a.shape), a.dtype), one)

    def _for_devices(self, places: np.ndarray, length: int | None) -> Any:
        """Return the same as ``_read``, if devices hold all of its integers.

        Raises:
            DataError, ShapeError: as there, or naming an integer that JAX would cut.
        """
        found = self._read(places, length)
        arguments.no_cut("Groups", "elements", found)
        return found

    def _read(self, places: np.ndarray, length: int | None) -> Any:
        """Return elements by their places, one after the other along a new first dimension, in NumPy arrays.

        Raises:
            DataError: if one cannot be read; the message names it.
            ShapeError: if one does not look like the first; likewise.
        """
        numbers = self._numbers[places]
        if isinstance(self._source, _Rows) and length is None:
            return self._source.rows(numbers)
        given = zip(self._elements(numbers), numbers, strict=True)
        padded = (self._padded(x, int(number), length) for x, number in given)
        first = next(padded)
        if len(numbers) == 1:
            return jax.tree.map(lambda leaf: leaf[None], first)
        stacked = [np.empty((len(numbers), *leaf.shape), leaf.dtype) for leaf in jax.tree.leaves(first)]
        for at, element in enumerate(itertools.chain([first], padded)):  # in turns: no two are needed at once
            for into, leaf in zip(stacked, jax.tree.leaves(element), strict=True):
                into[at] = leaf
        return jax.tree.unflatten(jax.tree.structure(first), stacked)

    def _elements(self, numbers: np.ndarray) -> Iterable[Any]:
        many = getattr(self._source, "__getitems__", None)
        if many is None:
            return (self._element(int(number)) for number in numbers)
        try:
            found = list(many([int(number) for number in numbers]))
        except Exception as error:
            raise DataError(f"Groups: elements {self._told(numbers)} cannot be read: {_said(error)}") from error
        if len(found) != len(numbers):
            raise DataError(f"Groups: the source gave {len(found)} elements for {len(numbers)}: {self._told(numbers)}")
        return [self._as_arrays(x, int(number)) for x, number in zip(found, numbers, strict=True)]

    def _element(self, number: int) -> Any:
        try:
            found = self._source[number]
        except Exception as error:
            raise DataError(
                f"Groups: {self._called(number)} cannot be read: {_said(error)}. To go on without what cannot be "
                f"read, write groups = groups.readable()"
            ) from error
        return self._as_arrays(found, number)

    def _as_arrays(self, element: Any, number: int) -> Any:
        def made(path: Any, leaf: Any) -> np.ndarray:
            found = np.asarray(leaf)
            if found.dtype == object or found.dtype.kind in "USMm":
                kind = {"U": "text", "S": "text", "M": "dates", "m": "times"}.get(found.dtype.kind, "objects")
                raise DataError(
                    f"Groups: {self._called(number)} cannot be used: "
                    f"{' '.join(filter(None, [jax.tree_util.keystr(path), 'holds']))} {kind} ({found.dtype}) where "
                    f"numbers are needed; leave it out, or give numbers, of labels codes = np.unique(labels, "
                    f"return_inverse=True)[1]"
                )
            if (reason := arguments.why_cut(found)) is not None:
                raise DataError(f"Groups: {self._called(number)}{jax.tree_util.keystr(path)} {reason}")
            found = dtypes.native(found)
            return found.astype(jax.dtypes.canonicalize_dtype(found.dtype), copy=False)

        return jax.tree.map_with_path(made, element)

    def _called(self, number: int) -> str:
        return f"element {self._name(number)!r} (number {number})"

    def _told(self, numbers: np.ndarray) -> str:
        names = [repr(self._name(int(number))) for number in numbers]
        return ", ".join(names if len(names) <= 8 else [*names[:6], "…", names[-1]])

    def _padded(self, element: Any, number: int, length: int | None) -> Any:
        self._require_like_first(element, number, ragged=length is not None)
        if length is None:
            return element
        assert self._lengths is not None
        own = int(self._lengths[number])
        leaves, structure = jax.tree.flatten(element)
        filled = []
        for leaf, is_long in zip(leaves, self._long, strict=True):
            if not is_long:
                filled.append(leaf)
            elif leaf.shape[:1] != (own,):
                raise ShapeError(
                    f"Groups: {self._called(number)} has {leaf.shape[0]} rows, where lengths says {own}; give "
                    f"lengths=[len(…) for each element]"
                )
            else:
                filled.append(_filled(leaf, length))
        data = jax.tree.unflatten(structure, filled)
        return Padded(data, np.arange(length) < own, np.int32(own))

    @functools.cached_property
    def _long(self) -> list[bool]:
        """Return which leaves have as many rows as the element's length: looked up in elements of two lengths."""
        assert self._lengths is not None
        numbers = {int(n): None for n in (self._lengths.argmin(), self._lengths.argmax())}
        elements = {n: self._element(n) for n in numbers}
        for n, element in elements.items():
            if jax.tree.structure(element) != jax.tree.structure(self._first):
                raise self._unlike(element, n, ragged=False)
        told = [
            [leaf.shape[:1] == (int(self._lengths[n]),) for leaf in jax.tree.leaves(x)] for n, x in elements.items()
        ]
        long = [all(each) for each in zip(*told, strict=True)]
        if not any(long):
            fits = dict(zip(elements, map(any, told), strict=True))
            n = min(elements, key=fits.__getitem__)
            shapes = ", ".join(str(leaf.shape) for leaf in jax.tree.leaves(elements[n]))
            raise ShapeError(
                f"Groups: {self._called(n)} has arrays {shapes}, where lengths says {self._lengths[n]} rows; give "
                f"lengths=[len(…) for each element], or leave lengths out if all have the same shapes"
            )
        return long

    def _look(self, element: Any, ragged: bool) -> Any:
        """Return what elements must have in common: all but the number of rows, where that is their own."""
        leaves, structure = jax.tree.flatten(element)
        if ragged and len(leaves) == len(self._long):
            return structure, [
                (leaf.shape[is_long:], leaf.dtype) for leaf, is_long in zip(leaves, self._long, strict=True)
            ]
        return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]

    def _looks(self, ragged: bool) -> Any:
        """Return what the first one looks like, once for each width of numbers."""
        key = ragged, dtypes.is_wide()
        if key not in self._known:
            self._known[key] = self._look(self._first, ragged)
        return self._known[key]

    def _require_like_first(self, element: Any, number: int, *, ragged: bool) -> None:
        if self._look(element, ragged) != self._looks(ragged):
            raise self._unlike(element, number, ragged=ragged)

    def _unlike(self, element: Any, number: int, *, ragged: bool) -> ShapeError:
        """Return the error of an element that does not look like the first."""
        got, first = (jax.tree_util.tree_leaves_with_path(x) for x in (element, self._first))
        if jax.tree.structure(element) != jax.tree.structure(self._first):
            write = "give each the same arrays under the same names, and of a list of numbers np.asarray(numbers)"
        else:
            looks = zip(self._look(element, ragged)[1], self._looks(ragged)[1], strict=True)
            differ = [mine != other for mine, other in looks]
            pairs = [(a, b) for a, b, is_other in zip(got, first, differ, strict=True) if is_other]
            got, first = [a for a, _ in pairs], [b for _, b in pairs]
            if any(a.dtype != b.dtype for (_, a), (_, b) in pairs):
                write = "give all the same dtype: np.asarray(x, np.float32)"
            elif self._lengths is None and all(a.ndim and a.shape[1:] == b.shape[1:] for (_, a), (_, b) in pairs):
                write = "if elements have different lengths, write px.Groups(source, lengths=[len(…) for each element])"
            else:
                write = "only the number of rows may differ, where lengths are given"
        mine, other = (
            ", ".join([*map(_told, leaves[:4]), *["…"] * (len(leaves) > 4)]) or "no array" for leaves in (got, first)
        )
        return ShapeError(f"Groups: {self._called(number)} is {mine}, but the first is {other}; {write}")


@jax.tree_util.register_pytree_with_keys_class
class Padded:
    """An element filled up to a length that it shares with others.

    Attributes:
        data: the element's own pytree, its rows filled up to ``length`` by repeating the last.
        mask: booleans ``(length,)``, which rows are real.
        count: how many are, int32.

    What ``data`` has under a name, this has, too: ``element.x`` for ``element.data["x"]``.
    """

    def __init__(self, data: Any, mask: Any, count: Any) -> None:
        self.data, self.mask, self.count = data, mask, count

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "data" not in self.__dict__:
            raise AttributeError(name)
        data = self.data
        if isinstance(data, dict) and name in data:
            return data[name]
        if not isinstance(data, dict) and hasattr(data, name):
            return getattr(data, name)
        names = list(data) if isinstance(data, dict) else []
        raise AttributeError(f"a padded element has no {name!r}; it has {', '.join(map(str, names))}, mask and count")

    def __getitem__(self, name: Any) -> Any:
        if isinstance(self.data, dict) and name not in self.data and name in ("mask", "count"):
            raise KeyError(f"{name!r} is not among the element's own arrays; write data.{name}")
        return self.data[name]

    def __repr__(self) -> str:
        return f"Padded(data={self.data!r}, mask={self.mask!r}, count={self.count!r})"

    def tree_flatten_with_keys(self) -> tuple[Any, None]:
        keys = (jax.tree_util.GetAttrKey(name) for name in ("data", "mask", "count"))
        return tuple(zip(keys, (self.data, self.mask, self.count), strict=True)), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Sequence[Any]) -> "Padded":
        return cls(*children)


def _num_shapes(given: Any) -> int:
    return arguments.count("Groups", "num_shapes", given, write="px.Groups(source, lengths=lengths, num_shapes=12)")


def fewest(lengths: np.ndarray, most: int) -> np.ndarray:
    """Return the lengths, at most so many, to which elements are filled up with the least padding in all.

    By dynamic programming over the different lengths: with ``k`` of them, the last covers lengths ``i`` to ``j``.
    """
    values, counts = np.unique(np.maximum(lengths, 1), return_counts=True)
    if len(values) > 512:  # as many quantiles of the work are as good
        edges = np.searchsorted(np.cumsum(values * counts), np.linspace(0, (values * counts).sum(), 513)[1:-1])
        last = np.unique(np.append(edges, len(values) - 1))
        counts = np.diff(np.cumsum(counts)[last], prepend=0)
        values = values[last]
    below = np.concatenate([[0], np.cumsum(counts)])
    number = len(values)
    cost = np.where(np.arange(number) >= 0, values * below[1:], 0).astype(float)  # one shape covers all up to j
    chosen = [np.zeros(number, int)]
    for _ in range(min(most, number) - 1):
        total = np.full((number, number), np.inf)  # [j, i]: the last shape covers i to j
        for j in range(number):
            i = np.arange(1, j + 1)
            total[j, i] = cost[i - 1] + values[j] * (below[j + 1] - below[i])
        total[:, 0] = values * below[1:]
        first = total.argmin(axis=1)
        cost = total[np.arange(number), first]
        chosen.append(first)
    found, j = [], number - 1
    for first in reversed(chosen):
        found.append(values[j])
        if first[j] == 0:
            break
        j = first[j] - 1
    return np.asarray(found[::-1])


def rounded_up(length: int, shapes: np.ndarray) -> int:
    """Return the length to which elements of this length are filled up."""
    return int(shapes[np.searchsorted(shapes, length)])


_MOST_SENT = 16 * 2**20
"""Bytes of a source that is sent to other processes; of larger ones, rows are."""


class _Limited(io.RawIOBase):
    """Counts what is written, and raises when it is too much."""

    def __init__(self, most: int) -> None:
        self._left = most

    def write(self, data: Any) -> int:
        self._left -= memoryview(data).nbytes
        if self._left < 0:
            raise OverflowError("it is too large")
        return memoryview(data).nbytes


class _Portable(pickle.Pickler):
    """Refuses what only the program that runs here has."""

    def persistent_id(self, obj: Any) -> None:
        if getattr(obj, "__module__", None) == "__main__":
            raise pickle.PicklingError(f"{obj!r} is of the program itself")


class _Rows:
    """Arrays as a source of their rows."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "tree": jax.tree.map(mapped.by_file, self.tree)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, tree=jax.tree.map(mapped.opened, state["tree"]))

    def __init__(self, tree: Any) -> None:
        arguments.arrays("Groups.of_arrays", "tree", tree)
        self.tree = jax.tree.map(functools.partial(arguments.host_array, "Groups.of_arrays", "tree"), tree)
        counts = {leaf.shape[:1] for leaf in jax.tree.leaves(self.tree)}
        if len(counts) != 1 or counts in ({()}, {(0,)}):
            told = ", ".join(str(leaf.shape) for leaf in jax.tree.leaves(self.tree)) or "none"
            raise ShapeError(
                f"Groups.of_arrays: tree must have arrays of equally many rows, (size, ...), got {told}; of a list of "
                f"elements, write px.Groups(clients, lengths=[len(…) for each element])"
            )
        self.count = counts.pop()[0]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Any:
        return jax.tree.map(lambda x: x[number], self.tree)

    def rows(self, numbers: np.ndarray) -> Any:
        first, last = int(numbers[0]), int(numbers[-1])
        in_order = last - first + 1 == len(numbers) and bool((np.diff(numbers) == 1).all())
        at = slice(first, last + 1) if in_order else numbers
        return jax.tree.map(lambda x: dtypes.native(np.asarray(x[at])), self.tree)


class _Files:
    """A folder of ``.npz`` files as a source."""

    def __init__(self, folder: Path, readable: bool) -> None:
        self.paths = sorted(path for path in folder.glob("*.npz"))
        if not self.paths:
            got = (
                "which has none" if folder.is_dir() else "which is a file" if folder.exists() else "which is not there"
            )
            raise DataError(
                f"Groups.npz: folder must have .npz files, one for each element, got {str(folder)!r}, {got}; write "
                f"px.Groups.npz('clients'), where clients/ has the files that np.savez made"
            )
        if readable:
            self.paths = [path for path in self.paths if _is_readable(path)]
            if not self.paths:
                raise DataError(
                    f"Groups.npz: none of the .npz files in {str(folder)!r} can be read; leave readable out"
                )
        self.ids = [path.stem for path in self.paths]
        self._seen = np.array([_seen(path) for path in self.paths])

    @functools.cached_property
    def lengths(self) -> list[int] | None:
        """Return the length of each file, from its header; ``None`` if arrays of one have no dimension in common."""
        found = []
        for path in self.paths:
            try:
                with archives.Archive(path, compressed=True) as archive:
                    firsts = {archive.kind(name).shape[:1] for name in archive.names} - {()}
            except (OSError, archives.Damaged) as error:
                raise _unreadable(path, error) from error
            if len(firsts) != 1:
                return None
            found.append(firsts.pop()[0])
        return found

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        found = _read_file(self.paths[number])
        Unchanged("Groups.npz", self.paths[number], *self._seen[number].tolist()).require()
        return found


def _seen(path: Path) -> tuple[int, int]:
    """Return a file's size and when it was written."""
    try:
        stat = path.stat()
    except OSError as error:  # of a link to nowhere
        raise _unreadable(path, error) from error
    return stat.st_size, stat.st_mtime_ns


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(
        f"Groups.npz: {str(path)!r} cannot be read: {_said(error)}. To go on without what cannot be read, "
        f"write px.Groups.npz({str(path.parent)!r}, readable=True)"
    )


def _read_file(path: Path) -> dict[str, np.ndarray]:
    with archives.Archive(path, compressed=True) as archive:
        return {name: archive.read(name) for name in archive.names}


def _is_readable(path: Path) -> bool:
    try:
        _read_file(path)
    except (OSError, archives.Damaged):
        return False
    return True


def _told(leaf: tuple[Any, np.ndarray]) -> str:
    path, array = leaf
    return f"{jax.tree_util.keystr(path)} {array.dtype}{list(array.shape)}".strip()


def _filled(leaf: np.ndarray, length: int) -> np.ndarray:
    extra = length - leaf.shape[0]
    if not leaf.shape[0]:
        return np.zeros((length, *leaf.shape[1:]), leaf.dtype)
    return np.concatenate([leaf, np.broadcast_to(leaf[-1:], (extra, *leaf.shape[1:]))]) if extra else leaf


def _lengths(lengths: Any, count: int) -> np.ndarray:
    try:
        found = np.asarray(lengths() if callable(lengths) else lengths)
    except Exception:  # whatever it is, it is no array
        found = np.asarray(None)
    if found.shape != (count,) or not np.issubdtype(found.dtype, np.integer) or (found < 0).any():
        raise DataError(
            f"Groups: lengths must be {count} integers, 0 or more, one for each element, got "
            f"{arguments.described(lengths)}; write lengths=[len(…) for each element]"
        )
    return found.astype(int)


def _integer(value: Any) -> int:
    if isinstance(value, (bool, np.bool_)):
        raise TypeError("a truth value is no number")
    return operator.index(value)


def _ids(ids: Any, count: int) -> list[Any]:
    try:
        found = None if isinstance(ids, (str, bytes, dict)) else [str(name) and name for name in ids]
    except Exception:  # whatever it is, it cannot be gone through
        found = None
    if found is None or len(found) != count:
        got = arguments.described(ids) if found is None else len(found)
        raise DataError(f"Groups: ids must be one for each of {count} elements, got {got}; write ids=range({count})")
    return found


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
