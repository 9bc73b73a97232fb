"""The user's transform of the rows read: of whole batches in one process, of each row alone in several."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from paraxis._core import tree
from paraxis.errors import DataError
from paraxis.train._order import RowGenerators
from paraxis.train._sources import to_host


class Transform:
    """``transform(rows)`` or ``transform(rows, random)``.

    With several processes, the first rows show whether it does the same to a row alone as among others.
    """

    def __init__(self, fn: Callable[..., Any], seed: int) -> None:
        self._fn = fn
        self._seed = seed
        self._draws = "random" in inspect.signature(fn).parameters
        self._is_tried = jax.process_count() == 1

    def __call__(self, rows: Any, epoch: int, ids: np.ndarray) -> Any:
        """Rows ``(len(ids), ...)`` on the host → the same number of others."""
        if self._is_tried or len(ids) < 2:
            return self._call(rows, epoch, ids)
        self._is_tried = True
        first = jax.tree.map(lambda x: to_host(x)[:1].copy(), rows)  # it may write into what it is given
        made = self._call(rows, epoch, ids)
        _require_alike(made, self._call(first, epoch, ids[:1]))
        return made

    def _call(self, rows: Any, epoch: int, ids: np.ndarray) -> Any:
        made = self._fn(rows, **({"random": RowGenerators(self._seed, epoch, ids)} if self._draws else {}))
        if made is None:
            raise DataError("transform returned None; end it with the line `return batch`")
        return made


def _require_alike(together: Any, alone: Any) -> None:
    """Check that the first row of a result is the result of the first row."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(together), jax.tree.leaves(alone), strict=True)
    for (path, x), one in pairs:
        x, one = to_host(x), to_host(one)
        is_same = (
            np.allclose(x[:1], one, rtol=1e-3, atol=1e-5, equal_nan=True) if x.dtype.kind in "fc" else x[:1] == one
        )
        if not np.all(is_same):
            raise DataError(
                f"transform gives another {tree.name('batch', path)} for a row alone than for the same row among "
                "others. With several processes, each of which reads other rows, it must treat each row by itself, and "
                "draw random numbers from the row's own generator: def transform(batch, random): … random[i].normal()"
            )
