"""The elements of an axis, read when they are needed: clients' data on disk, say."""

import dataclasses
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from paraxis._core import check, dtypes
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
        self._all_lengths = None if lengths is None else np.asarray(lengths)
        if self._all_lengths is not None and (
            self._all_lengths.shape != (len(source),)
            or not np.issubdtype(self._all_lengths.dtype, np.integer)
            or (self._all_lengths < 0).any()
        ):
            raise DataError(
                f"Groups: lengths must be {len(source)} integers, 0 or more, one for each element, got "
                f"{check.described(lengths)}; write lengths=[len(…) for each element]"
            )
        self._padded_to: dict[int, np.ndarray] = {}
        self._forms: dict[bool, _Form] = {}

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
        drawn.__dict__.update(self.__dict__, _numbers=numbers)
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
    def _form(self) -> "_Form":
        """What the source's elements look like, as its first one does."""
        wide = dtypes.is_wide()
        if wide not in self._forms:
            self._forms[wide] = _Form.of(self._element(0), self._all_lengths, self._element)
        return self._forms[wide]

    @property
    def _num_leaves(self) -> int:
        return len(self._form.dtypes) + 2 * (self._all_lengths is not None)  # mask and count

    @property
    def _kind(self) -> Any:
        """What a trace with these groups depends on."""
        return len(self), self._all_lengths is None, self._form

    def _is_padded(self, leaf: int) -> bool:
        """Return whether a leaf of the elements has padding: mask and count, the last two, have none."""
        return leaf < len(self._form.is_long) and self._form.is_long[leaf]

    def _structs(self, size: int, length: int | None) -> Any:
        """Return shapes ``(size, ...)`` of so many elements, padded to this length."""
        form = self._form
        shapes = zip(form.shapes(length), form.dtypes, strict=True)
        tree = form.structure.unflatten([jax.ShapeDtypeStruct((size, *shape), dtype) for shape, dtype in shapes])
        if length is None:
            return tree
        return Padded(tree, jax.ShapeDtypeStruct((size, length), bool), jax.ShapeDtypeStruct((size,), np.int32))

    def _read(self, places: np.ndarray, length: int | None) -> Any:
        """Return elements by their places, stacked along a new first dimension, in NumPy arrays.

        Raises:
            DataError: if one cannot be read, or JAX would cut its integers; the message names it.
            ShapeError: if one does not look like the first; likewise.
        """
        numbers, form = self._numbers[places], self._form
        if isinstance(self._source, _Rows) and length is None:
            return _as_arrays(self._source.rows(numbers), "elements")
        stacked = [
            np.empty((len(numbers), *shape), dtype)
            for shape, dtype in zip(form.shapes(length), form.dtypes, strict=True)
        ]
        for at, (number, element) in enumerate(zip(numbers, self._elements(numbers), strict=True)):
            own = None if self._all_lengths is None else int(self._all_lengths[number])
            for into, leaf, is_long in zip(stacked, form.leaves(element, number, own), form.is_long, strict=True):
                if is_long:
                    into[at, :own], into[at, own:] = leaf, leaf[-1:] if own else 0
                else:
                    into[at] = leaf
        tree = form.structure.unflatten(stacked)
        if length is None or self._all_lengths is None:
            return tree
        lengths = self._all_lengths[numbers].astype(np.int32)
        return Padded(tree, np.arange(length) < lengths[:, None], lengths)

    def _elements(self, numbers: np.ndarray) -> Iterable[Any]:
        many = getattr(self._source, "__getitems__", None)
        if many is None:
            return map(self._element, numbers.tolist())
        try:
            found = list(many(numbers.tolist()))
        except Exception as error:
            raise DataError(
                f"Groups: elements {numbers.tolist()} cannot be read: {type(error).__name__}: {error}"
            ) from error
        if len(found) != len(numbers):
            raise DataError(f"Groups: the source gave {len(found)} elements for {len(numbers)}: {numbers.tolist()}")
        return [_as_arrays(x, f"element {number}") for x, number in zip(found, numbers, strict=True)]

    def _element(self, number: int) -> Any:
        try:
            found = self._source[number]
        except Exception as error:
            raise DataError(f"Groups: element {number} cannot be read: {type(error).__name__}: {error}") from error
        return _as_arrays(found, f"element {number}")


def _as_arrays(tree: Any, name: str) -> Any:
    """Return a tree's numbers in NumPy arrays, of dtypes that JAX has."""

    def array(path: Any, leaf: Any) -> np.ndarray:
        found = np.asarray(leaf)
        if found.dtype == object or found.dtype.kind in "USMm":
            raise DataError(
                f"Groups: {name}{jax.tree_util.keystr(path)} holds {found.dtype} where numbers are needed; leave it "
                f"out, or give numbers: np.unique(labels, return_inverse=True)[1]"
            )
        if (reason := check.why_cut(found)) is not None:
            raise DataError(f"Groups: {name}{jax.tree_util.keystr(path)} {reason}")
        found = dtypes.native(found)
        return found.astype(jax.dtypes.canonicalize_dtype(found.dtype), copy=False)

    return jax.tree.map_with_path(array, tree)


@dataclasses.dataclass(frozen=True)
class _Form:
    """What elements look like: their structure, dtypes, and shapes, which may begin with a length of their own."""

    structure: Any
    dtypes: tuple[np.dtype, ...]
    own: tuple[tuple[int, ...], ...]
    is_long: tuple[bool, ...]

    @classmethod
    def of(cls, first: Any, lengths: np.ndarray | None, element: Callable[[int], Any]) -> "_Form":
        leaves, structure = jax.tree.flatten(first)
        is_long = (False,) * len(leaves)
        if lengths is not None:  # elements of the least and of the greatest length show which leaves have it
            numbers = int(lengths.argmin()), int(lengths.argmax())
            shapes = [[x.shape[:1] == (lengths[n],) for x in jax.tree.leaves(element(n))] for n in numbers]
            is_long = tuple(map(all, zip(*shapes, strict=True)))
            if not any(is_long):
                raise ShapeError(
                    f"Groups: element {numbers[0]} is {_look(element(numbers[0]))}, where lengths says "
                    f"{lengths[numbers[0]]} rows; give lengths=[len(…) for each element], or leave lengths out if all "
                    f"have the same shapes"
                )
        own = tuple(x.shape[long:] for x, long in zip(leaves, is_long, strict=True))
        return cls(structure, tuple(x.dtype for x in leaves), own, is_long)

    def shapes(self, length: int | None) -> list[tuple[int, ...]]:
        """Return the leaves' shapes, of this length."""
        return [(length or 0, *own) if long else own for own, long in zip(self.own, self.is_long, strict=True)]

    def leaves(self, element: Any, number: int, length: int | None) -> list[np.ndarray]:
        """Return the leaves of an element of this length.

        Raises:
            ShapeError: if it looks otherwise.
        """
        leaves, structure = jax.tree.flatten(element)
        shapes = self.shapes(length)
        expected = [*zip(shapes, self.dtypes, strict=True)]
        if structure != self.structure or [(x.shape, x.dtype) for x in leaves] != expected:
            first = self.structure.unflatten([jax.ShapeDtypeStruct(*x) for x in expected])
            raise ShapeError(
                f"Groups: element {number} is {_look(element)}, but the first is {_look(first)}; "
                + (
                    "if elements have different lengths, write px.Groups(source, lengths=[len(…) for each element])"
                    if length is None
                    else f"only the number of rows may differ, and lengths says {length} for this one"
                )
            )
        return leaves


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
        values, counts = values[last], np.diff(np.cumsum(counts)[last], prepend=0)
    below = np.concatenate([[0], np.cumsum(counts)])
    covered = np.tril(values[:, None] * (below[1:, None] - below[:-1]).astype(float))  # [j, i]: by one length, i to j
    covered[np.triu_indices(len(values), 1)] = np.inf
    cost, chosen = covered[:, 0], list[np.ndarray]()
    for _ in range(min(most, len(values)) - 1):
        total = covered + np.append(0.0, cost[:-1])
        chosen.append(total.argmin(axis=1))
        cost = total.min(axis=1)
    found, j = [len(values) - 1], len(values) - 1
    for first in reversed(chosen):
        if first[j] == 0:
            break
        j = first[j] - 1
        found.append(j)
    return values[found[::-1]]


class _Rows:
    """Arrays as a source of their rows."""

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

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Any:
        return jax.tree.map(lambda x: x[number], self.tree)

    def rows(self, numbers: np.ndarray) -> Any:
        first, last = int(numbers[0]), int(numbers[-1])
        in_order = last - first + 1 == len(numbers) and bool((np.diff(numbers) == 1).all())
        at = slice(first, last + 1) if in_order else numbers
        return jax.tree.map(lambda x: x[at], self.tree)


def _look(element: Any) -> str:
    leaves = jax.tree_util.tree_leaves_with_path(element)
    shown = [f"{jax.tree_util.keystr(path)} {x.dtype}{list(x.shape)}".strip() for path, x in leaves[:6]]
    return ", ".join([*shown, *["…"] * (len(leaves) > 6)]) or "without arrays"
