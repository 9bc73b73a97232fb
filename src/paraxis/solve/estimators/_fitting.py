"""From arrays to rows on devices, laid out once; and solvers, which are kept with what they compiled."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from paraxis._core import arrays, placing
from paraxis._core.placing import Axis
from paraxis.errors import DeviceError
from paraxis.solve import prox
from paraxis.solve._lbfgs import LBFGS
from paraxis.solve._proximal import ProximalGradient
from paraxis.solve._rows import Rows, lay, of_table
from paraxis.solve._streaming import TableRows
from paraxis.solve.estimators._quadratic import Quadratic
from paraxis.solve.objective import LossName, glm

_LARGE = 100_000  # rows, from which on compiling is the smaller part


@dataclasses.dataclass(frozen=True)
class Posed:
    """A fit as the solver sees it: its predictions ``z`` are those of the model up to ``origin + scale * z``."""

    loss: LossName
    targets: np.ndarray  # (n,) or (n, k)
    weight: np.ndarray  # (n,)
    num_outputs: int | None  # k if coefficients are (d, k), None if they are (d,)
    origin: Any = 0.0  # () or (k,)
    scale: Any = 1.0
    intercept: Any = 0.0  # where the solver's own begins
    centre: bool = False  # whether columns have their means subtracted, which changes the intercept only


@dataclasses.dataclass
class Placed:
    """Data on devices, what was subtracted from each column, the sum of the weights; and what is known so far."""

    data: Rows
    means: np.ndarray
    total: float
    quadratic: Quadratic | None = None

    def weighted(self, weight: np.ndarray) -> "Placed":
        """Return the same rows with other weights ``(n,)``."""
        own = self.data.weight
        padded = np.pad(weight.astype(own.dtype), (0, len(own) - len(weight)))
        data = self.data._replace(weight=jax.device_put(padded, own.sharding))
        return Placed(data, self.means, float(weight.sum(dtype=np.float64)))


@contextlib.contextmanager
def surroundings(dtype: Any, devices: int | None) -> Iterator[None]:
    """Within, arrays of this dtype keep it; and if devices are chosen by number, no mesh that is set chooses others."""
    own = placing.without_context() if devices is not None else contextlib.nullcontext()
    with jax.enable_x64(np.dtype(dtype) == np.float64), own:
        yield


def place(X: np.ndarray | TableRows, posed: Posed, devices: int | None) -> Placed:
    """Lay the rows out over the devices."""
    total = float(posed.weight.sum(dtype=np.float64))
    if isinstance(X, TableRows):
        means = X.means if posed.centre else np.zeros_like(X.means)
        return Placed(of_table(X.shifted(means) if posed.centre else X, posed.targets, posed.weight), means, total)
    means = np.zeros(X.shape[1], X.dtype)
    if posed.centre:
        means = np.einsum("n,nd->d", (posed.weight / total).astype(X.dtype), X)
    X, y, weight = _few_sizes(X, means if posed.centre else None, posed.targets, posed.weight)
    # Not copied: a fit lets its rows go before it returns.
    data = jax.block_until_ready(lay(X, y, weight, axis_of(len(X), devices), copied=False))
    return Placed(data, means, total)


@functools.lru_cache(maxsize=128)
def solver(loss: LossName, intercept: bool, has_l1: bool, tol: float, maxiter: int) -> LBFGS | ProximalGradient:
    """Return one object for the same options, so that what JAX compiled for it is found again. It holds no data."""
    objective = glm(loss, intercept=intercept, l2=True)
    if has_l1:
        operator = prox.first(prox.l1) if intercept else prox.l1
        return ProximalGradient(objective, operator, tol=tol, maxiter=maxiter)
    return LBFGS(objective, tol=tol, maxiter=maxiter)


def _few_sizes(
    X: np.ndarray, means: np.ndarray | None, y: np.ndarray, weight: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rows without means, and some of weight zero added: few sizes are compiled for, as of folds outside."""
    size = len(X)
    step = max(64, 2 ** (size.bit_length() - 6))
    num_padded = size + -size % step if size <= _LARGE else size
    targets, weight = arrays.repeat_last(y, num_padded), np.pad(weight, (0, num_padded - size))
    if means is None and num_padded == size:
        return X, targets, weight
    rows = np.empty((num_padded, X.shape[1]), X.dtype)
    np.subtract(X, 0 if means is None else means, out=rows[:size])
    rows[size:] = rows[size - 1]
    return rows, targets, weight


def axis_of(size: int, devices: int | None) -> Axis:
    """Return the axis of rows on so many devices."""
    if devices is None:
        names = jax.sharding.get_abstract_mesh().axis_names
        return Axis("rows", size, over=None if {"rows", placing.DEVICES} & {*names} else names or None)
    there = jax.devices()
    if not 1 <= devices <= len(there):
        raise DeviceError(f"devices must be from 1 to {len(there)}, as many as there are, got {devices!r}")
    return Axis("rows", size, mesh=placing.mesh_of(tuple(there[:devices])), over=placing.DEVICES)
