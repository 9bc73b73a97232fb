"""The rows that chunks give: kept for later passes and put together, or written and handed over as they come."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import pytrees
from paraxis._core.jax_api import Literal
from paraxis.streaming._passes import Pass, Plan
from paraxis.streaming._program import Chunk
from paraxis.streaming._trace import Flat

Each = Callable[[np.ndarray, Any], Any]


class Results:
    """What a run returns; with ``each`` or ``out``, rows go there in the last pass that gives some.

    Attributes:
        kept: rows of chunks, for each value that a later pass needs, or that is put together in memory.
    """

    def __init__(self, plan: Plan, flat: Flat, size: int, each: Each | None, out: Path | None) -> None:
        self._flat, self._dims, self._between, self._size = flat, plan.dims, plan.kept, size
        self._each, self._out, self._goes = each, out, each is not None or out is not None
        self._rows = {v for v in flat.results if isinstance(v, int) and plan.dims[v] is not None}
        self._last = next((one for one in reversed(plan.passes) if not self._rows.isdisjoint(one.results)), None)
        self.kept, self.files = dict[int, list[Any]](), dict[int, np.memmap[Any, Any]]()

    def _tree(self, of: Callable[[int], Any]) -> Any:
        leaves = [jnp.asarray(v.val) if isinstance(v, Literal) else of(v) for v in self._flat.results]
        return pytrees.combine(jax.tree.unflatten(self._flat.out_tree, leaves))

    def take(self, one: Pass, at: int, numbers: np.ndarray, rows: Mapping[int, Any]) -> None:
        """Take the rows of a chunk, of these elements first, and of stand-ins after; ``None``: all are lost."""
        for v, x in rows.items():
            if v in self._between or one is not self._last or not self._goes:
                held = self.kept.setdefault(v, [])
                held[at:] = [x]
        if self._goes and one is self._last and len(numbers):
            found = {v: rows[v] if v in rows else self.kept[v][at] for v in self._rows}
            own = {v: np.moveaxis(x, self._dims[v] or 0, 0)[: len(numbers)] for v, x in found.items()}
            for v, x in own.items() if self._out else ():
                self._file(v, x)[numbers] = x
            if self._each is not None:
                self._each(numbers, self._tree(own.get))

    def _file(self, v: int, rows: np.ndarray) -> Any:
        """Return the file of a result, mapped into memory; it is made for the first rows."""
        if v not in self.files:
            assert self._out is not None
            named = jax.tree_util.tree_leaves_with_path(self._tree(str))
            path = next(path for path, own in named if own == str(v))
            name = re.sub(r"\W+", ".", jax.tree_util.keystr(path)).strip(".") or "rows"
            file, shape = self._out / f"{name}.npy", (self._size, *rows.shape[1:])
            self._out.mkdir(parents=True, exist_ok=True)
            if not file.exists() or np.load(file, mmap_mode="r").shape != shape:
                np.lib.format.open_memmap(file, "w+", rows.dtype, shape)
            self.files[v] = np.load(file, mmap_mode="r+").view(rows.dtype)
        return self.files[v]

    def returned(self, values: Mapping[int, Any], chunks: Sequence[Chunk], lost: Sequence[int], whole: Any) -> Any:
        """Return the result: shared values as they are, of rows all; those of elements that are lost are masked.

        ``whole`` gives all rows of a chunk from those that this process has.
        """

        def one(v: int) -> Any:
            dim = self._dims[v]
            if dim is None:
                return jnp.asarray(values[v])
            if self._goes and self._out is None:
                return None
            found = np.moveaxis(self.files[v], 0, dim) if self._out else self._together(v, dim, chunks, whole)
            if not lost:
                return found
            mask = np.zeros(found.shape, bool)
            np.moveaxis(mask, dim, 0)[lost] = True
            return np.ma.MaskedArray(found, mask)

        found = {v: one(v) for v in self._flat.results if isinstance(v, int)}
        return self._tree(found.get)

    def _together(self, v: int, dim: int, chunks: Sequence[Chunk], whole: Any) -> np.ndarray:
        """Put rows together, in the order of the elements; those of chunks are let go on the way."""
        parts, found = self.kept[v], None
        for at, chunk in enumerate(chunks):
            if parts[at] is not None:
                rows = np.moveaxis(whole(parts[at], dim), dim, 0)
                found = np.zeros((self._size, *rows.shape[1:]), rows.dtype) if found is None else found
                found[chunk.numbers], parts[at] = rows[: len(chunk.numbers)], None
        assert found is not None
        return np.moveaxis(found, 0, dim)
