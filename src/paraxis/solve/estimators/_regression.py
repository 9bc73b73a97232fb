"""Regression: squared residuals with either penalty, and counts."""

import abc
from typing import Any, ClassVar

import numpy as np
from sklearn.base import RegressorMixin
from sklearn.metrics import d2_tweedie_score, r2_score
from sklearn.utils.validation import check_array, column_or_1d

from paraxis._calls import check
from paraxis.errors import DataError
from paraxis.solve._run import Watch
from paraxis.solve.estimators._base import LinearModel, Posed
from paraxis.solve.estimators._quadratic import Penalty


class Regression(RegressorMixin, LinearModel, abc.ABC):
    """Base of the regressions."""

    strength_name: ClassVar[str] = "alpha"
    alpha: float

    def predict(self, X: Any, *, engine: Any = None) -> np.ndarray:
        """Return the predicted targets, ``(n,)`` or ``(n, k)``.

        Args:
            X: ``(n, d)``; or a :class:`px.Table`, which is read once.
            engine: for a table, what says how many rows are read at once: ``px.Stream(memory="2GB")``.
        """
        return self._of_rows(X, engine, self._predicted)

    def score(self, X: Any, y: Any = None, sample_weight: Any = None, *, engine: Any = None) -> float:
        """Return R², the fraction of the targets' variance that is explained; 1 is best.

        Args:
            X: ``(n, d)``; or a :class:`px.Table`, which is read once.
            y: targets, as for ``fit``; left out for a table.
            sample_weight: ``(n,)``, not negative, or a number.
            engine: for a table, what says how many rows are read at once: ``px.Stream(memory="2GB")``.

        Raises:
            ValueError: if the data or weights cannot be used; the message says why.
        """
        return self._scored(X, y, sample_weight, engine)

    def _checked_options(self) -> None:
        check.number(self._who, "alpha", self.alpha, least=0, most=float(np.finfo(float).max))

    def _checked_targets(self, y: np.ndarray) -> np.ndarray:
        return _numbers(column_or_1d(y, warn=True))


class LeastSquares(Regression, abc.ABC):
    """Base of those that minimise squared residuals."""

    def _posed(self, y: np.ndarray, weight: np.ndarray, dtype: Any) -> Posed:
        """Targets on the scale of 1, so that one tolerance fits all; columns without means, if there is an intercept.

        Then the intercept is the targets' mean whatever the coefficients are, and neither hinders the other.
        """
        y = y.astype(dtype)
        origin = np.average(y, axis=0, weights=weight) if self.fit_intercept else np.zeros(y.shape[1:], dtype)
        largest = np.abs(y - origin).max(0)  # a square of it may be none
        largest = np.where((largest > 0) & np.isfinite(largest), largest, 1)
        scale = largest * np.sqrt(np.average(((y - origin) / largest) ** 2, axis=0, weights=weight))
        scale = np.where((scale > 0) & np.isfinite(scale), scale, 1)
        outputs = y.shape[1] if y.ndim == 2 else None
        targets = ((y - origin) / scale).astype(dtype)
        return Posed("squared", targets, weight, outputs, origin, scale, centre=self.fit_intercept)

    def _predicted(self, z: np.ndarray) -> np.ndarray:
        return z

    def _score(self, predicted: np.ndarray, y: np.ndarray, weight: np.ndarray | None) -> float:
        return float(r2_score(_numbers(y), predicted, sample_weight=weight))


class Ridge(LeastSquares):
    """Fit least squares with an L2 penalty, with scikit-learn's objective, names and attributes, on all devices.

    It minimises ``sum(weight * residual²) + alpha * |coef|²``. The intercept is not penalised.

    Args:
        alpha: the penalty's strength, not negative.
        fit_intercept: whether there is an intercept.
        tol: stop when the norm of the gradient, for targets of variance 1, is at most this, or when rounding allows no
            more.
        max_iter: stop after this many iterations, with a warning.
        warm_start: whether to start where the last fit ended.
        devices: number of devices to spread the rows over; default: all, or the mesh that ``jax.set_mesh`` sets.
        verbose: whether to print a line per iteration; or a function to call with each :class:`px.solve.Iteration`.

    Attributes:
        coef_: ``(d,)``, or ``(k, d)`` for targets ``(n, k)`` of more than one column.
        intercept_: a number, or ``(k,)``.
        n_iter_: iterations.
        status_: why the solver stopped, in words.
        data_passes_: how often all rows were read.

    Example:
        >>> import numpy as np, paraxis as px
        >>> X = np.array([[0.0], [1.0], [2.0], [3.0]])
        >>> px.solve.Ridge(alpha=5.0).fit(X, 2 * X[:, 0]).coef_.round(6)
        array([1.])
    """

    def __init__(
        self,
        alpha: float = 1.0,
        *,
        fit_intercept: bool = True,
        tol: float = 1e-12,
        max_iter: int = 2000,
        warm_start: bool = False,
        devices: int | None = None,
        verbose: int | Watch = 0,
    ) -> None:
        self.alpha = alpha
        self.fit_intercept = fit_intercept
        self.tol = tol
        self.max_iter = max_iter
        self.warm_start = warm_start
        self.devices = devices
        self.verbose = verbose

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _checked_targets(self, y: np.ndarray) -> np.ndarray:
        several = y.ndim == 2 and y.shape[1] > 1
        checked = super()._checked_targets(y[:, 0] if y.ndim == 2 else y)
        return _numbers(y) if several else checked

    def _penalty(self, strength: float, total: float, posed: Posed) -> Penalty:
        return Penalty(0.0, strength / (total * (posed.num_outputs or 1)))  # the loss is a mean over the outputs, too


class PoissonRegressor(Regression):
    """Fit counts by a log-linear model, with scikit-learn's objective, names and attributes, on all devices.

    It minimises half the weighted mean Poisson deviance, plus ``alpha / 2 * |coef|²``. The intercept is not penalised.

    Args:
        alpha: the penalty's strength, not negative.
        fit_intercept: whether there is an intercept.
        tol: stop when the norm of the gradient is at most this, or when rounding allows no more.
        max_iter: stop after this many iterations, with a warning.
        warm_start: whether to start where the last fit ended.
        devices: number of devices to spread the rows over; default: all, or the mesh that ``jax.set_mesh`` sets.
        verbose: whether to print a line per iteration; or a function to call with each :class:`px.solve.Iteration`.

    Attributes:
        coef_: ``(d,)``.
        intercept_: a number.
        n_iter_: iterations.
        status_: why the solver stopped, in words.
        data_passes_: how often all rows were read.

    Example:
        >>> import numpy as np, paraxis as px
        >>> X = np.array([[0.0], [1.0], [0.0], [1.0]])
        >>> px.solve.PoissonRegressor(alpha=0.0).fit(X, [1, 2, 1, 6]).predict([[1.0]]).round(6)
        array([4.])
    """

    def __init__(
        self,
        alpha: float = 1.0,
        *,
        fit_intercept: bool = True,
        tol: float = 1e-10,
        max_iter: int = 2000,
        warm_start: bool = False,
        devices: int | None = None,
        verbose: int | Watch = 0,
    ) -> None:
        self.alpha = alpha
        self.fit_intercept = fit_intercept
        self.tol = tol
        self.max_iter = max_iter
        self.warm_start = warm_start
        self.devices = devices
        self.verbose = verbose

    def predict(self, X: Any, *, engine: Any = None) -> np.ndarray:
        """Return the expected counts, ``(n,)``.

        Args:
            X: ``(n, d)``; or a :class:`px.Table`, which is read once.
            engine: for a table, what says how many rows are read at once: ``px.Stream(memory="2GB")``.
        """
        return self._of_rows(X, engine, self._predicted)

    def score(self, X: Any, y: Any = None, sample_weight: Any = None, *, engine: Any = None) -> float:
        """Return D², the fraction of the Poisson deviance that is explained; 1 is best.

        Args:
            X: ``(n, d)``; or a :class:`px.Table`, which is read once.
            y: counts ``(n,)``; left out for a table.
            sample_weight: ``(n,)``, not negative, or a number.
            engine: for a table, what says how many rows are read at once: ``px.Stream(memory="2GB")``.

        Raises:
            ValueError: if the data or weights cannot be used; the message says why.
        """
        return self._scored(X, y, sample_weight, engine)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = True
        return tags

    def _checked_targets(self, y: np.ndarray) -> np.ndarray:
        y = super()._checked_targets(y)
        if np.any(y < 0):
            raise DataError(f"{self._who}: y must hold counts, not negative, got {y.min()}; for such, write Ridge()")
        return y

    def _posed(self, y: np.ndarray, weight: np.ndarray, dtype: Any) -> Posed:
        mean = np.average(y, weights=weight)
        if not mean > 0:
            raise DataError(f"{self._who}: y must hold a count above 0 in a row of positive weight; all are 0")
        return Posed("poisson", y.astype(dtype), weight, None, intercept=np.log(mean))

    def _penalty(self, strength: float, total: float, posed: Posed) -> Penalty:
        return Penalty(0.0, strength)

    def _predicted(self, z: np.ndarray) -> np.ndarray:
        return np.exp(z)

    def _score(self, predicted: np.ndarray, y: np.ndarray, weight: np.ndarray | None) -> float:
        return float(d2_tweedie_score(_numbers(y), predicted, sample_weight=weight, power=1))


class ElasticNet(LeastSquares):
    """Fit least squares with L1 and L2 penalties, with scikit-learn's objective, names and attributes, on all devices.

    It minimises ``mean(residual²) / 2 + alpha * (l1_ratio * |coef|₁ + (1 - l1_ratio) * |coef|² / 2)`` with a weighted
    mean. The intercept is not penalised.

    Args:
        alpha: the penalty's strength, not negative.
        l1_ratio: from 0 to 1.
        fit_intercept: whether there is an intercept.
        tol: stop when the duality gap, relative to the targets' variance, is at most this, or when rounding allows no
            more; of more than 4,096 columns, when the norm of a proximal step is, for targets of variance 1.
        max_iter: stop after this many iterations, with a warning.
        warm_start: whether to start where the last fit ended.
        devices: number of devices to spread the rows over; default: all, or the mesh that ``jax.set_mesh`` sets.
        verbose: whether to print a line per iteration; or a function to call with each :class:`px.solve.Iteration`.

    Attributes:
        coef_: ``(d,)``.
        intercept_: a number.
        n_iter_: iterations.
        status_: why the solver stopped, in words.
        data_passes_: how often all rows were read.

    Example:
        >>> import numpy as np, paraxis as px
        >>> X = np.array([[-1.0, 1.0], [1.0, 1.0], [-1.0, -1.0], [1.0, -1.0]])
        >>> px.solve.ElasticNet(alpha=1.0, l1_ratio=0.5).fit(X, 3 * X[:, 0]).coef_.round(6) + 0
        array([1.666667, 0.      ])
    """

    def __init__(
        self,
        alpha: float = 1.0,
        *,
        l1_ratio: float = 0.5,
        fit_intercept: bool = True,
        tol: float = 1e-12,
        max_iter: int = 10_000,
        warm_start: bool = False,
        devices: int | None = None,
        verbose: int | Watch = 0,
    ) -> None:
        self.alpha = alpha
        self.l1_ratio = l1_ratio
        self.fit_intercept = fit_intercept
        self.tol = tol
        self.max_iter = max_iter
        self.warm_start = warm_start
        self.devices = devices
        self.verbose = verbose

    def _checked_options(self) -> None:
        super()._checked_options()
        check.number(self._who, "l1_ratio", self.l1_ratio, least=0, most=1)

    def _penalty(self, strength: float, total: float, posed: Posed) -> Penalty:
        # On targets divided by their scale, the mean of squares is less by its square, and |coef|₁ by the scale.
        return Penalty(strength * self.l1_ratio / posed.scale, strength * (1 - self.l1_ratio))

    def _has_l1(self) -> bool:
        return self.l1_ratio > 0


class Lasso(LeastSquares):
    """Fit least squares with an L1 penalty, with scikit-learn's objective, names and attributes, on all devices.

    It minimises ``mean(residual²) / 2 + alpha * |coef|₁`` with a weighted mean. The intercept is not penalised.

    Args:
        alpha: the penalty's strength, not negative.
        fit_intercept: whether there is an intercept.
        tol: stop when the duality gap, relative to the targets' variance, is at most this, or when rounding allows no
            more; of more than 4,096 columns, when the norm of a proximal step is, for targets of variance 1.
        max_iter: stop after this many iterations, with a warning.
        warm_start: whether to start where the last fit ended.
        devices: number of devices to spread the rows over; default: all, or the mesh that ``jax.set_mesh`` sets.
        verbose: whether to print a line per iteration; or a function to call with each :class:`px.solve.Iteration`.

    Attributes:
        coef_: ``(d,)``.
        intercept_: a number.
        n_iter_: iterations.
        status_: why the solver stopped, in words.
        data_passes_: how often all rows were read.

    Example:
        >>> import numpy as np, paraxis as px
        >>> X = np.array([[-1.0, 1.0], [1.0, 1.0], [-1.0, -1.0], [1.0, -1.0]])
        >>> px.solve.Lasso(alpha=1.0).fit(X, 3 * X[:, 0]).coef_.round(6) + 0
        array([2., 0.])
    """

    def __init__(
        self,
        alpha: float = 1.0,
        *,
        fit_intercept: bool = True,
        tol: float = 1e-12,
        max_iter: int = 10_000,
        warm_start: bool = False,
        devices: int | None = None,
        verbose: int | Watch = 0,
    ) -> None:
        self.alpha = alpha
        self.fit_intercept = fit_intercept
        self.tol = tol
        self.max_iter = max_iter
        self.warm_start = warm_start
        self.devices = devices
        self.verbose = verbose

    def _penalty(self, strength: float, total: float, posed: Posed) -> Penalty:
        return Penalty(strength / posed.scale, 0.0)  # targets are divided by their scale; see ElasticNet

    def _has_l1(self) -> bool:
        return True


def _numbers(y: Any) -> np.ndarray:
    return check_array(y, ensure_2d=False, dtype="numeric", input_name="y")
