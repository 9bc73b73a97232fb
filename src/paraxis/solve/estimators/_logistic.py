"""Logistic regression: one output for two classes, a softmax for more."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
from scipy.special import expit, log_softmax, softmax
from sklearn.base import ClassifierMixin
from sklearn.metrics import accuracy_score
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d

from paraxis._calls import check
from paraxis.errors import DataError
from paraxis.solve._run import Watch
from paraxis.solve.estimators._base import LinearModel, Posed
from paraxis.solve.estimators._quadratic import Penalty


class LogisticRegression(ClassifierMixin, LinearModel):
    """Classify with a linear model, with scikit-learn's objective, names and attributes, on all devices.

    It minimises ``C * sum(weight * loss) + penalty``, where the penalty is ``|coef|² / 2`` for ``l1_ratio=0`` and
    ``l1_ratio * |coef|₁ + (1 - l1_ratio) * |coef|² / 2`` in general. The intercept is not penalised.

    Args:
        C: the inverse of the penalty's strength, positive; ``inf`` for no penalty. Without a penalty, there is no
            finite solution if some classes can be separated without a mistake.
        l1_ratio: from 0 to 1; if it is more than 0, some coefficients become zero.
        fit_intercept: whether there is an intercept.
        class_weight: a factor of the weights for each class, or ``"balanced"``: inversely proportional to the classes'
            frequencies.
        tol: stop when the norm of the mean loss's gradient is at most this, or when rounding allows no more.
        max_iter: stop after this many iterations, with a warning.
        warm_start: whether to start where the last fit ended.
        devices: number of devices to spread the rows over; default: all, or the mesh that ``jax.set_mesh`` sets.
        verbose: whether to print a line per iteration; or a function to call with each :class:`px.solve.Iteration`.

    Attributes:
        coef_: ``(1, d)`` for two classes, else ``(k, d)``.
        intercept_: ``(1,)`` or ``(k,)``.
        classes_: the labels, ``(k,)``.
        n_iter_: iterations, ``(1,)``.
        status_: why the solver stopped, in words.
        data_passes_: how often all rows were read.

    Example:
        >>> import numpy as np, paraxis as px
        >>> X = np.array([[0.0], [1.0], [2.0], [3.0]])
        >>> model = px.solve.LogisticRegression(C=1.0).fit(X, ["low", "low", "high", "high"])
        >>> model.predict([[0.5], [2.5]])
        array(['low', 'high'], dtype='<U4')
    """

    strength_name: ClassVar[str] = "C"
    strong_is_large: ClassVar[bool] = False
    classes_: np.ndarray

    def __init__(
        self,
        C: float = 1.0,
        *,
        l1_ratio: float = 0.0,
        fit_intercept: bool = True,
        class_weight: Mapping[Any, float] | Literal["balanced"] | None = None,
        tol: float = 1e-10,
        max_iter: int = 2000,
        warm_start: bool = False,
        devices: int | None = None,
        verbose: int | Watch = 0,
    ) -> None:
        self.C = C
        self.l1_ratio = l1_ratio
        self.fit_intercept = fit_intercept
        self.class_weight = class_weight
        self.tol = tol
        self.max_iter = max_iter
        self.warm_start = warm_start
        self.devices = devices
        self.verbose = verbose

    def decision_function(self, X: Any, *, engine: Any = None) -> np.ndarray:
        """Return the linear model's predictions: ``(n,)`` for two classes, else ``(n, k)``."""
        return self._of_rows(X, engine, _by_class)

    def predict(self, X: Any, *, engine: Any = None) -> np.ndarray:
        """Return the most probable class of each row, ``(n,)``.

        Args:
            X: ``(n, d)``; or a :class:`px.Table`, which is read once.
            engine: for a table, what says how many rows are read at once: ``px.Stream(memory="2GB")``.
        """
        return self._of_rows(X, engine, self._predicted)

    def score(self, X: Any, y: Any = None, sample_weight: Any = None, *, engine: Any = None) -> float:
        """Return the fraction of rows whose class is predicted.

        Args:
            X: ``(n, d)``; or a :class:`px.Table`, which is read once.
            y: classes ``(n,)``; left out for a table.
            sample_weight: ``(n,)``, not negative, or a number.
            engine: for a table, what says how many rows are read at once: ``px.Stream(memory="2GB")``.

        Raises:
            ValueError: if the data or weights cannot be used; the message says why.
        """
        return self._scored(X, y, sample_weight, engine)

    def predict_proba(self, X: Any, *, engine: Any = None) -> np.ndarray:
        """Return the probability of each class, ``(n, k)``."""
        z = self.decision_function(X, engine=engine)
        return np.stack([expit(-z), expit(z)], 1) if z.ndim == 1 else softmax(z, axis=1)

    def predict_log_proba(self, X: Any, *, engine: Any = None) -> np.ndarray:
        """Return each class's log-probability, ``(n, k)``; accurate even for probabilities near 0."""
        z = self.decision_function(X, engine=engine)
        return -np.stack([np.logaddexp(0, z), np.logaddexp(0, -z)], 1) if z.ndim == 1 else log_softmax(z, axis=1)

    def _checked_options(self) -> None:
        check.number(self._who, "C", self.C, above=0)
        check.number(self._who, "l1_ratio", self.l1_ratio, least=0, most=1)

    def _checked_targets(self, y: np.ndarray) -> np.ndarray:
        check_classification_targets(y)
        y = column_or_1d(y, warn=True)
        self.classes_ = np.unique(y)
        if y.dtype.kind == "f" and abs(self.classes_).max() >= 2.0 ** (np.finfo(y.dtype).nmant + 1):
            raise DataError(
                f"{self._who}: y holds labels such as {abs(self.classes_).max():.0f} as {y.dtype}, which does not tell "
                f"all integers of that size apart; give integers, np.asarray(y, np.int64), or text"
            )
        return y

    def _weighted(self, y: np.ndarray, weight: np.ndarray) -> np.ndarray:
        there = np.unique(y[weight > 0])
        if len(there) < 2:
            raise DataError(
                f"{self._who}: y must hold at least two classes in rows of positive weight, got one class, "
                f"{there.tolist()[0]!r}"
            )
        if self.class_weight is None:
            return weight
        with np.errstate(divide="ignore"):
            factors = compute_class_weight(self.class_weight, classes=self.classes_, y=y, sample_weight=weight)
        factors = np.where(np.isfinite(factors), factors, 0)  # of a class whose rows have the weight 0
        if np.any(factors < 0) or np.sum(np.isin(self.classes_, there) & (factors > 0)) < 2:
            raise DataError(
                f"{self._who}: class_weight must not be negative, and positive for two classes at least, got "
                f"{self.class_weight!r}; write class_weight='balanced'"
            )
        return (weight * factors[np.searchsorted(self.classes_, y)]).astype(weight.dtype)

    def _posed(self, y: np.ndarray, weight: np.ndarray, dtype: Any) -> Posed:
        number = np.searchsorted(self.classes_, y).astype(np.int32)
        # Columns far from zero hide the intercept from a solver without a preconditioner.
        centre = self.fit_intercept and self._has_l1()
        if len(self.classes_) == 2:
            return Posed("logistic", number, weight, None, centre=centre)
        return Posed("softmax", number, weight, len(self.classes_), centre=centre)

    def _penalty(self, strength: float, total: float, posed: Posed) -> Penalty:
        return Penalty(self.l1_ratio / (strength * total), (1 - self.l1_ratio) / (strength * total))

    def _has_l1(self) -> bool:
        return self.l1_ratio > 0

    def _predicted(self, z: np.ndarray) -> np.ndarray:
        z = _by_class(z)
        return self.classes_[(z > 0).astype(int) if z.ndim == 1 else z.argmax(1)]

    def _score(self, predicted: np.ndarray, y: np.ndarray, weight: np.ndarray | None) -> float:
        if y.size and isinstance(y.flat[0], str) != isinstance(self.classes_[0], str):
            known, given = self.classes_[:1].tolist()[0], y.reshape(-1)[:1].tolist()[0]
            raise TypeError(
                f"the model knows labels such as {known!r}, and these are such as {given!r}; write text for both, or "
                f"numbers for both"
            )
        return float(accuracy_score(y, predicted, sample_weight=weight))

    def _solver_form(self) -> tuple[np.ndarray, np.ndarray]:
        two = len(self.coef_) == 1
        return (self.coef_[0], self.intercept_[0]) if two else (self.coef_.T, self.intercept_)

    def _described(self, params: Any, posed: Posed, means: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        coef, intercept = super()._described(params, posed, means)
        if posed.num_outputs is None:
            return coef[None], np.atleast_1d(intercept)
        # The same to every class changes no probability; of all such solutions, this is the one scikit-learn gives.
        return coef, intercept - intercept.mean()

    def _described_count(self, count: int) -> np.ndarray:
        return np.array([count])


def _by_class(z: np.ndarray) -> np.ndarray:
    """Return predictions of the linear model ``(n,)`` for two classes, else ``(n, k)``."""
    return z[:, 0] if z.ndim == 2 and z.shape[1] == 1 else z
