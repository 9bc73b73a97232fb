"""The estimator for an objective and a penalty, and what a strength is called there."""

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning

from paraxis.cli._errors import CommandError
from paraxis.solve import Iteration, Status
from paraxis.solve import estimators as est

SCORES = {"logistic": "accuracy", "squared": "R²", "poisson": "D²"}
_TOL = {np.dtype(np.float64): 1e-9, np.dtype(np.float32): 1e-5}


@dataclasses.dataclass(frozen=True)
class Solver:
    """How to solve. All strengths are those of the penalty beside the mean loss.

    Targets of least squares are brought to mean 0 and standard deviation 1, so that a strength means the same whatever
    their unit is.
    """

    objective: str
    penalty: str
    l1_ratio: float
    tol: float | None
    max_iterations: int
    num_devices: int

    def __post_init__(self) -> None:
        if self.objective == "poisson" and self.penalty in ("l1", "elastic-net"):
            raise CommandError(f"--penalty {self.penalty} is not there for counts; write --penalty l2")

    @property
    def ratio(self) -> float:
        """Which part of the penalty is L1."""
        return {"l1": 1.0, "elastic-net": self.l1_ratio}.get(self.penalty, 0.0)

    @property
    def smooth(self) -> bool:
        """Whether the objective is smooth; least squares are then those of a ridge."""
        return self.ratio == 0

    def native(self, strength: float, num_rows: int) -> float:
        """The strength as the estimator's own parameter."""
        if self.objective == "logistic":
            return 1 / (strength * num_rows) if strength else float("inf")
        return strength * num_rows if self.objective == "squared" and self.smooth else strength

    def estimator(self, strength: float, X: np.ndarray, watch: Any) -> Any:
        """The estimator, not fitted."""
        value = self.native(strength, len(X))
        tol = _TOL[X.dtype] if self.tol is None else self.tol
        options: dict[str, Any] = {
            "tol": tol, "max_iter": self.max_iterations, "devices": self.num_devices, "verbose": watch
        }  # fmt: skip
        if self.objective == "logistic":
            return est.LogisticRegression(value, l1_ratio=self.ratio, **options)
        if self.objective == "poisson":
            return est.PoissonRegressor(value, **options)
        if self.smooth:
            return est.Ridge(value, **options)
        return est.ElasticNet(value, l1_ratio=self.ratio, **options)


@dataclasses.dataclass(frozen=True)
class Solved:
    """A solution.

    Args:
        coef, intercept: ``(k, d)`` and ``(k,)``, for the target's own unit.
        status: why the solver stopped, in words.
        converged: whether the test for a solution was passed.
        history: the iterations in order.
        data_passes: how often the data were read, with the test at the end.
    """

    coef: np.ndarray
    intercept: np.ndarray
    status: str
    converged: bool
    history: list[Iteration]
    data_passes: int


def solve(solver: Solver, strength: float, X: np.ndarray, y: np.ndarray, watch: Any) -> Solved:
    """Fit to all rows; ``watch`` is called with each iteration.

    Raises:
        CommandError: if no finite coefficients are found.
    """
    history: list[Iteration] = []

    def seen(iteration: Iteration) -> None:
        history.append(iteration)
        watch(iteration)

    targets, origin, scale = _standardised(solver, y)
    with _quiet():
        model = solver.estimator(strength, X, seen).fit(X, targets)
    coef = np.atleast_2d(np.asarray(model.coef_, np.float64)) * scale
    intercept = np.atleast_1d(np.asarray(model.intercept_, np.float64)) * scale + origin
    if not (np.isfinite(coef).all() and np.isfinite(intercept).all()):
        raise CommandError(f"the fit gave no finite coefficients: {model.status_}; write --strength 1, or another one")
    history.sort(key=lambda iteration: iteration.iter_num)
    converged = model.status_ == Status.CONVERGED.words
    return Solved(coef, intercept, model.status_, converged, history, int(model.data_passes_))


def validate(solver: Solver, strengths: Sequence[float], folds: int, X: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Scores of the rows that each fold holds out, ``(num_strengths, folds)``."""
    targets, _, _ = _standardised(solver, y)
    grid = [solver.native(strength, len(X)) for strength in strengths]
    with _quiet():
        return est.cross_validate_path(solver.estimator(strengths[0], X, 0), X, targets, grid, folds).scores


def _standardised(solver: Solver, y: np.ndarray) -> tuple[np.ndarray, float, float]:
    if solver.objective != "squared":
        return y, 0.0, 1.0
    return (y - y.mean()) / y.std(), float(y.mean()), float(y.std())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No warning of a solver that stopped early: the report tells why it did."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        yield
