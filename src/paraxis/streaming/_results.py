"""The rows of all elements that a run has: kept for later passes, returned, written, or handed over as they come."""

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
from paraxis.streaming._trace import Flat

Each = Callable[[np.ndarray, Any], Any]


class Results:
    """What a run returns; with ``each``, rows go there in the last pass that gives some.

    Attributes:
        rows: arrays ``(size, ...)`` of values that a later pass needs or that are returned, by number and shape, which
            may differ for elements of different length. With ``out``, those returned are files, mapped into memory.
    """

    def __init__(self, plan: Plan, flat: Flat, each: Each | None, out: Path | None) -> None:
        self._flat, self._dims, self._kept, self._each, self._out = flat, plan.dims, plan.kept, each, out
        self._returned = {v for v in flat.results if isinstance(v, int) and plan.dims[v] is not None}
        self._last = next((one for one in reversed(plan.passes) if not self._returned.isdisjoint(one.results)), None)
        self.rows = dict[tuple[int, tuple[int, ...]], np.ndarray]()

    def _tree(self, of: Callable[[int], Any]) -> Any:
        leaves = [jnp.asarray(v.val) if isinstance(v, Literal) else of(v) for v in self._flat.results]
        return pytrees.combine(jax.tree.unflatten(self._flat.out_tree, leaves))

    def of(self, v: int, aval: Any) -> np.ndarray:
        """Return the array ``(size, ...)`` of a value of this type."""
        dim = self._dims[v] or 0
        shape = (aval.shape[dim], *aval.shape[:dim], *aval.shape[dim + 1 :])
        if (v, shape) not in self.rows:
            is_file = self._out is not None and v in self._returned
            self.rows[v, shape] = self._file(v, shape, aval.dtype) if is_file else np.zeros(shape, aval.dtype)
        return self.rows[v, shape]

    def _file(self, v: int, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return the file of a result, mapped into memory; one that is there is written anew."""
        assert self._out is not None
        named = jax.tree_util.tree_leaves_with_path(self._tree(str))
        path = next(path for path, number in named if number == str(v))
        name = re.sub(r"\W+", ".", jax.tree_util.keystr(path)).strip(".") or "rows"
        file = self._out / f"{name}.npy"
        self._out.mkdir(parents=True, exist_ok=True)
        if not file.exists() or np.load(file, mmap_mode="r").shape != shape:
            np.lib.format.open_memmap(file, "w+", dtype, shape)
        return np.load(file, mmap_mode="r+").view(dtype)

    def take(self, one: Pass, numbers: np.ndarray, rows: Mapping[int, Any], avals: Sequence[Any]) -> None:
        """Take the rows of a pass, of these elements first, and of stand-ins after."""
        of_elements = {v: np.moveaxis(x, self._dims[v] or 0, 0)[: len(numbers)] for v, x in rows.items()}
        is_handed = self._each is not None and one is self._last and len(numbers) > 0
        for v, x in of_elements.items():
            if not is_handed or self._out or v in self._kept:
                self.of(v, avals[v])[numbers] = x
        if self._each is not None and is_handed:
            of_elements |= {v: self.of(v, avals[v])[numbers] for v in self._returned.difference(of_elements)}
            self._each(numbers, self._tree(of_elements.get))

    def returned(self, values: Mapping[int, Any], lost: Sequence[int], whole: Callable[[np.ndarray], Any]) -> Any:
        """Return the result: shared values as they are, of rows all; those of elements that are lost are masked.

        ``whole`` gives the rows of all processes from those that this one has.
        """

        def one(v: int) -> Any:
            if (dim := self._dims[v]) is None:
                return jnp.asarray(values[v])
            if self._each is not None and self._out is None:
                return None
            rows = np.moveaxis(whole(self.of(v, self._flat.avals[v])), 0, dim)
            if not lost:
                return rows
            mask = np.zeros(rows.shape, bool)
            np.moveaxis(mask, dim, 0)[lost] = True
            return np.ma.MaskedArray(rows, mask)

        return self._tree({v: one(v) for v in self._flat.results if isinstance(v, int)}.get)
