"""From arrays to rows on devices, laid out once; and solvers, which are kept with what they compiled."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, Self

import jax
import numpy as np

from paraxis._core import arrays, placing
from paraxis._core.placing import Axis
from paraxis.errors import DeviceError
from paraxis.solve import prox
from paraxis.solve._lbfgs import LBFGS
from paraxis.solve._proximal import ProximalGradient
from paraxis.solve._rows import lay
from paraxis.solve._streaming import TableRows
from paraxis.solve.estimators._quadratic import Quadratic
from paraxis.solve.objective import LossName, glm

_LARGE = 100_000  # rows, from which on compiling is the smaller part


@dataclasses.dataclass
class Posed:
    """A fit as the solver sees it: its predictions ``z`` are those of the model up to ``origin + scale * z``."""

    loss: LossName
    targets: np.ndarray  # (n,) or (n, k)
    weight: np.ndarray  # (n,)
    outputs: tuple[int, ...] = ()  # (k,) if coefficients are (d, k)
    origin: Any = 0.0  # a number for each output, as the next two
    scale: Any = 1.0
    intercept: Any = 0.0  # where the solver's own begins
    centre: bool = False  # whether columns have their means subtracted, which changes the intercept only
    data: Any = None  # the rows, once they are on devices
    means: Any = None  # what was subtracted from each column
    total: float = 0.0  # of the weights
    quadratic: Quadratic | None = None

    def placed(self, X: Any, devices: int | None) -> Self:
        """Lay the rows out over the devices."""
        self.total = float(self.weight.sum(dtype=np.float64))
        self.means = np.zeros(X.shape[1], X.dtype)
        if isinstance(X, TableRows):
            if self.centre:
                self.means = X.shift = X.means
            self.data = lay(X, self.targets, self.weight, None, copied=False)
            return self
        if self.centre:
            self.means = np.einsum("n,nd->d", (self.weight / self.total).astype(X.dtype), X)
        # With rows of weight zero, few sizes are compiled for, as of folds outside.
        size, step = len(X), max(64, 2 ** (len(X).bit_length() - 6))
        padded = size + -size % step if size <= _LARGE else size
        if self.centre or padded > size:
            rows = np.empty((padded, X.shape[1]), X.dtype)
            np.subtract(X, self.means, out=rows[:size])
            rows[size:] = rows[size - 1]
            X = rows
        y, weight = arrays.repeat_last(self.targets, padded), np.pad(self.weight, (0, padded - size))
        # Not copied: a fit lets its rows go before it returns.
        self.data = jax.block_until_ready(lay(X, y, weight, axis_of(padded, devices), copied=False))
        return self

    def weighted(self, weight: np.ndarray) -> "Posed":
        """Return the same rows with other weights ``(n,)``."""
        own, total = self.data.weight, float(weight.sum(dtype=np.float64))
        padded = np.pad(weight.astype(own.dtype), (0, len(own) - len(weight)))
        data = self.data._replace(weight=jax.device_put(padded, own.sharding))
        return dataclasses.replace(self, data=data, total=total, quadratic=None)


@contextlib.contextmanager
def surroundings(dtype: Any, devices: int | None) -> Iterator[None]:
    """Within, arrays of this dtype keep it; and if devices are chosen by number, no mesh that is set chooses others."""
    own = placing.without_context() if devices is not None else contextlib.nullcontext()
    with jax.enable_x64(dtype == np.float64), own:
        yield


@functools.lru_cache(maxsize=128)
def solver(loss: LossName, intercept: bool, has_l1: bool, tol: float, maxiter: int) -> LBFGS | ProximalGradient:
    """Return one object for the same options, so that what JAX compiled for it is found again. It holds no data."""
    objective, operator = glm(loss, intercept=intercept, l2=True), prox.first(prox.l1) if intercept else prox.l1
    if has_l1:
        return ProximalGradient(objective, operator, tol=tol, maxiter=maxiter)
    return LBFGS(objective, tol=tol, maxiter=maxiter)


def axis_of(size: int, devices: int | None) -> Axis:
    """Return the axis of rows on so many devices."""
    if devices is None:
        names = jax.sharding.get_abstract_mesh().axis_names
        return Axis("rows", size, over=None if {"rows", placing.DEVICES} & {*names} else names or None)
    if not 1 <= devices <= jax.device_count():
        raise DeviceError(f"devices must be from 1 to {jax.device_count()}, as many as there are, got {devices!r}")
    return Axis("rows", size, mesh=placing.mesh_of(tuple(jax.devices()[:devices])), over=placing.DEVICES)
