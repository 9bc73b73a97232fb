"""The elements of an axis, read when they are needed: clients' data on disk, say."""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from paraxis._calls import check
from paraxis._host import mapped
from paraxis._jax import dtypes
from paraxis.errors import DataError, ShapeError

_NUM_LENGTHS = 12


class Groups:
    """The elements of an axis, each a pytree of arrays, read when they are needed.

    Among the arguments of :meth:`px.Stream.run`, groups stand for arrays ``(size, ...)`` whose rows are the elements.
    On the mesh, :meth:`arrays` gives these arrays.

    **Elements of different length** (``lengths`` is given): arrays whose first dimension is the element's length are
    padded to a common one by repeating the last row, and the mapped function gets a :class:`Padded` element:
    ``data["x"]`` with ``data.mask``, which says which rows are real, and ``data.count``. Whatever it computes over rows
    must use the mask; :class:`px.Stream` raises where a result depends on padding. Elements are padded to at most
    twelve lengths, chosen for the least padding; the program is compiled for each.

    Args:
        source: has a length, and gives element ``i`` by ``source[i]``: a list, a Grain source, a PyTorch or Hugging
            Face dataset, an object of your own. If it has ``__getitems__(indices)``, many are read at once. It is read
            from two threads.
        lengths: number of rows of each element, integers ``(size,)``; default: all elements have the same shapes.

    Raises:
        DataError: if there are no elements, or ``lengths`` are not one integer for each.

    Example:
        >>> import numpy as np, paraxis as px
        >>> rng = np.random.default_rng(0)
        >>> clients = px.Groups([{"x": rng.normal(size=(n, 3))} for n in (4, 2, 7)], lengths=[4, 2, 7])
        >>> len(clients), clients[2]["x"].shape
        (3, (7, 3))
    """

    def __init__(self, source: Any, *, lengths: Any = None) -> None:
        if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")) or isinstance(
            source, (dict, str, bytes)
        ):
            raise DataError(
                f"Groups: source must have a length and give elements by number, got {check.described(source)}; "
                f"write px.Groups([{{'x': x, 'y': y}} for x, y in clients]), or px.Groups.of_arrays(tree)"
            )
        if not len(source):
            raise DataError("Groups: source has no elements; give at least one")
        self._source = source
        self._numbers = np.arange(len(source))
        self._all_lengths = None if lengths is None else _lengths(lengths, len(source))
        self._padded_to: dict[int, np.ndarray] = {}
        self._first_by_width: dict[bool, Any] = {}

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

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> Any:
        """Return one element as it is in the source, a pytree of arrays."""
        return self._element(int(self._numbers[operator.index(number)]))

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise DataError(
            "Groups: its elements are read when they are needed, and it is no array; write px.Stream(at_once=64).run("
            "loss, w, groups), or on the mesh loss(w, groups.arrays())"
        )

    @property
    def __jax_array__(self) -> Any:  # jit and other transformations ask for it before they raise what says less
        return self.__array__()

    @property
    def lengths(self) -> np.ndarray | None:
        """Return the number of rows of each element, ``(size,)``; ``None``: all have the same shapes."""
        return None if self._all_lengths is None else self._all_lengths[self._numbers]

    @property
    def numbers(self) -> np.ndarray:
        """Return the number of each element in the source, ``(size,)``: those that a cohort has drawn."""
        return self._numbers

    def sample(self, count: int, *, seed: int | Sequence[int]) -> "Groups":
        """Draw a cohort: so many elements, without replacement. The same seed draws the same ones on any machine.

        Args:
            count: how many.
            seed: an integer, or several, such as ``(seed, round)``.

        Raises:
            ValueError: if there are not so many.

        Example:
            >>> import numpy as np, paraxis as px
            >>> clients = px.Groups.of_arrays(np.arange(10))
            >>> [int(client) for client in clients.sample(3, seed=(0, 1))]
            [1, 5, 6]
        """
        count = check.count("Groups.sample", "count", count, most=len(self))
        entropy = [*seed] if isinstance(seed, Sequence) else [seed]
        random = np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))
        drawn = object.__new__(Groups)
        numbers = self._numbers[random.permutation(len(self))[:count]]
        drawn.__dict__.update(self.__dict__, _numbers=numbers, _first_by_width={})
        return drawn

    def arrays(self) -> Any:
        """Return all elements in memory, ``(size, ...)`` each; of different length, as one :class:`Padded`.

        This is how a cohort goes into a program on the mesh: ``program(w, groups.sample(100, seed=0).arrays())``.
        """
        lengths = self.lengths
        return self._read(np.arange(len(self)), None if lengths is None else self._length(lengths, 1))

    def __repr__(self) -> str:
        lengths = self.lengths
        rows = "" if lengths is None else f", {int(lengths.min())} to {int(lengths.max())} rows each"
        return f"<Groups: {len(self)} elements{rows}>"

    # --- for px.Stream ---------------------------------------------------------------------------------------------

    def _length(self, lengths: np.ndarray, count: int) -> int:
        """Return the length to which elements of these lengths are padded, in chunks of ``count``.

        Samples of the same size are padded to the same few lengths: these depend on the whole source.
        """
        assert self._all_lengths is not None
        together = max(1, round(count * len(self._all_lengths) / len(self)))
        if together not in self._padded_to:
            longest = np.sort(self._all_lengths)[::-1]
            heads = np.arange(len(longest)) // together * together
            self._padded_to[together] = fewest(longest[heads], _NUM_LENGTHS)
        among = self._padded_to[together]
        return int(among[np.searchsorted(among, lengths.max())])

    @property
    def _first(self) -> Any:
        """The first element, whose structure, shapes and dtypes all elements have."""
        wide = dtypes.is_wide()
        if wide not in self._first_by_width:
            self._first_by_width[wide] = self._element(int(self._numbers[0]))
        return self._first_by_width[wide]

    @property
    def _num_leaves(self) -> int:
        return len(jax.tree.leaves(self._first)) + 2 * (self._all_lengths is not None)  # mask and count

    def _is_padded(self, leaf: int) -> bool:
        """Return whether a leaf of the elements has padding: mask and count, the last two, have none."""
        return self._all_lengths is not None and leaf < len(self._is_long) and self._is_long[leaf]

    def _structs(self, size: int, length: int | None) -> Any:
        """Return shapes ``(size, ...)`` of so many elements, padded to this length."""
        one = self._first
        if length is not None:
            leaves, structure = jax.tree.flatten(one)
            padded = [
                _padded(x[:1], length) if is_long else x for x, is_long in zip(leaves, self._is_long, strict=True)
            ]
            one = Padded(jax.tree.unflatten(structure, padded), np.zeros(length, bool), np.int32())
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct((size, *a.shape), a.dtype), one)

    def _read(self, places: np.ndarray, length: int | None) -> Any:
        """Return elements by their places, stacked along a new first dimension, in NumPy arrays.

        Raises:
            DataError: if one cannot be read, or JAX would cut its integers; the message names it.
            ShapeError: if one does not look like the first; likewise.
        """
        numbers = self._numbers[places]
        if isinstance(self._source, _Rows) and length is None:
            found = self._source.rows(numbers)
            check.no_cut("Groups", "elements", found)
            return found
        given = zip(self._elements(numbers), numbers, strict=True)
        elements = (self._as_first(x, int(number), length) for x, number in given)
        first = next(elements)
        stacked = [np.empty((len(numbers), *leaf.shape), leaf.dtype) for leaf in jax.tree.leaves(first)]
        for at, element in enumerate(itertools.chain([first], elements)):  # no two are needed at once
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
            raise DataError(f"Groups: elements {numbers.tolist()} cannot be read: {_text(error)}") from error
        if len(found) != len(numbers):
            raise DataError(f"Groups: the source gave {len(found)} elements for {len(numbers)}: {numbers.tolist()}")
        return [self._as_arrays(x, int(number)) for x, number in zip(found, numbers, strict=True)]

    def _element(self, number: int) -> Any:
        try:
            found = self._source[number]
        except Exception as error:
            raise DataError(f"Groups: element {number} cannot be read: {_text(error)}") from error
        return self._as_arrays(found, number)

    def _as_arrays(self, element: Any, number: int) -> Any:
        def array(path: Any, leaf: Any) -> np.ndarray:
            found = np.asarray(leaf)
            if found.dtype == object or found.dtype.kind in "USMm":
                raise DataError(
                    f"Groups: element {number}{jax.tree_util.keystr(path)} holds {found.dtype} where numbers are "
                    f"needed; leave it out, or give numbers: np.unique(labels, return_inverse=True)[1]"
                )
            if (reason := check.why_cut(found)) is not None:
                raise DataError(f"Groups: element {number}{jax.tree_util.keystr(path)} {reason}")
            found = dtypes.native(found)
            return found.astype(jax.dtypes.canonicalize_dtype(found.dtype), copy=False)

        return jax.tree.map_with_path(array, element)

    def _as_first(self, element: Any, number: int, length: int | None) -> Any:
        """Return an element that looks like the first, padded to a length."""
        leaves, structure = jax.tree.flatten(element)
        own = None if length is None or self._all_lengths is None else int(self._all_lengths[number])
        first, expected = jax.tree.flatten(self._first)
        is_long = [False] * len(first) if own is None else self._is_long
        shapes = [(own, *y.shape[1:]) if long else y.shape for y, long in zip(first, is_long, strict=True)]
        if structure != expected or any(
            x.shape != shape or x.dtype != y.dtype for x, y, shape in zip(leaves, first, shapes, strict=True)
        ):
            raise ShapeError(
                f"Groups: element {number} is {_look(element)}, but the first is {_look(self._first)}; "
                + (
                    "if elements have different lengths, write px.Groups(source, lengths=[len(…) for each element])"
                    if self._all_lengths is None
                    else f"only the number of rows may differ, and lengths says {own} for this one"
                )
            )
        if own is None or length is None:
            return element
        padded = [_padded(x, length) if long else x for x, long in zip(leaves, is_long, strict=True)]
        return Padded(jax.tree.unflatten(structure, padded), np.arange(length) < own, np.int32(own))

    @functools.cached_property
    def _is_long(self) -> list[bool]:
        """Which leaves have as many rows as the element's length, as elements of the least and the greatest show."""
        lengths = self._all_lengths
        assert lengths is not None
        numbers = {int(lengths.argmin()), int(lengths.argmax())}
        shapes = [[x.shape[:1] == (lengths[n],) for x in jax.tree.leaves(self._element(n))] for n in numbers]
        found = [all(leaf) for leaf in zip(*shapes, strict=True)]
        if not any(found):
            n = min(numbers)
            raise ShapeError(
                f"Groups: element {n} is {_look(self._element(n))}, where lengths says {lengths[n]} rows; give "
                f"lengths=[len(…) for each element], or leave lengths out if all have the same shapes"
            )
        return found


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Padded:
    """An element padded to a length that it shares with others.

    Attributes:
        data: the element's own pytree, its rows padded to ``length`` by repeating the last. ``element["x"]`` is
            ``element.data["x"]``.
        mask: booleans ``(length,)``, which rows are real.
        count: how many are, int32.
    """

    data: Any
    mask: Any
    count: Any

    def __getitem__(self, name: Any) -> Any:
        return self.data[name]


def fewest(lengths: np.ndarray, most: int) -> np.ndarray:
    """Return the lengths, at most so many, to which elements are padded with the least padding in all.

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
    cost = (values * below[1:]).astype(float)  # one length covers all up to j
    chosen = [np.zeros(number, int)]
    for _ in range(min(most, number) - 1):
        total = np.full((number, number), np.inf)  # [j, i]: the last length covers i to j
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


class _Rows:
    """Arrays as a source of their rows. Another process is sent the files of memory-mapped ones."""

    def __init__(self, tree: Any) -> None:
        self.tree = jax.tree.map(lambda x: x if isinstance(x, np.ndarray) else np.asarray(x), tree)
        counts = {leaf.shape[:1] for leaf in jax.tree.leaves(self.tree)}
        if len(counts) != 1 or counts in ({()}, {(0,)}):
            shapes = ", ".join(str(leaf.shape) for leaf in jax.tree.leaves(self.tree)) or "none"
            raise ShapeError(
                f"Groups.of_arrays: tree must have arrays of equally many rows, (size, ...), got {shapes}; of a list "
                f"of elements, write px.Groups(clients, lengths=[len(…) for each element])"
            )
        self.count = counts.pop()[0]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "tree": jax.tree.map(mapped.by_file, self.tree)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, tree=jax.tree.map(mapped.opened, state["tree"]))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Any:
        return jax.tree.map(lambda x: x[number], self.tree)

    def rows(self, numbers: np.ndarray) -> Any:
        first, last = int(numbers[0]), int(numbers[-1])
        in_order = last - first + 1 == len(numbers) and bool((np.diff(numbers) == 1).all())
        at = slice(first, last + 1) if in_order else numbers
        return jax.tree.map(lambda x: dtypes.native(np.asarray(x[at])), self.tree)


def _padded(leaf: np.ndarray, length: int) -> np.ndarray:
    extra = length - leaf.shape[0]
    if not leaf.shape[0]:
        return np.zeros((length, *leaf.shape[1:]), leaf.dtype)
    return np.concatenate([leaf, np.broadcast_to(leaf[-1:], (extra, *leaf.shape[1:]))]) if extra else leaf


def _lengths(lengths: Any, count: int) -> np.ndarray:
    found = np.asarray(lengths)
    if found.shape != (count,) or not np.issubdtype(found.dtype, np.integer) or (found < 0).any():
        raise DataError(
            f"Groups: lengths must be {count} integers, 0 or more, one for each element, got "
            f"{check.described(lengths)}; write lengths=[len(…) for each element]"
        )
    return found.astype(int)


def _look(element: Any) -> str:
    leaves = jax.tree_util.tree_leaves_with_path(element)
    shown = [f"{jax.tree_util.keystr(path)} {x.dtype}{list(x.shape)}".strip() for path, x in leaves[:6]]
    return ", ".join([*shown, *["…"] * (len(leaves) > 6)]) or "without arrays"


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
