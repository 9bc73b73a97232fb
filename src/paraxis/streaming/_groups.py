"""The elements of an axis, read when they are needed: clients' data on disk, say."""

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from paraxis._core import check
from paraxis.errors import DataError

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
            Face dataset, an object of your own; a generator has neither. If it has ``__getitems__(indices)``, many are
            read at once. It is read from two threads.
        lengths: number of rows of each element, integers ``(size,)``; default: all elements have the same shapes.

    Attributes:
        numbers: the number of each element in the source, ``(size,)``: those that a cohort has drawn.

    Raises:
        DataError: if no array is as long as ``lengths`` say.

    Example:
        >>> import numpy as np, paraxis as px
        >>> rng = np.random.default_rng(0)
        >>> clients = px.Groups([{"x": rng.normal(size=(n, 3))} for n in (4, 2, 7)], lengths=[4, 2, 7])
        >>> len(clients), clients[2]["x"].shape
        (3, (7, 3))
    """

    def __init__(self, source: Any, *, lengths: Any = None) -> None:
        check.by_position("Groups", "source", [source] if hasattr(source, "shape") else [])
        self._source, self.numbers = source, np.arange(len(source))
        self._all_lengths: Any = (
            None if lengths is None else np.array([*map(operator.index, lengths)], int).reshape(len(source))
        )
        self._padded_to: dict[int, np.ndarray] = {}
        self._form = self._look()

    @classmethod
    def of_arrays(cls, tree: Any) -> "Groups":
        """Return the rows of arrays as elements: a pytree of ``(size, ...)``, in memory or memory-mapped.

        Raises:
            DataError: if they are not equally many.

        Example:
            >>> import numpy as np, paraxis as px
            >>> len(px.Groups.of_arrays({"x": np.zeros((5, 3)), "y": np.zeros(5)}))
            5
        """
        return cls(_Rows(tree))

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, number: int) -> Any:
        """Return one element as it is in the source, a pytree of arrays."""
        return self._element(int(self.numbers[operator.index(number)]))

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise DataError(
            "Groups: its elements are read when they are needed, and it is no array; write px.Stream(at_once=64).run("
            "loss, w, groups), or on the mesh loss(w, groups.arrays())"
        )

    __jax_array__ = property(__array__)  # jit and other transformations ask for it before they raise what says less

    @property
    def lengths(self) -> np.ndarray | None:
        """Return the number of rows of each element, ``(size,)``; ``None``: all have the same shapes."""
        return None if self._all_lengths is None else self._all_lengths[self.numbers]

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
        drawn = copy.copy(self)
        drawn.numbers = self.numbers[np.random.Generator(np.random.Philox(seed)).permutation(len(self))[:count]]
        return drawn

    def arrays(self) -> Any:
        """Return all elements in memory, ``(size, ...)`` each; of different length, as one :class:`Padded`.

        This is how a cohort goes into a program on the mesh: ``program(w, groups.sample(100, seed=0).arrays())``.
        """
        lengths = self.lengths
        return self._read(np.arange(len(self)), None if lengths is None else self._length(lengths, 1))

    def _length(self, lengths: np.ndarray, count: int) -> int:
        """Return the length to which elements of these lengths are padded, in chunks of ``count``.

        Samples of the same size are padded to the same few lengths: these depend on the whole source.
        """
        together = max(1, round(count * len(self._all_lengths) / len(self)))
        if together not in self._padded_to:
            self._padded_to[together] = _fewest(np.sort(self._all_lengths)[::-together], _NUM_LENGTHS)
        among = self._padded_to[together]
        return int(among[np.searchsorted(among, lengths.max())])

    def _look(self) -> "Form":
        """Return what elements look like, as the first does; of different length, the shortest and the longest."""
        lengths = self._all_lengths
        ends = [0] if lengths is None else [int(lengths.argmin()), int(lengths.argmax())]
        elements = [*map(self._element, ends)]
        leaves, structure = jax.tree.flatten(elements[0])
        shapes = [x.shape for x in leaves]
        if lengths is not None:
            for at, both in enumerate(zip(*map(jax.tree.leaves, elements), strict=False)):
                if all(x.shape[:1] == (lengths[n],) for n, x in zip(ends, both, strict=True)):
                    shapes[at] = (_LENGTH, *shapes[at][1:])
            if not any(shape[:1] == (_LENGTH,) for shape in shapes):
                raise DataError(
                    f"Groups: element {ends[0]} is {_shown(elements[0])}, where lengths says {lengths[ends[0]]} rows; "
                    f"give lengths=[len(…) for each element], or leave lengths out if all have the same shapes"
                )
        return Form(ends[0], structure, tuple(shapes), tuple(x.dtype for x in leaves))

    def _read(self, places: np.ndarray, length: int | None) -> Any:
        """Return elements by their places, stacked along a new first dimension, in NumPy arrays."""
        numbers, form = self.numbers[places], self._form
        tree = form.elements(length, len(numbers))
        if isinstance(self._source, _Rows) and length is None:
            elements = _as_arrays("elements", lambda: self._source.rows(numbers))
            return jax.tree.map(lambda x, struct: x.astype(struct.dtype, copy=False), elements, tree)
        tree = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), tree)
        lengths = [None] * len(numbers) if self._all_lengths is None else self._all_lengths[numbers].tolist()
        stacked = jax.tree.leaves(tree)
        for at, (number, element) in enumerate(zip(numbers.tolist(), self._elements(numbers.tolist()), strict=True)):
            for into, x in zip(stacked, form.leaves_of(element, number, lengths[at]), strict=True):
                if x.shape == into.shape[1:]:
                    into[at] = x
                else:
                    into[at, : len(x)], into[at, len(x) :] = x, x[-1:] if len(x) else 0
        if length is None:
            return tree
        count = np.array(lengths, np.int32)
        return Padded(tree, np.arange(length) < count[:, None], count)

    def _elements(self, numbers: list[int]) -> Iterable[Any]:
        if not hasattr(self._source, "__getitems__"):
            return map(self._element, numbers)
        return _as_arrays(f"elements {numbers}", lambda: [*self._source.__getitems__(numbers)])

    def _element(self, number: int) -> Any:
        return _as_arrays(f"element {number}", lambda: self._source[number])


def _as_arrays(name: str, read: Callable[[], Any]) -> Any:
    """Return what is read in NumPy arrays, of integers that JAX keeps."""
    try:
        tree = jax.tree.map(lambda x: (a := np.asarray(x)).astype(a.dtype.newbyteorder("="), copy=False), read())
    except Exception as error:
        raise DataError(f"Groups: {name} cannot be read: {type(error).__name__}: {error}") from error
    check.leaves("Groups", name, tree)
    return tree


_LENGTH = -1  # in a shape: the element's own length


class Form(NamedTuple):
    """What elements look like, whatever their number and length; and which element does."""

    example: int
    structure: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]

    @property
    def padded(self) -> list[bool]:
        """Return which leaves have padding where elements are stacked; the mask and the count, the last, have none."""
        padded = [shape[:1] == (_LENGTH,) for shape in self.shapes]
        return [*padded, False, False] if any(padded) else padded

    def elements(self, length: int | None, *size: int) -> Any:
        """Return what an element of this length looks like to JAX, or so many of them, without mask and count."""
        shapes = [(*size, *(length if n == _LENGTH else n for n in shape)) for shape in self.shapes]
        return self.structure.unflatten(map(jax.ShapeDtypeStruct, shapes, map(_canonical, self.dtypes)))

    def stacked(self, length: int | None, size: int) -> Any:
        """Return what so many elements look like, padded to this length."""
        tree = self.elements(length, size)
        if length is None:
            return tree
        return Padded(tree, jax.ShapeDtypeStruct((size, length), bool), jax.ShapeDtypeStruct((size,), np.int32))

    def leaves_of(self, element: Any, number: int, length: int | None) -> list[np.ndarray]:
        """Return the arrays of an element of this length, after a look at them."""
        (leaves, structure), first = jax.tree.flatten(element), self.elements(length)
        kinds = [[(x.shape, _canonical(x.dtype)) for x in tree] for tree in (leaves, jax.tree.leaves(first))]
        if structure != self.structure or kinds[0] != kinds[1]:
            rows = "if numbers of rows differ, give lengths=[len(…) for each element]"
            raise DataError(
                f"Groups: element {number} is {_shown(element)}, and not {_shown(first)}, as element {self.example} "
                f"is; {rows if length is None else f'lengths says {length} rows'}"
            )
        return leaves


_canonical = jax.dtypes.canonicalize_dtype


def _shown(element: Any) -> str:
    leaves = jax.tree_util.tree_leaves_with_path(element)
    return ", ".join(f"{jax.tree_util.keystr(path)} {_canonical(x.dtype)}{list(x.shape)}".strip() for path, x in leaves)


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


def _fewest(lengths: np.ndarray, most: int) -> np.ndarray:
    """Return the lengths, at most so many, to which elements are padded with the least padding in all.

    By dynamic programming over 512 quantiles: with ``k`` of them, the last covers lengths ``i`` to ``j``.
    """
    lengths = np.maximum(lengths, 1)
    values = np.unique(np.quantile(lengths, np.linspace(0, 1, 513), method="higher"))
    below = np.append(0, np.searchsorted(np.sort(lengths), values, side="right"))
    covered = np.tril(values[:, None] * (below[1:, None] - below[:-1]).astype(float))  # [j, i]: by one length, i to j
    covered[np.triu_indices(len(values), 1)] = np.inf
    cost, chosen = covered[:, 0], list[np.ndarray]()
    for _ in range(min(most, len(values)) - 1):
        total = covered + np.append(0.0, cost[:-1])
        chosen.append(total.argmin(axis=1))
        cost = total.min(axis=1)
    ends, j = list[int](), len(values) - 1
    while j >= 0:
        ends.append(j)
        j = chosen.pop()[j] - 1 if chosen else -1
    return values[ends[::-1]]


class _Rows:
    """Arrays as a source of their rows."""

    def __init__(self, tree: Any) -> None:
        check.by_position("Groups.of_arrays", "tree", tree)
        shapes = [getattr(x, "shape", ()) for x in jax.tree.leaves(tree)]  # NumPy may read a source without an end
        if len({shape[:1] for shape in shapes}) != 1 or not shapes[0]:
            raise DataError(
                "Groups.of_arrays: tree must have arrays of equally many rows, (size, ...), got "
                f"{', '.join(map(str, shapes)) or 'none'}; write px.Groups(source) for elements source[i]"
            )
        self.tree, self.count = jax.tree.map(np.asanyarray, tree), shapes[0][0]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Any:
        return jax.tree.map(lambda x: x[number], self.tree)

    def rows(self, numbers: np.ndarray) -> Any:
        is_range = bool((np.diff(numbers) == 1).all())
        at = slice(int(numbers[0]), int(numbers[-1]) + 1) if is_range else numbers
        return jax.tree.map(lambda x: x[at], self.tree)
