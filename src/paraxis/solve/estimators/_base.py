"""The common part of the estimators: data are checked as scikit-learn checks them, laid out, and solved for.

An estimator tells what is particular to it: its loss, its targets, and what its strength means beside a mean of losses.
"""

import abc
import copy
import dataclasses
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import jax
import numpy as np
from sklearn.base import BaseEstimator, is_classifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from paraxis._core import check
from paraxis._tables import Table
from paraxis.errors import DataError
from paraxis.solve._rows import require_sum
from paraxis.solve._run import Status, Watch
from paraxis.solve._streaming import MAX_FEATURES, TableRows, blocks_of
from paraxis.solve.estimators import _fitting as fitting
from paraxis.solve.estimators._fitting import Placed, Posed
from paraxis.solve.estimators._quadratic import Penalty, Quadratic, Solution

_GOOD_ENOUGH = 1e-4  # an error at which rounding may stop a solver without a warning; scikit-learn's usual tolerance
_FLOATS: Any = [np.float64, np.float32]
_FEW = 1024  # columns of which a matrix is no work, however few rows there are
_LARGEST = float(np.finfo(np.float64).max)


class Path(NamedTuple):
    """Solutions along a grid of strengths, in the order of the grid."""

    strengths: np.ndarray  # (num,)
    coef: np.ndarray  # (num, *coef_.shape)
    intercept: np.ndarray  # (num, *intercept_.shape)
    n_iter: np.ndarray  # iterations of each solution, (num,)
    status: list[str]  # why the solver stopped for each, in words


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class LinearModel(BaseEstimator, abc.ABC):
    """Base of the estimators, with the options of all."""

    strength_name: ClassVar[str] = "alpha"
    strong_is_large: ClassVar[bool] = True
    metric: ClassVar[Callable[..., Any]]  # what ``score`` returns
    fit_intercept: bool = True
    tol: float = 1e-10
    max_iter: int = 2000
    warm_start: bool = False
    devices: int | None = None
    verbose: int | Watch = 0

    @abc.abstractmethod
    def _posed(self, y: np.ndarray, weight: np.ndarray, dtype: Any) -> Posed:
        """Return what to solve, for checked targets."""

    @abc.abstractmethod
    def _penalty(self, strength: float, total: float, posed: Posed) -> Penalty:
        """Return what a strength means beside the mean loss; ``total`` is the sum of the weights."""

    @abc.abstractmethod
    def _checked_targets(self, y: np.ndarray) -> np.ndarray:
        """Targets in the form that :meth:`_posed` takes; sets what describes them."""

    @abc.abstractmethod
    def _predicted(self, z: np.ndarray) -> np.ndarray:
        """Return predictions by those of the linear model, ``(n,)`` or ``(n, k)``."""

    def _weighted(self, y: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """Weights of rows with those of their classes, where there are such."""
        return weight

    def _has_l1(self) -> bool:
        return getattr(self, "l1_ratio", 0) > 0

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None, *, engine: Any = None) -> Self:
        """Fit the model.

        Args:
            X: ``(n, d)``. If it is float32, everything is computed in float32, else in float64. Or a
                :class:`px.Table`, of rows that stay on disk and are read about twice per iteration.
            y: targets, ``(n,)``; left out for a table.
            sample_weight: ``(n,)``, not negative, or a number; a row of weight zero does not count.
            engine: for a table, what says how many rows are read at once: ``px.Stream(memory="2GB")``.

        Raises:
            ValueError: if the data or an option cannot be used; the message says why.
            KeyboardInterrupt: after Ctrl-C. The estimator does not change.

        Communicates, if there are several devices: sends each its rows; then whatever the solver does.
        """
        model = copy.copy(self)
        X, posed = model._checked_and_posed(X, y, sample_weight, engine)
        with fitting.surroundings(X.dtype, self.devices):
            placed = fitting.place(X, posed, self.devices)
            found = model._solved(getattr(self, self.strength_name), model._start(posed, placed), posed, placed)
        vars(self).clear()
        vars(self).update(vars(model))
        self.coef_, self.intercept_ = self._described(found.params, posed, placed.means)
        self.n_iter_: Any = np.array([found.iter_num]) if is_classifier(self) else found.iter_num
        self.status_ = Status(found.status).words
        self.data_passes_ = X.num_passes if isinstance(X, TableRows) else found.data_passes
        self._warn(found)
        return self

    def predict(self, X: Any, *, engine: Any = None) -> np.ndarray:
        """Return the predicted targets ``(n,)`` or ``(n, k)``; of a classifier, the most probable class of each row.

        Args:
            X, engine: as for :meth:`fit`; a table is read once.
        """
        return self._of_rows(X, engine, self._predicted)[0]

    def score(self, X: Any, y: Any = None, sample_weight: Any = None, *, engine: Any = None) -> float:
        """Return a regression's R², D² of counts, or a classifier's fraction of rows whose class is predicted.

        Args:
            X, y, sample_weight, engine: as for :meth:`fit`; a table is read once.
        """
        if isinstance(X, Table):
            self._require_none(y=y, call="score")
        predicted, targets = self._of_rows(X, engine, self._predicted)
        weight = self._checked_weight(sample_weight, predicted, np.float64)
        return float(type(self).metric(y if targets is None else targets, predicted, sample_weight=weight))

    def path(
        self, X: Any, y: Any, strengths: Sequence[float], sample_weight: Any = None, *, engine: Any = None
    ) -> Path:
        """Solve for several strengths, each from the solution of the next stronger one; the data are sent only once.

        Args:
            X, y, sample_weight, engine: as for :meth:`fit`; of a table, write ``path(table, None, …)``.
            strengths: values of the parameter that ``strength_name`` names, in any order.

        Returns:
            The solutions in the order of ``strengths``. The estimator itself is not fitted.
        """
        if getattr(engine, "folder", None) is not None:
            raise ValueError(f"{self._who}: a path is several runs, and none is saved; leave the engine's folder out")
        grid, order = self._from_strong("strengths", strengths)
        model = copy.copy(self)
        X, posed = model._checked_and_posed(X, y, sample_weight, engine)
        with fitting.surroundings(X.dtype, self.devices):
            placed = fitting.place(X, posed, self.devices)
            found = model._solved_path(grid, order, posed, placed)
        coef, intercept = zip(*(model._described(one.params, posed, placed.means) for one in found), strict=True)
        self._warn(*found)
        counts = np.array([one.iter_num for one in found])
        return Path(grid, np.stack(coef), np.stack(intercept), counts, [Status(one.status).words for one in found])

    def _checked_and_posed(self, X: Any, y: Any, sample_weight: Any, engine: Any) -> tuple[Any, Posed]:
        X, y, weight = self._checked(X, y, sample_weight, engine)
        return X, self._posed(y, self._weighted(y, weight), X.dtype)

    def _solved_path(self, grid: np.ndarray, order: list[int], posed: Posed, placed: Placed) -> list[Solution]:
        """Return the solutions of a grid, in its order."""
        params, found = self._zeros(posed, placed.means), {}
        for index in order:
            found[index] = self._solved(float(grid[index]), params, posed, placed)
            params = found[index].params
        return [found[index] for index in range(len(grid))]

    def _of_rows(self, X: Any, engine: Any, of_block: Callable[[np.ndarray], np.ndarray]) -> tuple[np.ndarray, Any]:
        """Return a function of ``X @ coef + intercept``, ``(n,)`` or ``(n, k)``; and of a table, its targets."""
        check_is_fitted(self)
        if isinstance(X, Table):
            self._require_columns(X)
            blocks = blocks_of(self._who, X, engine)
            parts = [(of_block(rows @ self.coef_.T + self.intercept_), y.copy()) for rows, y in blocks]
            found, targets = (np.concatenate(part) for part in zip(*parts, strict=True))
            return found, X._as_targets(targets)
        self._require_none(engine=engine)
        with warnings.catch_warnings():
            if getattr(self, "_is_of_table", False) and not hasattr(X, "columns"):  # as the table's blocks are
                warnings.filterwarnings("ignore", "X does not have valid feature names")
            rows = validate_data(self, X, reset=False, dtype=_FLOATS)
        return of_block(rows @ self.coef_.T + self.intercept_), None

    def _require_columns(self, table: Table) -> None:
        own, known = table.columns, list(getattr(self, "feature_names_in_", ()))
        if len(own) != self.n_features_in_ or (known and table._is_named and known != own):
            pairs = itertools.zip_longest(known, own)
            odd = next((f", with {b!r} in the place of {a!r}" for a, b in pairs if a != b), "") if known else ""
            raise DataError(
                f"{self._who}: the table must have the {self.n_features_in_} columns that the model was fitted to, in "
                f"their order, got {table!r}{odd}; choose them where the table is made: "
                f"columns=list(model.feature_names_in_)"
            )

    def _require_none(self, *, engine: Any = None, y: Any = None, call: str = "") -> None:
        """Check that an argument is left out, the engine of an array and the targets of a table."""
        if engine is not None:
            raise TypeError(f"{self._who}: engine is for a px.Table; leave engine out")
        if y is not None:
            raise TypeError(f"{self._who}: y must be left out, as the table has it; write {call}(table, engine=…)")

    def _from_strong(self, argument: str, strengths: Any) -> tuple[np.ndarray, list[int]]:
        """Return the grid as an array, and its places in the order in which they are solved for."""
        grid = np.asarray(strengths, np.float64)
        if grid.ndim != 1 or not len(grid):
            raise ValueError(f"{self._who}: {argument} must be numbers (num,), got {check.described(strengths)}")
        for strength in grid.tolist():
            self._check_strength(f"{self.strength_name} in {argument}", strength)
        order = np.argsort(grid, kind="stable").tolist()
        return grid, order[::-1] if self.strong_is_large else order

    def _check_strength(self, name: str, strength: Any) -> None:
        bounds: dict[str, Any] = {"least": 0, "most": _LARGEST} if self.strong_is_large else {"above": 0}
        check.number(self._who, name, strength, **bounds)

    def _checked(self, X: Any, y: Any, sample_weight: Any, engine: Any = None) -> tuple[Any, np.ndarray, np.ndarray]:
        """Return rows, which a table's are as they are read in passes, targets and weights."""
        self._check_strength(self.strength_name, getattr(self, self.strength_name))
        check.number(self._who, "l1_ratio", getattr(self, "l1_ratio", 0), least=0, most=1)
        check.number(self._who, "tol", self.tol, above=0)
        check.count(self._who, "max_iter", self.max_iter)
        self._is_of_table = isinstance(X, Table)
        rows: Any
        if isinstance(X, Table):
            self._require_none(y=y, call="fit")
            with fitting.surroundings(X.dtype, self.devices):
                rows = TableRows(self._who, X, engine, fitting.axis_of(max(1, len(X)), self.devices))
            vars(self).pop("feature_names_in_", None)
            if X._is_named:
                self.feature_names_in_ = np.array(X.columns, object)
            self.n_features_in_, y = len(X.columns), rows.y
        else:
            self._require_none(engine=engine)
            rows, y = validate_data(self, X, y, dtype=_FLOATS, multi_output=True, y_numeric=False)
        targets = self._checked_targets(y)
        return rows, targets, self._checked_weight(sample_weight, targets, rows.dtype)

    def _checked_weight(self, sample_weight: Any, rows: Any, dtype: Any) -> np.ndarray:
        weight = _check_sample_weight(sample_weight, rows, dtype=dtype, ensure_non_negative=True)
        require_sum(self._who, "sample_weight", weight, dtype)
        return weight

    def _solved(self, strength: float, params: Any, posed: Posed, placed: Placed) -> Solution:
        data, loss, intercept, has_l1 = placed.data, posed.loss, bool(self.fit_intercept), self._has_l1()
        num_rows, num_features = data.X.shape
        penalty, tol, maxiter = self._penalty(strength, placed.total, posed), float(self.tol), int(self.max_iter)
        verbose = self.verbose if callable(self.verbose) else bool(self.verbose)
        is_small = num_features <= MAX_FEATURES and num_features <= max(num_rows, _FEW)
        if is_small and (loss == "squared" or (has_l1 and loss == "logistic")):
            placed.quadratic = placed.quadratic or Quadratic(loss, data, intercept)
            return placed.quadratic.solve(params, penalty, tol=tol, maxiter=maxiter, verbose=verbose)
        solver = fitting.solver(loss, intercept, has_l1, tol, maxiter)
        solver = dataclasses.replace(solver, verbose=verbose) if verbose else solver
        l1, l2 = (np.asarray(x, data.X.dtype) for x in penalty)
        params, state = solver.run(params, *([l1] if has_l1 else []), l2, data)
        counts = int(state.iter_num), int(state.status), float(state.error), int(state.data_passes)
        return Solution(jax.tree.map(np.asarray, params), *counts)

    def _zeros(self, posed: Posed, means: np.ndarray) -> Any:
        outputs = () if posed.num_outputs is None else (posed.num_outputs,)
        coef = np.zeros((len(means), *outputs), means.dtype)
        return (coef, np.broadcast_to(posed.intercept, outputs).astype(coef.dtype)) if self.fit_intercept else coef

    def _start(self, posed: Posed, placed: Placed) -> Any:
        zeros = self._zeros(posed, placed.means)
        zero = zeros[0] if self.fit_intercept else zeros
        if not self.warm_start or getattr(self, "coef_", zero[:0]).size != zero.size:
            return zeros
        coef, intercept = self.coef_.T.reshape(zero.shape), np.asarray(self.intercept_).reshape(zero.shape[1:])
        moved = (coef / posed.scale).astype(zero.dtype)
        if not self.fit_intercept:
            return moved
        return moved, np.asarray((intercept + placed.means @ coef - posed.origin) / posed.scale, zero.dtype)

    def _described(self, params: Any, posed: Posed, means: np.ndarray) -> tuple[np.ndarray, Any]:
        """Return what a solver found as ``coef_`` and ``intercept_``."""
        coef, intercept = params if self.fit_intercept else (params, None)
        coef = (coef * posed.scale).astype(coef.dtype)
        if intercept is None:
            return coef.T, np.zeros(coef.shape[1:], coef.dtype)[()]
        return coef.T, (posed.origin + posed.scale * intercept - means @ coef).astype(coef.dtype)[()]

    def _warn(self, *found: Solution) -> None:
        """Warn of the first of the solutions that is none."""
        for one in found:
            status = Status(one.status)
            if status == Status.CONVERGED or (status == Status.PRECISION and one.error <= _GOOD_ENOUGH):
                continue
            is_short = status == Status.ITERATION_LIMIT
            advice = f"; write {self._who}(max_iter={2 * self.max_iter}), or scale the columns of X" * is_short
            warnings.warn(
                f"{self._who} after {one.iter_num} iterations, with an error of {one.error:.2g} (tol={self.tol:g}): "
                f"{status.words}{advice}",
                ConvergenceWarning,
                stacklevel=3,
            )
            return

    @property
    def _who(self) -> str:
        return type(self).__name__
