"""From arrays to a minimum: rows are laid out over devices once, and solvers are kept, with what they compiled.

Nothing here knows scikit-learn's protocol. Parameters are ``(d,)`` for one output and ``(d, k)`` for k, with ``()`` or
``(k,)`` for the intercept, as in :mod:`paraxis.solve.objective`.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._axes import arrays, layout, placing
from paraxis._axes.axis import Axis
from paraxis.errors import DeviceError
from paraxis.solve import prox
from paraxis.solve._lbfgs import LBFGS
from paraxis.solve._proximal import ProximalGradient
from paraxis.solve._rows import Rows, lay
from paraxis.solve._run import OptStep, Watch
from paraxis.solve.estimators._quadratic import Penalty, Quadratic, Solution
from paraxis.solve.objective import LossName, glm

_LARGE = 100_000  # rows, from which on compiling is the smaller part
_FEW = 1_000_000  # numbers: to call a program takes longer than what it does with them

Method = Literal["lbfgs", "proximal-gradient", "quadratic"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything about a fit that is compiled into its program."""

    method: Method
    loss: LossName
    intercept: bool
    tol: float
    max_iter: int


@dataclasses.dataclass
class Placed:
    """Data on devices, what was subtracted from each column, and what is known of the data so far."""

    data: Rows
    means: np.ndarray
    quadratic: Quadratic | None = None

    def weighted(self, weight: np.ndarray) -> "Placed":
        """Return the same rows with other weights ``(n,)``."""
        own = self.data.weight
        padded = layout.padded_weights(weight.astype(own.dtype), len(own))
        return Placed(self.data._replace(weight=jax.device_put(padded, own.sharding)), self.means)


@contextlib.contextmanager
def surroundings(dtype: Any, devices: int | None) -> Iterator[None]:
    """Within, arrays of this dtype keep it; and if devices are chosen by number, no mesh that is set chooses others."""
    own = placing.without_context() if devices is not None else contextlib.nullcontext()
    with jax.enable_x64(np.dtype(dtype) == np.float64), own:
        yield


def place(X: np.ndarray, y: np.ndarray, weight: np.ndarray, devices: int | None, *, centre: bool) -> Placed:
    """Lay the rows out over the devices; ``centre``: subtract the columns' weighted means, of many on the devices.

    Raises:
        DeviceError: if there are not so many devices.
    """
    few = X.size <= _FEW
    means = _means(X, weight) if centre and few else np.zeros(X.shape[1], X.dtype)
    X, y, weight = _few_sizes(X, means if centre and few else None, y, weight)
    # Not copied: a fit lets its rows go before it returns.
    data = arrays.ready(lay(X, y, weight, None, axis_of(len(X), devices), copied=False))
    if few or not centre:
        return Placed(data, means)
    design, means = arrays.ready(arrays.on_auto_mesh(_centred, data.X, data.weight))
    return Placed(data._replace(X=design), np.asarray(means))


def solve(plan: Plan, init: Any, penalty: Penalty, placed: Placed, verbose: bool | Watch) -> Solution:
    """Minimise from ``init``. Compiles once for a plan and the shapes of the data."""
    data, dtype = placed.data, placed.data.X.dtype
    if plan.method == "quadratic":
        placed.quadratic = placed.quadratic or Quadratic(glm(plan.loss, intercept=plan.intercept), data)
        return placed.quadratic.solve(init, penalty, tol=plan.tol, max_iter=plan.max_iter, verbose=verbose)
    l1, l2 = np.asarray(penalty.l1, dtype), np.asarray(penalty.l2, dtype)
    run = dataclasses.replace(_solver(plan), verbose=verbose) if verbose else _solver(plan)
    return _solution(run.run(init, *([l1] if plan.method == "proximal-gradient" else []), l2, data))


@functools.lru_cache(maxsize=128)
def _solver(plan: Plan) -> LBFGS | ProximalGradient:
    """Return the solver for a plan: one object, so that what JAX compiled for it is found again. It holds no data."""
    options: dict[str, Any] = {"tol": plan.tol, "maxiter": plan.max_iter}
    objective = glm(plan.loss, intercept=plan.intercept, l2=True)
    if plan.method == "proximal-gradient":
        return ProximalGradient(objective, prox.first(prox.l1) if plan.intercept else prox.l1, **options)
    return LBFGS(objective, **options)


def _solution(step: OptStep) -> Solution:
    params, state = step
    told = int(state.iter_num), int(state.status), float(state.error), int(state.data_passes)
    return Solution(jax.tree.map(np.asarray, params), *told)


def _means(X: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return np.einsum("n,nd->d", weight / weight.sum(dtype=np.float64), X).astype(X.dtype)


def _few_sizes(
    X: np.ndarray, means: np.ndarray | None, y: np.ndarray, weight: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the same with rows of weight zero added, at most a 32nd or 63, so that few sizes are compiled for.

    Folds of a cross-validation outside differ by a row or two; compiling takes longer than they do. ``means`` are
    subtracted from the columns.
    """
    size = len(X)
    step = max(64, 2 ** (size.bit_length() - 6))
    num_padded = size + -size % step if size <= _LARGE else size
    targets, weight = layout.repeat_last(y, num_padded), layout.padded_weights(weight, num_padded)
    if means is None and num_padded == size:
        return X, targets, weight
    rows = np.empty((num_padded, X.shape[1]), X.dtype)
    np.subtract(X, 0 if means is None else means, out=rows[:size])
    rows[size:] = rows[size - 1]
    return rows, targets, weight


def axis_of(size: int, devices: int | None) -> Axis:
    """Return the axis of rows on so many devices.

    Raises:
        DeviceError: if there are not so many.
    """
    if devices is None:
        return Axis("rows", size, over=placing.names_in_force("rows"))
    there = jax.devices()
    if not 1 <= devices <= len(there):
        raise DeviceError(f"devices must be from 1 to {len(there)}, as many as there are, got {devices!r}")
    return Axis("rows", size, mesh=placing.devices_mesh(there[:devices]), over=placing.DEVICES)


@jax.jit
def _centred(X: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    means = jnp.sum(X * (weight / jnp.sum(weight))[:, None], 0)
    return X - means, means
