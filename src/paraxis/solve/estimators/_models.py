"""The estimators: what each minimises, and how its targets are prepared."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import numpy as np
from scipy.special import log_softmax, softmax
from sklearn.base import ClassifierMixin
from sklearn.metrics import accuracy_score, d2_tweedie_score
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets

from paraxis.errors import DataError
from paraxis.solve.estimators._base import LinearModel, Regression
from paraxis.solve.estimators._fitting import Posed
from paraxis.solve.estimators._quadratic import Penalty
from paraxis.solve.objective import glm


@dataclasses.dataclass(eq=False, repr=False)
class LogisticRegression(ClassifierMixin, LinearModel):
    """Classify with a linear model, with scikit-learn's objective, names and attributes, on all devices.

    It minimises ``C * sum(weight * loss) + l1_ratio * |coef|₁ + (1 - l1_ratio) * |coef|² / 2``.

    Args:
        C: the inverse of the penalty's strength, positive; ``inf`` for none: then separable classes have no solution.
        l1_ratio: from 0 to 1; if it is more than 0, some coefficients become zero.
        class_weight: a factor for each class, or ``"balanced"``: inversely proportional to the classes' frequencies.
        tol: stop when the norm of the mean loss's gradient is at most this, or when rounding allows no more.
        fit_intercept: whether there is an intercept.
        max_iter: stop after this many iterations, with a warning.
        warm_start: whether to start where the last fit ended.
        devices: number of devices to spread the rows over; default: all, or the mesh that ``jax.set_mesh`` sets.
        verbose: whether to print a line per iteration; or a function to call with each :class:`px.solve.Iteration`.

    Attributes:
        coef_, intercept_: ``(1, d)`` and ``(1,)`` for two classes, else ``(k, d)`` and ``(k,)``.
        classes_, n_iter_: the labels, ``(k,)``; iterations, ``(1,)``.
        status_, data_passes_: why the solver stopped, in words; how often all rows were read.

    Example:
        >>> import numpy as np, paraxis as px
        >>> model = px.solve.LogisticRegression(C=1.0).fit([[0.0], [1.0], [2.0], [3.0]], ["low", "low", "high", "high"])
        >>> model.predict([[0.5], [2.5]])
        array(['low', 'high'], dtype='<U4')
    """

    strength_name: ClassVar[str] = "C"
    bounds: ClassVar[dict[str, Any]] = {"above": 0}
    metric: ClassVar[Callable[..., Any]] = staticmethod(accuracy_score)
    C: float = 1.0
    _: dataclasses.KW_ONLY
    l1_ratio: float = 0.0
    class_weight: Mapping[Any, float] | Literal["balanced"] | None = None

    score: ClassVar[Callable[..., float]] = LinearModel.score  # not that of the mixin

    def decision_function(self, X: Any) -> np.ndarray:
        """Return the linear model's predictions: ``(n,)`` for two classes, else ``(n, k)``."""
        z, _ = self._linear(X)
        return z[:, 0] if z.shape[1] == 1 else z

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probability of each class, ``(n, k)``."""
        return softmax(_by_class(self._linear(X)[0]), axis=1)

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Return each class's log-probability, ``(n, k)``; accurate even for probabilities near 0."""
        return log_softmax(_by_class(self._linear(X)[0]), axis=1)

    def _checked_targets(self, y: np.ndarray) -> np.ndarray:
        check_classification_targets(y)
        self.classes_ = np.unique(y)
        return y

    def _posed(self, y: np.ndarray, weight: np.ndarray, dtype: Any) -> Posed:
        number = np.searchsorted(self.classes_, y).astype(np.int32)
        if self.class_weight is not None:
            with np.errstate(divide="ignore"):
                factors = compute_class_weight(self.class_weight, classes=self.classes_, y=y, sample_weight=weight)
            factors = np.where(np.isfinite(factors), factors, 0)  # of a class whose rows have the weight 0
            weight = (weight * factors[number]).astype(weight.dtype)
        there = np.unique(y[weight > 0]).tolist()
        if len(there) < 2 or np.any(weight < 0):
            raise DataError(f"{self._who}: got one class, {there[:2]}, in rows of positive weight, or a negative one")
        outputs = () if len(self.classes_) == 2 else (len(self.classes_),)
        return Posed(glm("softmax" if outputs else "logistic"), number, weight, outputs)

    def _penalty(self, strength: float, posed: Posed) -> Penalty:
        alpha = 1 / (strength * posed.total)
        return Penalty(self.l1_ratio * alpha, (1 - self.l1_ratio) * alpha)

    def _predicted(self, z: np.ndarray) -> np.ndarray:
        return self.classes_[_by_class(z).argmax(1)]

    def _described(self, coef: np.ndarray, intercept: np.ndarray, posed: Posed) -> tuple[np.ndarray, np.ndarray]:
        coef, intercept = super()._described(coef, intercept, posed)
        if not posed.outputs:
            return coef[None], np.atleast_1d(intercept)
        # The same to every class changes no probability; of all such solutions, this is the one scikit-learn gives.
        return coef, intercept - intercept.mean()


def _by_class(z: np.ndarray) -> np.ndarray:
    """Return predictions of the linear model for each class; of two, ``(n, 1)``, the first has 0."""
    return np.pad(z, ((0, 0), (1, 0))) if z.shape[1] == 1 else z


@dataclasses.dataclass(eq=False, repr=False)
class Ridge(Regression):
    """Fit least squares with an L2 penalty, with scikit-learn's objective, names and attributes, on all devices.

    It minimises ``sum(weight * residual²) + alpha * |coef|²``. The intercept is not penalised.

    Args:
        alpha: the penalty's strength, not negative.
        tol: stop when the norm of the gradient, for targets of variance 1, is at most this, or rounding allows no more.
        fit_intercept, max_iter, warm_start, devices, verbose: as of :class:`LogisticRegression`.

    Attributes:
        coef_, intercept_: ``(d,)`` and a number; for targets ``(n, k)`` with ``k > 1``, ``(k, d)`` and ``(k,)``.
        n_iter_, status_, data_passes_: as of :class:`LogisticRegression`; ``n_iter_`` is a number.

    Example:
        >>> import numpy as np, paraxis as px
        >>> px.solve.Ridge(alpha=2.0).fit(np.array([[0.0], [1.0], [2.0]]), [0.0, 2.0, 4.0]).coef_.round(6)
        array([1.])
    """

    alpha: float = 1.0
    _: dataclasses.KW_ONLY
    tol: float = 1e-12

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _penalty(self, strength: float, posed: Posed) -> Penalty:
        return Penalty(0.0, strength / posed.total)


@dataclasses.dataclass(eq=False, repr=False)
class LinearRegression(Ridge):
    """Fit least squares: :class:`Ridge` without a penalty; if columns depend on each other, the smallest solution.

    Example:
        >>> import numpy as np, paraxis as px
        >>> px.solve.LinearRegression().fit(np.array([[0.0], [1.0], [2.0]]), [1.0, 3.0, 5.0]).coef_.round(6)
        array([2.])
    """

    alpha: ClassVar[float] = 0.0  # pyright: ignore[reportIncompatibleVariableOverride]


@dataclasses.dataclass(eq=False, repr=False)
class ElasticNet(Regression):
    """Fit least squares with L1 and L2 penalties, with scikit-learn's objective, names and attributes, on all devices.

    It minimises ``mean(residual²) / 2 + alpha * (l1_ratio * |coef|₁ + (1 - l1_ratio) * |coef|² / 2)`` with a weighted
    mean. The intercept is not penalised.

    Args:
        alpha: the penalty's strength, not negative.
        l1_ratio: from 0 to 1.
        tol: stop when the duality gap, relative to the targets' variance, is at most this, or rounding allows no more;
            of more than 4,096 columns, when the norm of a proximal step is, for targets of variance 1.
        fit_intercept, max_iter, warm_start, devices, verbose: as of :class:`Ridge`, and so are the attributes.

    Example:
        >>> import numpy as np, paraxis as px
        >>> X = np.array([[-1.0, 1.0], [1.0, 1.0], [-1.0, -1.0], [1.0, -1.0]])
        >>> px.solve.ElasticNet(alpha=1.0, l1_ratio=0.5).fit(X, 3 * X[:, 0]).coef_.round(6) + 0
        array([1.666667, 0.      ])
    """

    alpha: float = 1.0
    _: dataclasses.KW_ONLY
    l1_ratio: float = 0.5
    tol: float = 1e-12
    max_iter: int = 10_000


@dataclasses.dataclass(eq=False, repr=False)
class Lasso(ElasticNet):
    """Fit least squares with an L1 penalty: :class:`ElasticNet` with ``l1_ratio=1``.

    Example:
        >>> import numpy as np, paraxis as px
        >>> px.solve.Lasso(alpha=1.0).fit(np.array([[-1.0], [1.0]]), [-3.0, 3.0]).coef_.round(6)
        array([2.])
    """

    l1_ratio: ClassVar[float] = 1.0  # pyright: ignore[reportIncompatibleVariableOverride]


@dataclasses.dataclass(eq=False, repr=False)
class TweedieRegressor(Regression):
    """Fit a Tweedie distribution's mean, with scikit-learn's objective, names and attributes, on all devices.

    It minimises half the weighted mean deviance, plus ``alpha / 2 * |coef|²``. The intercept is not penalised.

    Args:
        alpha: the penalty's strength, not negative.
        power: the variance is ``mean**power``: 0 is the normal distribution, 1 Poisson's, 2 Gamma's, between 1 and 2
            that of sums of claims, 3 the inverse Gaussian. The link is the logarithm; of the normal, the identity.
        tol: stop when the norm of the gradient is at most this, or when rounding allows no more.
        fit_intercept, max_iter, warm_start, devices, verbose: as of :class:`Ridge`, and so are the attributes.

    Example:
        >>> import numpy as np, paraxis as px
        >>> model = px.solve.TweedieRegressor(alpha=0.0, power=1.5).fit([[0.0], [1.0], [1.0]], [1, 0, 8])
        >>> model.predict([[1.0]]).round(6)
        array([4.])
    """

    alpha: float = 1.0
    _: dataclasses.KW_ONLY
    power: float = 0.0

    @property
    def metric(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return functools.partial(d2_tweedie_score, power=self.power)  # pyright: ignore[reportArgumentType]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = self.power > 0
        return tags

    def _posed(self, y: np.ndarray, weight: np.ndarray, dtype: Any) -> Posed:
        if not self.power:
            return super()._posed(y, weight, dtype)
        y = y.astype(dtype)
        mean = np.average(y, weights=weight)
        if not mean > 0:
            raise DataError(f"{self._who}: y must hold a number above 0 in a row of positive weight, and none below 0")
        return Posed(glm("tweedie", power=float(self.power)), y, weight, intercept=np.log(mean))

    def _predicted(self, z: np.ndarray) -> np.ndarray:
        return np.exp(z) if self.power else z


@dataclasses.dataclass(eq=False, repr=False)
class PoissonRegressor(TweedieRegressor):
    """Fit counts by a log-linear model: :class:`TweedieRegressor` with ``power=1``.

    Example:
        >>> import numpy as np, paraxis as px
        >>> px.solve.PoissonRegressor(alpha=0.0).fit([[0.0], [1.0], [1.0]], [1, 2, 6]).predict([[1.0]]).round(6)
        array([4.])
    """

    power: ClassVar[float] = 1.0  # pyright: ignore[reportIncompatibleVariableOverride]


@dataclasses.dataclass(eq=False, repr=False)
class GammaRegressor(TweedieRegressor):
    """Fit positive numbers by a log-linear model: :class:`TweedieRegressor` with ``power=2``.

    Example:
        >>> import numpy as np, paraxis as px
        >>> px.solve.GammaRegressor(alpha=0.0).fit([[0.0], [1.0], [1.0]], [1, 2, 6]).predict([[1.0]]).round(6)
        array([4.])
    """

    power: ClassVar[float] = 2.0  # pyright: ignore[reportIncompatibleVariableOverride]
