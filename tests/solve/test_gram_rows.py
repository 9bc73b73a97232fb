"""No public face: which rows tell a solver's matrix shows in its speed only. NumPy computes the Hessian of all rows."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from paraxis.solve import _gram
from tests._support import axis_on

NUM_ROWS, WIDTH = 5000, 512


def _hard(near: int, far: float) -> tuple[Any, np.ndarray, np.ndarray]:
    """Return coefficients, rows of which every ``near``-th is hard to tell, the others ``far`` away, and weights."""
    rng = np.random.default_rng(0)
    w = rng.standard_normal(WIDTH)
    z = np.where(np.arange(NUM_ROWS) % near == 0, 0.1, far) * rng.choice([-1, 1], NUM_ROWS)
    X = rng.standard_normal((NUM_ROWS, WIDTH))
    X += np.outer(z - X @ w, w) / (w @ w)
    return w, X, rng.uniform(0.5, 2, NUM_ROWS) * (np.arange(NUM_ROWS) % 50 > 0)


def _parts(w: np.ndarray, X: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return how much each row adds to the Hessian of a logistic model, for each square of what it holds."""
    chance = 1 / (1 + np.exp(-X @ w))
    return weight / weight.sum() * chance * (1 - chance)


@pytest.mark.parametrize("devices", [1, 8])
def test_few_rows_with_most_curvature_stand_for_all(devices: int) -> None:
    w, X, weight = _hard(near=6, far=6.0)
    parts = _parts(w, X, weight)
    axis = axis_on(devices, NUM_ROWS)
    data = px.solve.rows(X.astype(np.float32), (X @ w > 0).astype(np.int32), weight.astype(np.float32), axis=axis)
    problem = px.solve.objective.glm("logistic", l2=True).problem(jnp.asarray(w, jnp.float32), 1e-3, data)
    given = problem.design, problem.targets, problem.weight, jnp.asarray(w, jnp.float32)
    numbers, _ = _gram._chosen(problem.loss, problem.intercept, _gram._used(problem), *given)

    assert len(numbers) == 2 * WIDTH
    assert (np.diff(numbers) > 0).all()
    assert np.argmax(parts) in numbers
    assert parts[numbers].min() >= np.delete(parts, numbers).max() * (1 - 1e-4)

    hessian = (X * parts[:, None]).T @ X + 1e-3 * np.eye(WIDTH)
    root = np.linalg.cholesky(hessian)
    stretched = np.linalg.eigvalsh(root.T @ np.asarray(_gram.prepared(problem, given[-1]), np.float64) @ root)
    assert stretched.min() > 0.6  # all 1, were it the inverse of the Hessian
    assert stretched.max() < 1.6


@pytest.mark.parametrize(
    ("loss", "times"),
    [("logistic", 1), ("logistic", np.nan), ("logistic", 1e4), ("poisson", 1e4)],
    ids=["all alike", "not a number", "zero", "infinite"],
)
def test_where_curvature_tells_nothing_no_row_is_chosen_by_it(loss: Any, times: float) -> None:
    w, X, _ = _hard(near=1, far=0.1)
    data = px.solve.rows(X.astype(np.float32), (X @ w > 0).astype(np.int32))
    params = jnp.asarray(times * w, jnp.float32)
    problem = px.solve.objective.glm(loss).problem(params, data)
    given = problem.design, problem.targets, problem.weight, params
    numbers, scale = _gram._chosen(problem.loss, problem.intercept, _gram._used(problem), *given)
    np.testing.assert_array_equal(numbers, np.arange(NUM_ROWS))
    assert scale == 1
