"""The common part of the estimators: data are checked as scikit-learn checks them, laid out, and solved for.

An estimator tells what is particular to it: its loss, its targets, and what its strength means beside a mean of losses.
In cross-validation, a fold is a set of weights, zero on the rows that it holds out, so X is laid out once for all.
"""

import abc
import copy
import dataclasses
import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar, cast

import jax
import numpy as np
from sklearn.base import BaseEstimator, clone, is_classifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import check_cv
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from paraxis._core import arrays, check
from paraxis._tables import Table
from paraxis.errors import DataError
from paraxis.solve._rows import require_sum, sent
from paraxis.solve._run import Status, Watch
from paraxis.solve._streaming import MAX_FEATURES, TableRows
from paraxis.solve.estimators import _fitting as fitting
from paraxis.solve.estimators._fitting import Posed
from paraxis.solve.estimators._quadratic import Penalty, Quadratic, descend

_GOOD_ENOUGH = 1e-4  # an error at which rounding may stop a solver without a warning; scikit-learn's usual tolerance
_BLOCK = 1 << 26  # bytes of a table that are predicted from at once
_FEW = 1024  # columns of which a matrix is no work, however few rows there are
_FLOATS: Any = [np.float64, np.float32]
_Model = TypeVar("_Model", bound="LinearModel")


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class LinearModel(BaseEstimator, abc.ABC):
    """Base of the estimators, with the options of all."""

    strength_name: ClassVar[str] = "alpha"
    bounds: ClassVar[dict[str, Any]] = {"least": 0, "most": float(np.finfo(np.float64).max)}  # of the strength
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
    def _penalty(self, strength: float, posed: Posed) -> Penalty:
        """Return what a strength means beside the mean loss."""

    @abc.abstractmethod
    def _checked_targets(self, y: np.ndarray) -> np.ndarray:
        """Targets in the form that :meth:`_posed` takes; sets what describes them."""

    def _predicted(self, z: np.ndarray) -> np.ndarray:
        """Return predictions by those of the linear model, ``(n,)`` or ``(n, k)``."""
        return z

    def _weighted(self, y: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """Weights of rows with those of their classes, where there are such."""
        return weight

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None, *, engine: Any = None) -> Self:
        """Fit the model.

        Args:
            X: ``(n, d)``. If it is float32, everything is computed in float32, else in float64. Or a
                :class:`px.Table`, of rows that stay on disk and are read about twice per iteration.
            y: targets, ``(n,)``; left out for a table.
            sample_weight: ``(n,)``, not negative, or a number; a row of weight zero does not count.
            engine: for a table, what says how many rows are read at once: ``px.Stream(memory="2GB")``.

        Raises:
            ValueError: if the data or an option cannot be used. After any error, the estimator is as it was.

        Communicates, if there are several devices: sends each its rows; then whatever the solver does.
        """
        model = copy.copy(self)
        X, y, weight = model._checked(X, y, sample_weight, engine)
        with fitting.surroundings(X.dtype, self.devices):
            state = model._fitted(X, y, weight)
        vars(self).clear()
        vars(self).update(vars(model))
        self.n_iter_: Any = np.array([int(state.iter_num)]) if is_classifier(self) else int(state.iter_num)
        self.status_ = Status(int(state.status)).words
        self.data_passes_ = X.num_passes if isinstance(X, TableRows) else int(state.data_passes)
        self._warn(state)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Return the predicted targets ``(n,)`` or ``(n, k)``; of a classifier, the most probable class of each row.

        Args:
            X: ``(n, d)``, or a table, which is read once.
        """
        return self._predicted(self._linear(X)[0])

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Return a regression's R², D² of counts, or a classifier's fraction of rows whose class is predicted.

        Args:
            X, y, sample_weight: as for :meth:`fit`; a table is read once.
        """
        z, y = self._linear(X, y)
        return float(self.metric(y, self._predicted(z), sample_weight=sample_weight))

    def _linear(self, X: Any, y: Any = None) -> tuple[np.ndarray, Any]:
        """Return ``X @ coef + intercept``, ``(n,)`` or ``(n, k)``; and the targets, which a table has."""
        check_is_fitted(self)
        if isinstance(X, Table):
            if y is not None:
                raise TypeError(f"{self._who}: y must be left out, as the table has it")
            names = list(getattr(self, "feature_names_in_", ())) if X._is_named else []
            others = [f" with {b!r} in the place of {a!r}" for a, b in zip(names, X.columns, strict=False) if a != b]
            if len(X.columns) != self.n_features_in_ or others:
                raise DataError(
                    f"{self._who}: the table must have the {self.n_features_in_} columns that the model was fitted to, "
                    f"in their order, got {X!r}{''.join(others[:1])}; choose them where the table is made: "
                    "columns=list(model.feature_names_in_)"
                )
            blocks = X.blocks(max(1, _BLOCK // (len(X.columns) * X.dtype.itemsize)))
            z, y = zip(*((rows @ self.coef_.T + self.intercept_, y) for rows, y in blocks), strict=True)
            return np.concatenate(z), np.concatenate(y)
        return validate_data(self, X, reset=False, dtype=_FLOATS) @ self.coef_.T + self.intercept_, y

    def _checked(self, X: Any, y: Any, sample_weight: Any, engine: Any = None) -> tuple[Any, np.ndarray, np.ndarray]:
        """Return rows, which a table's are as they are read in passes, targets and weights."""
        check.number(self._who, self.strength_name, getattr(self, self.strength_name), **self.bounds)
        check.number(self._who, "l1_ratio", getattr(self, "l1_ratio", 0), least=0, most=1)
        check.number(self._who, "tol", self.tol, above=0)
        check.count(self._who, "max_iter", self.max_iter)
        rows: Any
        if isinstance(X, Table):
            with fitting.surroundings(X.dtype, self.devices):
                rows = TableRows(self._who, X, y, engine, fitting.axis_of(max(1, len(X)), self.devices))
            vars(self).pop("feature_names_in_", None)
            if X._is_named:
                self.feature_names_in_ = np.array(X.columns, object)
            self.n_features_in_, y = len(X.columns), rows.y
        else:
            if engine is not None:
                raise TypeError(f"{self._who}: engine is for a px.Table; leave engine out")
            rows, y = validate_data(
                self, X, y, dtype=_FLOATS, multi_output=self.__sklearn_tags__().target_tags.multi_output
            )
        targets = self._checked_targets(y)
        weight = _check_sample_weight(sample_weight, targets, dtype=rows.dtype, ensure_non_negative=True)
        require_sum(self._who, "sample_weight", weight, rows.dtype)
        return rows, targets, weight

    def _fitted(self, X: Any, y: np.ndarray, weight: np.ndarray) -> Any:
        """Set the solution for checked data, and return the solver's state."""
        posed, strength = self._posed(y, self._weighted(y, weight), X.dtype), getattr(self, self.strength_name)
        alone = jax.default_backend() == "cpu" and (jax.device_count() if self.devices is None else self.devices) == 1
        is_lasso = posed.loss == "squared" and strength * getattr(self, "l1_ratio", 0.0) > 0 and not self.verbose
        if isinstance(X, np.ndarray) and alone and is_lasso and self.tol >= np.finfo(X.dtype).eps:
            posed.means, penalty = np.zeros(X.shape[1], X.dtype), self._penalty(strength, posed)
            start, options = self._start(posed)[0], {"tol": self.tol, "fit_intercept": self.fit_intercept}
            model = descend(X, posed.targets, posed.weight, start, penalty, self.max_iter, **options)
            if model is not None:
                self.coef_, self.intercept_ = self._described(model.coef_, model.intercept_, posed)
                return SimpleNamespace(
                    status=Status.CONVERGED, error=model.dual_gap_, iter_num=model.n_iter_, data_passes=model.n_iter_
                )
        return self._solve(strength, posed.placed(X, self.devices))

    def _solve(self, strength: float, posed: Posed) -> Any:
        """As :meth:`_fitted`, of rows on devices. A warm start is where the last solution is."""
        (coef, intercept), data, penalty = self._start(posed), posed.data, self._penalty(strength, posed)
        has_intercept, has_l1, (num_rows, num_features) = bool(self.fit_intercept), penalty.l1 > 0, data.X.shape
        options: Any = {"tol": float(self.tol), "maxiter": int(self.max_iter)}
        verbose = self.verbose if callable(self.verbose) else bool(self.verbose)
        is_small = num_features <= min(MAX_FEATURES, max(num_rows, _FEW))
        if is_small and (posed.loss == "squared" or (has_l1 and posed.loss == "logistic")):
            posed.quadratic = posed.quadratic or Quadratic(posed.loss, data, has_intercept)
            (coef, intercept), state = posed.quadratic.solve((coef, intercept), penalty, **options, verbose=verbose)
        else:
            solver = fitting.solver(posed.loss, has_intercept, has_l1, **options)
            solver = dataclasses.replace(solver, verbose=verbose) if verbose else solver
            strengths = [np.asarray(one, data.X.dtype) for one in (penalty if has_l1 else penalty[1:])]
            begin = (coef, intercept) if has_intercept else coef, *strengths
            found, state = solver.run(*jax.tree.map(lambda x: sent(x, data.y), begin), data)
            coef, intercept = jax.tree.map(arrays.on_host, found if has_intercept else (found, intercept))
        self.coef_, self.intercept_ = self._described(coef, intercept, posed)
        return state

    def _start(self, posed: Posed) -> tuple[np.ndarray, np.ndarray]:
        zeros = np.zeros((*posed.means.shape, *posed.outputs), posed.means.dtype)
        coef, intercept = zeros, np.broadcast_to(posed.intercept, posed.outputs)
        if self.warm_start and np.size(getattr(self, "coef_", ())) == zeros.size:
            coef = self.coef_.T.reshape(zeros.shape)
            intercept = np.reshape(self.intercept_, posed.outputs) + posed.means @ coef - posed.origin
            coef, intercept = coef / posed.scale, intercept / posed.scale
        return coef.astype(zeros.dtype), (intercept * bool(self.fit_intercept)).astype(zeros.dtype)

    def _described(self, coef: np.ndarray, intercept: np.ndarray, posed: Posed) -> tuple[np.ndarray, Any]:
        """Return what a solver found as ``coef_`` and ``intercept_``."""
        coef = (coef * posed.scale).astype(coef.dtype)
        return coef.T, (posed.origin + posed.scale * intercept - posed.means @ coef).astype(coef.dtype)[()]

    def _warn(self, *states: Any) -> None:
        """Warn of the first of several runs that ended without a solution."""
        for state in states:
            status, error = Status(int(state.status)), float(state.error)
            if status == Status.CONVERGED or (status == Status.PRECISION and error <= _GOOD_ENOUGH):
                continue
            advice = f"; write {self._who}(max_iter={2 * self.max_iter}), or scale the columns of X"
            warnings.warn(
                f"{self._who} after {int(state.iter_num)} iterations, with an error of {error:.2g} (tol={self.tol:g}): "
                f"{status.words}{advice * (status == Status.ITERATION_LIMIT)}",
                ConvergenceWarning,
                stacklevel=3,
            )
            return

    @property
    def _who(self) -> str:
        return type(self).__name__


class CrossValidated(NamedTuple, Generic[_Model]):
    """The result of cross-validation."""

    strengths: np.ndarray  # the grid, (num,)
    scores: np.ndarray  # of each fold's held-out rows, (num, folds)
    best: float  # the strength with the best mean score
    estimator: _Model  # fitted to all rows with that strength


def cross_validate_path(
    estimator: _Model, X: Any, y: Any, grid: Sequence[float], folds: Any = 5, *, sample_weight: Any = None
) -> CrossValidated[_Model]:
    """Choose an estimator's strength by cross-validation; rows are sent, and solvers compiled, once.

    Args:
        estimator: one of :mod:`paraxis.solve.estimators`; it is not changed.
        X, y, sample_weight: as for its ``fit``.
        grid: values of ``C``, or of ``alpha``. Each solution starts from that of the next stronger penalty.
        folds: the number of folds, stratified for classes, or a splitter of scikit-learn.

    Returns:
        Scores ``(len(grid), folds)`` by the estimator's ``score``; the best strength, the first in the grid of several
        equally good ones; and an estimator fitted to all rows with it.

    Raises:
        DataError: if a fold cannot be scored.

    Example:
        >>> import numpy as np, paraxis as px
        >>> X = np.random.default_rng(0).normal(size=(40, 3))
        >>> found = px.solve.cross_validate_path(px.solve.Ridge(), X, X @ [1.0, 2.0, 3.0], [1e-3, 1e3], folds=4)
        >>> found.best, found.scores.shape
        (0.001, (2, 4))
    """
    if not isinstance(estimator, LinearModel) or isinstance(X, Table):
        raise TypeError(
            f"cross_validate_path: estimator must be one of px.solve, and X an array, got {estimator!r} and "
            f"{check.described(X)}; use scikit-learn's GridSearchCV for a pipeline"
        )
    model, strengths = cast(_Model, clone(estimator)).set_params(warm_start=True), np.asarray(grid, np.float64)
    for strength in strengths.tolist():
        check.number("cross_validate_path", f"{model.strength_name} in grid", strength, **model.bounds)
    rows, targets, weight = model._checked(X, y, sample_weight)
    splitter: Any = check_cv(folds, targets, classifier=is_classifier(model))
    splits = [*splitter.split(rows, targets)]
    scores = np.full((len(strengths), len(splits)), np.nan)
    with fitting.surroundings(rows.dtype, model.devices):
        whole = model._posed(targets, model._weighted(targets, weight), rows.dtype).placed(rows, model.devices)
        order = sorted(range(len(strengths)), key=lambda index: -sum(model._penalty(strengths[index], whole)))
        for fold, (train, test) in enumerate(splits):
            kept, model.coef_ = np.zeros_like(weight), np.empty(0)  # from which no fit starts
            np.add.at(kept, train, model._weighted(targets[train], weight[train]))
            posed, states = whole.weighted(kept), []
            for index in order:
                states.append(model._solve(float(strengths[index]), posed))
                predicted = model._predicted(rows[test] @ model.coef_.T + model.intercept_)
                scores[index, fold] = model.metric(targets[test], predicted, sample_weight=weight[test])
            model._warn(*states)
    if not np.all(np.isfinite(scores)):
        raise DataError("cross_validate_path: a fold has no finite score: each must hold out two rows that count")
    best = float(strengths[scores.mean(1).argmax()])
    chosen = cast(_Model, clone(estimator)).set_params(**{model.strength_name: best})
    return CrossValidated(strengths, scores, best, chosen.fit(X, y, sample_weight))
