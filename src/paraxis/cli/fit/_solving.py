"""The estimator for an objective and a penalty, and what a strength is called there."""

import contextlib
import dataclasses
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning

from paraxis.cli._errors import CommandError
from paraxis.cli.fit._rows import Design
from paraxis.errors import CheckpointError, DataError
from paraxis.solve import Interrupted, Iteration, Status, estimators as est

SCORES = {"logistic": "accuracy", "squared": "R²", "poisson": "D²"}
_TOL = {np.dtype(np.float64): 1e-9, np.dtype(np.float32): 1e-5}


@dataclasses.dataclass(frozen=True)
class Solver:
    """A solver's choice. All strengths are those of the penalty beside the mean loss.

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
            raise CommandError(
                f"--penalty {self.penalty} is not there for counts; write --penalty l2", remedies=[{"penalty": "l2"}]
            )

    @property
    def ratio(self) -> float:
        """Return the share of L1 in the penalty."""
        return {"l1": 1.0, "elastic-net": self.l1_ratio}.get(self.penalty, 0.0)

    @property
    def smooth(self) -> bool:
        """Return whether the objective is smooth; least squares are then those of a ridge."""
        return self.ratio == 0

    def native(self, strength: float, num_rows: int) -> float:
        """Return the strength as the estimator's own parameter."""
        if self.objective == "logistic":
            return 1 / (strength * num_rows) if strength else float("inf")
        return strength * num_rows if self.objective == "squared" and self.smooth else strength

    def tolerance(self, X: np.ndarray | Design) -> float:
        """Return the error of a solution."""
        return _TOL[X.dtype] if self.tol is None else self.tol

    def estimator(self, strength: float, X: np.ndarray | Design, watch: Any) -> Any:
        """Return the estimator, not fitted."""
        value = self.native(strength, len(X))
        options: dict[str, Any] = {
            "tol": self.tolerance(X), "max_iter": self.max_iterations, "devices": self.num_devices, "verbose": watch
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
        num_iterations: how many there were, with those of a run that was saved.
        error: what the tolerance is compared with, where Ctrl-C ended the run; else ``None``.
    """

    coef: np.ndarray
    intercept: np.ndarray
    status: str
    converged: bool
    history: list[Iteration]
    data_passes: int
    num_iterations: int
    error: float | None = None


def solve(
    solver: Solver, strength: float, X: np.ndarray | Design, y: np.ndarray, weight: np.ndarray | None, watch: Any
) -> Solved:
    """Fit to all rows, with weights of mean 1; ``watch`` is called with each iteration.

    Where Ctrl-C ends the run, what was found until then.

    Raises:
        CommandError: if no finite coefficients are found, or the folder to save the run in cannot be used.
    """
    history: list[Iteration] = []

    def seen(iteration: Iteration) -> None:
        history.append(iteration)
        watch(iteration)

    targets, _, _ = _standardised(solver, y, weight)
    error = None
    with _quiet():
        try:
            model = solver.estimator(strength, X, seen)
            if isinstance(X, Design):
                model.fit(X.with_targets(targets), sample_weight=weight, engine=X.engine)
            else:
                model.fit(X, targets, weight)
        except Interrupted as stopped:
            model, error = stopped.estimator, _largest_error(stopped)
        except CheckpointError as refused:
            said = re.sub(r"px\.Stream\(…, folder='(.*)'\)", r"--stream-folder \1", str(refused))
            raise CommandError(f"--stream-folder: {said.removeprefix('Stream: ')}") from None
        except DataError as refused:
            least = re.search(r"memory must be at least ([\d,]+) bytes", str(refused))
            if least is None:
                raise
            write = f"{-(-int(least[1].replace(',', '')) // 1000)}kB"
            raise CommandError(
                f"--stream must be at least {least[1]} bytes for this table; write --stream {write}"
            ) from None
    history.sort(key=lambda iteration: iteration.iter_num)
    return _solved(solver, model, y, weight, history, error)


@dataclasses.dataclass(frozen=True)
class Validated:
    """The result of cross-validation.

    Args:
        strengths: those that have scores.
        scores: of the rows that each fold holds out, ``(num_strengths, folds)``.
        best: the strength with the best mean score; if there is none yet, the one that was solved for.
        solved: where Ctrl-C ended it, the model so far with that strength; else ``None``.
    """

    strengths: list[float]
    scores: np.ndarray
    best: float
    solved: Solved | None


def validate(
    solver: Solver, strengths: Sequence[float], folds: int, X: np.ndarray, y: np.ndarray, weight: np.ndarray | None
) -> Validated:
    """Score strengths by the rows that each fold holds out.

    Raises:
        CommandError: if Ctrl-C ended it before coefficients were finite.
    """
    targets, _, _ = _standardised(solver, y, weight)
    ours = {solver.native(strength, len(X)): strength for strength in strengths}
    solved = None
    with _quiet():
        try:
            estimator = solver.estimator(strengths[0], X, 0)
            found = est.cross_validate_path(estimator, X, targets, [*ours], folds, sample_weight=weight)
        except Interrupted as stopped:
            found = stopped.found
            solved = _solved(solver, stopped.estimator, y, weight, [], _largest_error(stopped))
    told = [ours[strength] for strength in found.strengths.tolist()]
    return Validated(told, found.scores, ours[found.best], solved)


def _largest_error(stopped: Interrupted) -> float:
    return float(np.max(np.asarray(stopped.state.error)))


def _solved(
    solver: Solver, model: Any, y: np.ndarray, weight: np.ndarray | None, history: list[Iteration], error: float | None
) -> Solved:
    _, origin, scale = _standardised(solver, y, weight)
    coef = np.atleast_2d(np.asarray(model.coef_, np.float64)) * scale
    intercept = np.atleast_1d(np.asarray(model.intercept_, np.float64)) * scale + origin
    if not (np.isfinite(coef).all() and np.isfinite(intercept).all()):
        raise CommandError(f"the fit gave no finite coefficients: {model.status_}; write --strength 1, or another one")
    converged = model.status_ == Status.CONVERGED.words
    counts = int(model.data_passes_), int(np.max(model.n_iter_))
    return Solved(coef, intercept, model.status_, converged, history, *counts, error)


def _standardised(solver: Solver, y: np.ndarray, weight: np.ndarray | None) -> tuple[np.ndarray, float, float]:
    if solver.objective != "squared":
        return y, 0.0, 1.0
    mean = float(np.average(y, weights=weight))
    scale = float(np.sqrt(np.average((y - mean) ** 2, weights=weight)))
    return (y - mean) / scale, mean, scale


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No warning of a solver that stopped early: the report tells why it did."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        yield
