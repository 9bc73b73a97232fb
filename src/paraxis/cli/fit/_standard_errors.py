"""Standard errors of coefficients, where theory gives them. NumPy only.

Without a penalty, the estimate is that of maximum likelihood. Its covariance is the inverse of the information
``D' V D``: D has the model's columns and one of ones, and V is 1 / s² for least squares, with s² the squared residuals
over their degrees of freedom; p (1 - p) for two classes; and the expected count for counts.
"""

import dataclasses

import numpy as np

from paraxis.cli.fit._model import Model

_HOLDS = {
    "squared": "Standard errors hold if the model is right and the rows' errors are independent and of one variance.",
    "logistic": "Standard errors hold if the model is right, for independent rows, many more than columns.",
    "poisson": "Standard errors hold if the counts are Poisson's, for independent rows, many more than columns.",
}
_MOST_COLUMNS = 1000  # of a matrix that is inverted on the host
_LARGEST_CONDITION = 1e12


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
    model: Model, X: np.ndarray, y: np.ndarray, *, converged: bool, weighted: bool, filled: bool
) -> StandardErrors:
    """Return the standard errors of a model's coefficients.

    Args:
        model: the model.
        X: its columns of the rows that were fitted to, of mean 0 and standard deviation 1, ``(n, d)``.
        y: their targets, ``(n,)``.
        converged: whether it is a solution.
        weighted: whether rows had weights.
        filled: whether means stood for missing values.
    """
    why_none = {
        "a penalty draws coefficients to 0; write --penalty none": model.about["strength"] > 0,
        "those of more than two classes are determined but for a constant": len(model.coef) > 1,
        "weights have several meanings, and each has its own": weighted,
        "means stood for missing values; write --missing drop-rows": filled,
        "the solver stopped before the test for a solution was passed": not converged,
        f"there are more than {_MOST_COLUMNS} columns": X.shape[1] > _MOST_COLUMNS,
    }
    reason = next((reason for reason, holds in why_none.items() if holds), None)
    if reason is None:
        values = _values(model, X.astype(np.float64), y)
        if values is not None:
            return StandardErrors(values, _HOLDS[model.target.objective])
        reason = "some columns are determined by the others, as are all levels of a text"
    return StandardErrors(None, f"There are no standard errors: {reason}.")


def _values(model: Model, X: np.ndarray, y: np.ndarray) -> np.ndarray | None:
    """Return them, unless the columns do not determine the coefficients."""
    z = X @ model.coef[0] + model.intercept[0]
    D = np.column_stack([np.ones(len(X)), X])
    information = D.T @ (_precision(model.target.objective, z, y, D.shape[1])[:, None] * D)
    unit = np.sqrt(np.diag(information))
    if not np.all(np.isfinite(unit) & (unit > 0)):
        return None
    scaled = information / np.outer(unit, unit)
    if np.linalg.cond(scaled) > _LARGEST_CONDITION:
        return None
    covariance = np.linalg.inv(scaled) / np.outer(unit, unit)
    # To the columns' own units: the intercept there is the one here less the coefficients' means.
    change = np.diag(np.concatenate([[1], 1 / model.recipe.scales]))
    change[0, 1:] = -model.recipe.means / model.recipe.scales
    return np.sqrt(np.einsum("ij,jk,ik->i", change, covariance, change))


def _precision(objective: str, z: np.ndarray, y: np.ndarray, num_columns: int) -> np.ndarray:
    """Return that of each row's target, ``(n,)``."""
    if objective == "squared":
        variance = np.sum((y - z) ** 2) / (len(y) - num_columns)
        return np.full(len(y), 1 / variance if variance > 0 else np.inf)
    if objective == "poisson":
        return np.exp(z)
    odds = np.exp(-np.abs(z))
    return odds / (1 + odds) ** 2
