"""The fit, step by step on the devices that are given; and the same by scikit-learn."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from scipy.special import logsumexp
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits

from paraxis._axes.axis import Axis
from paraxis.cli.demo.logreg._digits import Labelled
from paraxis.reports import Communication, communication
from paraxis.solve import LBFGS, Status, objective, rows

C = 1.0
_CLASSES, _TOLERANCE, _MOST_STEPS = 10, 1e-6, 500


@dataclasses.dataclass(frozen=True)
class Fit:
    """A solution.

    Attributes:
        coef: ``(64, 10)`` float64.
        num_steps: iterations.
        passes: over the data, as far as they are known.
        reason: why the solver stopped, in words.
    """

    coef: np.ndarray
    num_steps: int
    passes: str
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Run(Fit):
    """One that was watched: passes so far and coefficients after each step, and how long that took."""

    passes_so_far: Sequence[int] = ()
    path: Sequence[np.ndarray] = ()
    seconds: Sequence[float] = ()
    communicated: Communication | None = None

    @property
    def seconds_per_step(self) -> float:
        """The median of those after the first, which was compiled."""
        return statistics.median(self.seconds[1:] or self.seconds)


def fit(digits: Labelled, devices: Sequence[Any], on_step: Callable[[int, float, float], None]) -> Run:
    """Fit by L-BFGS in float32, the rows in equal parts on the devices.

    Args:
        digits: to fit.
        devices: where to run.
        on_step: called after each step with its number, the objective and the norm of its gradient.
    """
    axis = Axis("rows", len(digits.labels), mesh=Mesh(np.array(devices), ("rows",)))
    data = rows(digits.pixels.astype(np.float32), digits.labels, axis=axis)
    solver = LBFGS(objective.l2_multiclass_logreg, tol=_TOLERANCE, maxiter=_MOST_STEPS)
    l2 = 1 / (C * len(digits.labels))  # the objective is a mean over rows, scikit-learn's a sum
    params = data.shared(jnp.zeros((digits.pixels.shape[1], _CLASSES)))
    state = solver.init_state(params, l2, data)
    update = jax.jit(solver.update)

    passes, path, seconds = [], [], []
    while state.status == Status.RUNNING:
        start = time.perf_counter()
        params, state = jax.block_until_ready(update(params, state, l2, data))
        seconds.append(time.perf_counter() - start)
        passes.append(int(state.data_passes))
        path.append(np.asarray(params, np.float64))
        on_step(int(state.iter_num), float(state.value), float(state.error))
    communicated = communication(update, params, state, l2, data)
    return Run(path[-1], len(path), f"{passes[-1]}", state.reason, passes, path, seconds, communicated)


def fit_by_sklearn(digits: Labelled, **options: Any) -> Fit:
    """Return the same problem in float64. A step reads the data at least twice; more is not told."""
    with threadpool_limits(1):  # on matrices this small, threads wait longer than they work
        model = LogisticRegression(C=C, fit_intercept=False, max_iter=_MOST_STEPS, **options).fit(*digits)
    num_steps = int(model.n_iter_[0])
    return Fit(model.coef_.T, num_steps, f"≥ {2 * num_steps}")


def value(coef: np.ndarray, digits: Labelled) -> float:
    """Return the objective, by NumPy in float64."""
    z = digits.pixels @ coef
    losses = logsumexp(z, axis=1) - z[np.arange(len(z)), digits.labels]
    return float(losses.mean() + np.sum(coef**2) / (2 * C * len(z)))


def accuracy(coef: np.ndarray, digits: Labelled) -> float:
    """Share of digits that are told right."""
    return float(np.mean((digits.pixels @ coef).argmax(1) == digits.labels))


def largest_difference(one: Fit, other: Fit) -> float:
    """Return the largest difference of any coefficient."""
    return float(np.abs(one.coef - other.coef).max())
