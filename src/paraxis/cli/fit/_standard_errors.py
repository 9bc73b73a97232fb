"""Standard errors of coefficients, where theory gives them. NumPy only.

Without a penalty, the estimate is that of maximum likelihood. Its covariance is the inverse of the information
``D' V D``: D has the model's columns and one of ones, and V is 1 / s² for least squares, with s² the squared residuals
over their degrees of freedom; p (1 - p) for two classes; and the expected count for counts.
"""

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from paraxis.cli.fit._model import Model

_HOLDS = {
    "squared": "Standard errors hold if the model is right and the rows' errors are independent and of one variance.",
    "logistic": "Standard errors hold if the model is right, for independent rows, many more than columns.",
    "poisson": "Standard errors hold if the counts are Poisson's, for independent rows, many more than columns.",
}
_MOST_COLUMNS = 1000  # of a matrix that is inverted on the host
_LARGEST_CONDITION = 1e12
_EXACT = {"float64": 1e-7, "float32": 1e-4}  # of a fit's errors, beside the target's spread: they are the solver's own


@dataclasses.dataclass(frozen=True)
class StandardErrors:
    """The standard errors of a model's coefficients.

    Args:
        values: for columns in their own units, that of the intercept first, ``(1 + d,)``; ``None``: there are none.
        words: when they hold, or why there are none.
    """

    values: np.ndarray | None
    words: str


def of_model(
    model: Model, parts: Iterable[np.ndarray], y: np.ndarray, *, converged: bool, weighted: bool, filled: bool
) -> StandardErrors:
    """Return the standard errors of a model's coefficients.

    Args:
        model: the model.
        parts: its columns of the rows that were fitted to, of mean 0 and standard deviation 1, ``(n, d)``, in parts;
            they are asked for once, if at all.
        y: their targets, ``(n,)``.
        converged: whether it is a solution.
        weighted: whether rows had weights.
        filled: whether means stood for missing values.
    """
    why_none = {
        "a penalty shrinks coefficients; write --penalty none": model.about["strength"] > 0,
        "those of more than two classes are determined but for a constant": len(model.coef) > 1,
        "weights have several meanings, and each has its own": weighted,
        "means stood for missing values; write --missing drop-rows": filled,
    }
    reason = next((reason for reason, holds in why_none.items() if holds), None)
    if reason is None:
        sums = _summed(model, parts, y)
        why_none = {
            "the columns tell the classes apart without an error, so ever larger coefficients are more likely": (
                model.target.objective == "logistic" and sums.all_right
            ),
            "the solver stopped before the test for a solution was passed": not converged,
            f"there are more than {_MOST_COLUMNS} columns": model.coef.shape[1] > _MOST_COLUMNS,
        }
        reason = next((reason for reason, holds in why_none.items() if holds), None)
        found = _values(model, sums, y) if reason is None else reason
    else:
        found = reason
    if isinstance(found, str):
        return StandardErrors(None, f"There are no standard errors: {found}.")
    return StandardErrors(found, _HOLDS[model.target.objective])


class _Sums(NamedTuple):
    """The sums over all rows that the errors are made of.

    Args:
        gram: ``D' D``.
        information: ``D' V D``, for least squares without the variance.
        squares: the sum of squared residuals.
        all_right: whether a model of two classes is right about each row.
        exact: as ``_EXACT``.
    """

    gram: np.ndarray
    information: np.ndarray
    squares: float
    all_right: bool
    exact: float


def _summed(model: Model, parts: Iterable[np.ndarray], y: np.ndarray) -> _Sums:
    """Return the sums over all rows. Of more columns than errors are told of, no matrix is made."""
    size = 1 + model.coef.shape[1] if model.coef.shape[1] <= _MOST_COLUMNS else 0
    gram, information = np.zeros((size, size)), np.zeros((size, size))
    squares, all_right, start, exact = 0.0, True, 0, 0.0
    objective = model.target.objective
    for X in parts:
        own, exact = y[start : start + len(X)], _EXACT[X.dtype.name]
        start += len(X)
        X = X.astype(np.float64)
        z = X @ model.coef[0] + model.intercept[0]
        squares += float(np.sum((own - z) ** 2)) if objective == "squared" else 0.0
        all_right = all_right and bool(np.all(np.where(own > 0, z, -z) > 0))
        if size:
            D = np.column_stack([np.ones(len(X)), X])
            gram += D.T @ D
            information += D.T @ (_precision(objective, z)[:, None] * D)
    return _Sums(gram, information, squares, all_right, exact)


def _values(model: Model, sums: _Sums, y: np.ndarray) -> np.ndarray | str:
    """Return them, or why there are none."""
    size, information = len(sums.gram), sums.information
    if len(y) < size:
        return "there are more coefficients than rows"
    if _inverse(sums.gram) is None:
        return "some columns are determined by the others, as are all levels of a text"
    if model.target.objective == "squared":
        if (reason := _perfect(sums, y)) is not None:
            return reason
        information = information * ((len(y) - size) / sums.squares)
    covariance = _inverse(information)
    if covariance is None:
        return "the rows whose target is uncertain do not determine the coefficients"
    # To the columns' own units: the intercept there is the one here less the coefficients' means.
    change = np.diag(np.concatenate([[1], 1 / model.recipe.scales]))
    change[0, 1:] = -model.recipe.means / model.recipe.scales
    return np.sqrt(np.einsum("ij,jk,ik->i", change, covariance, change))


def _inverse(information: np.ndarray) -> np.ndarray | None:
    """Return the inverse, unless rounding allows none."""
    unit = np.sqrt(np.diag(information))
    if not np.all(np.isfinite(unit) & (unit > 0)):
        return None
    scaled = information / np.outer(unit, unit)
    if np.linalg.cond(scaled) > _LARGEST_CONDITION:
        return None
    return np.linalg.inv(scaled) / np.outer(unit, unit)


def _perfect(sums: _Sums, y: np.ndarray) -> str | None:
    """Return why rows leave no errors to be seen, if so."""
    if len(y) <= len(sums.gram):
        return "there are as many coefficients as rows, so no errors are left to tell their variance"
    largest, exact = np.abs(y).max(), sums.exact
    if np.sqrt(sums.squares / len(y)) <= exact * (np.std(y) if np.std(y) > exact * largest else largest):
        return "the fit is perfect, so no errors are left to tell their variance"
    return None


def _precision(objective: str, z: np.ndarray) -> np.ndarray:
    """Return that of each row's target, ``(n,)``; of least squares up to a factor."""
    if objective == "squared":
        return np.ones(len(z))
    if objective == "poisson":
        return np.exp(z)
    odds = np.exp(-np.abs(z))
    return odds / (1 + odds) ** 2
