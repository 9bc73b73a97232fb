"""From arrays to rows on devices, laid out once."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Self

import jax
import numpy as np

from paraxis._core import arrays, placing
from paraxis._core.placing import Axis
from paraxis.errors import DeviceError
from paraxis.solve._rows import lay
from paraxis.solve._streaming import TableRows
from paraxis.solve.estimators._quadratic import Hessian
from paraxis.solve.objective import LinearObjective

_LARGE = 100_000  # rows, from which on compiling is the smaller part


@dataclasses.dataclass
class Posed:
    """A fit as the solver sees it: its predictions ``z`` are those of the model up to ``origin + scale * z``."""

    fun: LinearObjective  # without a penalty, nor yet an intercept
    targets: np.ndarray  # (n,) or (n, k)
    weight: np.ndarray  # (n,)
    outputs: tuple[int, ...] = ()  # (k,) if coefficients are (d, k)
    origin: Any = 0.0  # a number for each output, as the next two
    scale: Any = 1.0
    intercept: Any = 0.0  # where the solver's own begins
    by_hessians: bool = False  # whether the solver takes steps by Hessians
    centre: bool = False  # whether columns have their means subtracted, which changes the intercept only
    data: Any = None  # the rows, once they are on devices
    means: Any = None  # what was subtracted from each column
    total: float = 0.0  # of the weights
    offset: Any = None  # of each row, (n,)
    hessian: Hessian | None = None  # of a squared loss, once it is known

    def placed(self, X: Any, devices: int | None) -> Self:
        self.total = float(self.weight.sum(dtype=np.float64))
        self.means = np.zeros(X.shape[1], X.dtype)
        if isinstance(X, TableRows):
            if self.centre:
                self.means = X.shift = X.means
            self.data = lay(X, self.targets, self.weight, None, offset=self.offset, copied=False)
            return self
        if self.centre:
            self.means = np.einsum("n,nd->d", (self.weight / self.total).astype(X.dtype), X)
        # With rows of weight zero, few sizes are compiled for, as of folds outside.
        size, step = len(X), max(64, 2 ** (len(X).bit_length() - 6))
        padded = size + -size % step if size <= _LARGE else size
        X, weight = X - self.means if self.centre else X, np.pad(self.weight, (0, padded - size))
        X, y, offset = jax.tree.map(lambda x: arrays.repeat_last(x, padded), (X, self.targets, self.offset))
        # Not copied: a fit lets its rows go before it returns.
        self.data = jax.block_until_ready(lay(X, y, weight, axis_of(padded, devices), offset=offset, copied=False))
        return self


@contextlib.contextmanager
def precision_context(dtype: Any, devices: int | None) -> Iterator[None]:
    """Within, arrays of this dtype keep it; and if devices are chosen by number, no mesh that is set chooses others."""
    context = placing.without_context() if devices is not None else contextlib.nullcontext()
    with jax.enable_x64(dtype == np.float64), context:
        yield


def axis_of(size: int, devices: int | None) -> Axis:
    if devices is None:
        names = jax.sharding.get_abstract_mesh().axis_names
        return Axis("rows", size, over=None if {"rows", placing.DEVICES} & {*names} else names or None)
    if not 1 <= devices <= jax.device_count():
        raise DeviceError(f"devices must be from 1 to {jax.device_count()}, as many as there are, got {devices!r}")
    return Axis("rows", size, mesh=placing.mesh_of(tuple(jax.devices()[:devices])), over=placing.DEVICES)
