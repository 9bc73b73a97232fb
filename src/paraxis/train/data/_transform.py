"""A user's function of the rows read, which has to do the same to a row wherever that row is read."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from paraxis._axes import tree
from paraxis.errors import DataError
from paraxis.train.data._host import to_host
from paraxis.train.data._order import RowGenerators


class Transform:
    """``transform(rows)`` or ``transform(rows, random)``. On the first rows it is tried whether it keeps them apart."""

    def __init__(self, fn: Callable[..., Any], seed: int) -> None:
        self._fn = fn
        self._seed = seed
        self._draws = _has_parameter(fn, "random")
        self._tried = False

    @property
    def function(self) -> Callable[..., Any]:
        """The user's."""
        return self._fn

    def __call__(self, rows: Any, epoch: int, ids: np.ndarray) -> Any:
        """Rows ``(len(ids), ...)`` on the host → the same number of others."""
        if self._tried or len(ids) < 2:
            return self._call(rows, epoch, ids)
        self._tried = True
        first = jax.tree.map(lambda x: to_host(x)[:1].copy(), rows)  # it may write into what it is given
        made = self._call(rows, epoch, ids)
        _require_alike(made, self._call(first, epoch, ids[:1]))
        return made

    def _call(self, rows: Any, epoch: int, ids: np.ndarray) -> Any:
        random = {"random": RowGenerators(self._seed, epoch, ids)} if self._draws else {}
        try:
            made = self._fn(rows, **random)
        except Exception as error:
            raise DataError(f"transform raised {type(error).__name__}: {error}") from error
        _require_as_many(made, len(ids))
        return made


def _has_parameter(fn: Callable[..., Any], name: str) -> bool:
    try:
        return name in inspect.signature(fn).parameters
    except (TypeError, ValueError):  # of a function that is not written in Python
        return False


def _require_as_many(made: Any, num_rows: int) -> None:
    """Arrays with as many rows as there were; what has none is found later."""
    leaves = jax.tree_util.tree_leaves_with_path(made)
    if not leaves:
        raise DataError(f"transform returned {made!r}, not a batch; end it with the line `return batch`")
    for path, leaf in leaves:
        shape = np.shape(leaf)
        if shape and shape[0] != num_rows:
            raise DataError(
                f"transform returned {tree.name('batch', path)} with {shape[0]} rows for the {num_rows} it was given; "
                "it must return as many. Rows are left out, or added, in the source: px.loader(rows[keep], 32)"
            )


def _require_alike(together: Any, alone: Any) -> None:
    """Check that the first row of a result is the result of the first row."""
    if jax.tree.structure(together) != jax.tree.structure(alone):
        raise DataError(
            f"transform gives {jax.tree.structure(together)} for several rows, but {jax.tree.structure(alone)} for one"
        )
    for (path, x), one in zip(jax.tree_util.tree_leaves_with_path(together), jax.tree.leaves(alone), strict=True):
        x, one = to_host(x), to_host(one)
        if x.ndim == 0 or one.shape != (1, *x.shape[1:]) or not _close(x[:1], one):
            raise DataError(
                f"transform gives another {tree.name('batch', path)} for a row alone than for the same row among "
                "others. It must treat each row by itself, since each process reads other rows; draw random numbers "
                "from the row's own generator: def transform(batch, random): … random[i].normal()"
            )


def _close(x: np.ndarray, y: np.ndarray) -> bool:
    if x.dtype.kind in "fc":
        return bool(np.allclose(x, y, rtol=1e-3, atol=1e-5, equal_nan=True))
    return bool(np.array_equal(x, y))
