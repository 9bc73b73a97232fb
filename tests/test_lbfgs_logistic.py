"""Logistic regressions against scikit-learn's Newton solver, on real digits and on data that are hard in some way."""

import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.datasets
import sklearn.linear_model

import paraxis as px
from paraxis.solve import Status, objective
from tests._problems import labelled, softmax

pytestmark = pytest.mark.floor


def _objective(coef: np.ndarray, bias: np.ndarray, x: np.ndarray, y: np.ndarray, l2: float) -> float:
    """The mean loss and the penalty, by NumPy in float64."""
    z = x @ coef + bias
    if coef.ndim == 1:
        z = np.stack([np.zeros_like(z), z], 1)
    return float(-np.log(softmax(z)[np.arange(len(y)), y]).mean() + 0.5 * l2 * (coef**2).sum())


def _hard(name: str) -> tuple[np.ndarray, np.ndarray, float]:
    """Rows, classes of three, and l2."""
    rng = np.random.default_rng(7)
    x, y = labelled(*((12, 40, 3) if name == "n < d" else (150, 6, 3)))
    if name.startswith("collinear"):
        x = np.concatenate([x, x[:, :2], x @ rng.normal(size=(6, 2)), -x[:, :1]], 1)
    if name.startswith("badly scaled"):
        x = x * np.logspace(-3, 3, 6)
    if name == "near separable":
        y = (x @ rng.normal(size=(6, 3)) + 0.02 * rng.gumbel(size=(150, 3))).argmax(1)
    if name == "one class":
        y = np.full(150, 1)
    if name == "a constant column":
        x[:, 2] = 7
    if name == "a column of zeros":
        x[:, 2] = 0
    if name == "far from zero":
        x = x + 100
    return x, y.astype(np.int32), 0.0 if name.endswith("without l2") else 1e-3


HARD = (
    "collinear", "collinear without l2", "badly scaled", "badly scaled without l2", "n < d", "near separable",
    "one class", "a constant column", "a column of zeros", "far from zero",
)  # fmt: skip


def _optimum(x: np.ndarray, y: np.ndarray, l2: float) -> float:
    """By scikit-learn in float64, which says of collinear columns that it falls back to another solver."""
    options: Any = {"solver": "newton-cholesky", "tol": 1e-12, "max_iter": 10000}
    with warnings.catch_warnings(action="ignore"):
        model = sklearn.linear_model.LogisticRegression(C=1 / (l2 * len(x)) if l2 else np.inf, **options).fit(x, y)
    return _objective(model.coef_.T, model.intercept_, x, y, l2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("precondition", [None, "auto"])
@pytest.mark.parametrize("name", HARD)
def test_lbfgs_solves_hard_logistic_data_in_float32_or_says_that_it_did_not(name: str, precondition: Any) -> None:
    x, y, l2 = _hard(name)
    fun = objective.l2_multiclass_logreg_with_intercept
    solver = px.solve.LBFGS(fun, tol=1e-5, maxiter=3000, precondition=precondition)
    data = jnp.asarray(x, "float32"), jnp.asarray(y)
    (coef, bias), state = solver.run(fun.init(x.shape[1], 3), l2, data)
    coef, bias = np.asarray(coef, float), np.asarray(bias, float)
    assert np.all(np.isfinite([*coef, bias]))
    assert int(state.status) in (Status.CONVERGED, Status.PRECISION, Status.ITERATION_LIMIT), state.reason
    wide = np.asarray(data[0], float)
    residual = softmax(wide @ coef + bias) - np.eye(3)[y]
    true = np.linalg.norm(np.concatenate([wide.T @ residual / len(y) + l2 * coef, residual.mean(0)[None]]))
    if int(state.status) == Status.CONVERGED:
        assert true <= 4e-5, f"converged, but the gradient is {true}"
    elif name != "one class":
        # Without a preconditioner, a condition of 1e4 and more is more than ten steps of memory can undo.
        missed = 5e-2 if precondition is None and name.startswith(("badly scaled", "far from zero")) else 1e-4
        assert _objective(coef, bias, x, y, l2) <= _optimum(x, y, l2) * (1 + missed), state.reason
