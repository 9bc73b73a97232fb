"""The common part of the estimators: data are checked as scikit-learn checks them, laid out, and solved for.

An estimator tells what is particular to it: its loss, its targets, and what its strength means beside a mean of losses.
"""

import abc
import copy
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax
import numpy as np
from sklearn.base import BaseEstimator, RegressorMixin, is_classifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import r2_score
from sklearn.utils.validation import _check_sample_weight, check_consistent_length, check_is_fitted, validate_data

from paraxis._core import arrays, check
from paraxis._tables import Table
from paraxis.errors import DataError
from paraxis.solve import prox
from paraxis.solve._lbfgs import LBFGS
from paraxis.solve._proximal import ProximalGradient
from paraxis.solve._rows import require_unmasked, sent
from paraxis.solve._run import Status, Watch
from paraxis.solve._streaming import MAX_FEATURES, TableRows
from paraxis.solve.estimators import _fitting as fitting
from paraxis.solve.estimators._fitting import Posed
from paraxis.solve.estimators._quadratic import Penalty, Quadratic, QuadraticState
from paraxis.solve.objective import glm

_GOOD_ENOUGH = 1e-4  # an error at which rounding may stop a solver without a warning; scikit-learn's usual tolerance
_BLOCK = 1 << 26  # bytes of a table that are predicted from at once
_FEW = 1024  # columns of which a matrix is no work, however few rows there are
# Steps by Hessians take some passes of (n, d, d) operations. In memory they pay where these take less than to compile
# another solver does, and over tables while to read a row takes longer than its products.
_CHEAP, _NARROW = 2 * 10**8, 256
_FLOATS: Any = [np.float64, np.float32]


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class LinearModel(BaseEstimator, abc.ABC):
    """Base of the estimators, with the options of all."""

    strength_name: ClassVar[str] = "alpha"
    bounds: ClassVar[dict[str, Any]] = {"least": 0, "most": float(np.finfo(np.float64).max)}  # of the strength
    metric: ClassVar[Callable[..., Any]]  # what ``score`` returns
    fit_intercept: bool = True
    tol: float = 1e-6
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

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None, *, offset: Any = None, engine: Any = None) -> Self:
        """Fit the model.

        Args:
            X: ``(n, d)``. If it is float32, everything is computed in float32, else in float64. Or a
                :class:`px.Table`, of rows that stay on disk and are read about twice per iteration.
            y: targets, ``(n,)``; left out for a table.
            sample_weight: ``(n,)``, not negative, or a number; a row of weight zero does not count.
            offset: what is added to the linear model's predictions, ``(n,)``, or ``(n, k)`` for k outputs: of counts,
                the logarithm of an exposure. ``predict`` is for an offset of 0.
            engine: for a table, what says how many rows are read at once: ``px.Stream(memory="2GB")``.

        Raises:
            ValueError: if the data or an option cannot be used. After any error, the estimator is as it was.

        Communicates, if there are several devices: sends each its rows; then whatever the solver does.
        """
        model = copy.copy(self)
        X, y, weight = model._checked(X, y, sample_weight, engine)
        with fitting.precision_context(X.dtype, self.devices):
            posed = model._posed_for(X, y, weight, offset).placed(X, self.devices)
            state = model._solve(getattr(self, self.strength_name), posed)
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
            names = list(getattr(self, "feature_names_in_", X.columns))
            if X._is_named and names != X.columns:
                line = "Table…(columns=list(model.feature_names_in_))"
                raise DataError(f"{self._who}: the model was fitted to columns {names}, got {X.columns}; write {line}")
            blocks = X.blocks(max(1, _BLOCK // (len(X.columns) * X.dtype.itemsize)))
            z, y = zip(*((rows @ self.coef_.T + self.intercept_, y) for rows, y in blocks), strict=True)
            return np.concatenate(z), np.concatenate(y)
        return validate_data(self, X, reset=False, dtype=_FLOATS) @ self.coef_.T + self.intercept_, y

    def _checked(self, X: Any, y: Any, sample_weight: Any, engine: Any = None) -> tuple[Any, np.ndarray, np.ndarray]:
        """Return rows, which a table's are as they are read in passes, targets and weights."""
        check.number(self._who, self.strength_name, getattr(self, self.strength_name), **self.bounds)
        check.number(self._who, "l1_ratio", getattr(self, "l1_ratio", 0), least=0, most=1)
        require_unmasked(self._who, X=X, y=y, sample_weight=sample_weight)
        if isinstance(X, Table):
            with fitting.precision_context(X.dtype, self.devices):
                rows: Any = TableRows(self._who, X, y, engine, fitting.axis_of(max(1, len(X)), self.devices))
            vars(self).pop("feature_names_in_", None)
            if X._is_named:
                self.feature_names_in_ = np.array(X.columns, object)
            self.n_features_in_, y = len(X.columns), rows.y
        else:
            if engine is not None:
                raise TypeError(f"{self._who}: engine is for a px.Table; leave engine out")
            has_many = self.__sklearn_tags__().target_tags.multi_output
            rows, y = validate_data(self, X, y, dtype=_FLOATS, multi_output=has_many)
        targets = self._checked_targets(y)
        weight = _check_sample_weight(sample_weight, targets, dtype=rows.dtype, ensure_non_negative=True)
        return rows, targets, weight

    def _posed_for(self, X: Any, y: np.ndarray, weight: np.ndarray, offset: Any = None) -> Posed:
        """Return what to solve, and whether a solver by Hessians does it, which sees columns without their means."""
        posed, has_l1 = self._posed(y, weight, X.dtype), getattr(self, "l1_ratio", 0) > 0
        (num_rows, num_features), is_flat = X.shape, posed.fun.loss == "squared"
        is_cheap = num_rows * num_features**2 <= _CHEAP or (isinstance(X, TableRows) and num_features <= _NARROW)
        pays = is_flat or (posed.fun.loss != "softmax" and (has_l1 or is_cheap))
        posed.by_hessians = pays and num_features <= min(MAX_FEATURES, max(num_rows, _FEW))
        if offset is not None:
            require_unmasked(self._who, offset=offset)
            check_consistent_length(y, offset)
            posed.offset = np.asarray(offset, X.dtype) / posed.scale
            posed.intercept = posed.intercept - np.average(posed.offset, 0, posed.weight)
        posed.centre = bool(self.fit_intercept) and (is_flat or has_l1 or posed.by_hessians)
        return posed

    def _solve(self, strength: float, posed: Posed) -> Any:
        """Set the solution, and return the solver's state. A warm start is where the last solution is."""
        (coef, intercept), data, penalty = self._start(posed), posed.data, self._penalty(strength, posed)
        has_intercept, has_l1 = bool(self.fit_intercept), penalty.l1 > 0
        begin = (coef, intercept) if has_intercept else coef
        fun = dataclasses.replace(posed.fun, intercept=has_intercept)
        options: Any = {"tol": float(self.tol), "maxiter": int(self.max_iter), "verbose": self.verbose}
        if posed.by_hessians:
            params, state = Quadratic(fun, **options).run(begin, (penalty, posed.hessian), data)
            posed.hessian = state.hessian if fun.loss == "squared" else None
        else:
            fun = dataclasses.replace(fun, l2=True)
            solver = ProximalGradient(fun, prox.l1, **options) if has_l1 else LBFGS(fun, **options)
            l1 = (penalty.l1, 0.0) if has_intercept else penalty.l1
            operands = (begin, l1, penalty.l2) if has_l1 else (begin, penalty.l2)
            operands = jax.tree.map(lambda x: sent(np.asarray(x, data.X.dtype), data.y), operands)
            params, state = solver.run(*operands, data)
        coef, intercept = jax.tree.map(arrays.on_host, params if has_intercept else (params, intercept))
        self.coef_, self.intercept_ = self._described(coef, intercept, posed)
        return state

    def _start(self, posed: Posed) -> tuple[np.ndarray, np.ndarray]:
        zeros = np.zeros((*posed.means.shape, *posed.outputs), posed.means.dtype)
        coef, intercept = zeros, np.broadcast_to(posed.intercept, posed.outputs)
        if self.warm_start and np.size(getattr(self, "coef_", ())) == zeros.size:
            coef = self.coef_.T.reshape(zeros.shape)
            previous = np.broadcast_to(getattr(self, "intercept_", 0.0), posed.outputs or (1,))
            intercept = np.reshape(previous, posed.outputs) + posed.means @ coef - posed.origin
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
            is_good = error <= _GOOD_ENOUGH or isinstance(state, QuadraticState)  # whose promises are the objective's
            if status == Status.CONVERGED or (status == Status.PRECISION and is_good):
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


@dataclasses.dataclass(eq=False, repr=False)
class Regression(RegressorMixin, LinearModel):
    metric: ClassVar[Callable[..., Any]] = staticmethod(r2_score)
    score: ClassVar[Callable[..., float]] = LinearModel.score  # not that of the mixin

    def _checked_targets(self, y: np.ndarray) -> np.ndarray:
        return y[:, 0] if y.shape[1:] == (1,) else y

    def _posed(self, y: np.ndarray, weight: np.ndarray, dtype: Any) -> Posed:
        """Targets on the scale of 1, so that one tolerance fits all."""
        y = y.astype(dtype)
        origin = np.average(y, axis=0, weights=weight) * bool(self.fit_intercept)
        largest = np.abs(y - origin).max(0)  # a square of it may be none
        largest = np.where(largest > 0, largest, 1)
        scale = largest * np.sqrt(np.average(((y - origin) / largest) ** 2, axis=0, weights=weight))
        scale = np.where(scale > 0, scale, 1)
        return Posed(glm("squared"), ((y - origin) / scale).astype(dtype), weight, y.shape[1:], origin, scale)

    def _penalty(self, strength: float, posed: Posed) -> Penalty:
        # On targets divided by their scale, the mean of squares is less by its square, and |coef|₁ by the scale.
        ratio = getattr(self, "l1_ratio", 0.0)
        return Penalty(strength * ratio / posed.scale if ratio else 0.0, strength * (1 - ratio))
