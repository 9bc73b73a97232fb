"""Numbers of 16 bits: solvers reach what NumPy finds of the same numbers in float64, and estimators take them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.linear_model

import paraxis as px

NARROW = [jnp.float16, jnp.bfloat16]
SOLVERS: dict[str, Callable[[Any], Any]] = {
    "LBFGS": px.solve.LBFGS,
    "LBFGS, gram": lambda fun: px.solve.LBFGS(fun, precondition="gram"),
    "LBFGS, no matrix": lambda fun: px.solve.LBFGS(fun, precondition=None),
    "NewtonCG": px.solve.NewtonCG,
    "GradientDescent": px.solve.GradientDescent,
}


def _draw(dtype: Any) -> tuple[jax.Array, jax.Array, np.ndarray]:
    """Return rows and targets, and the coefficients that minimise the mean of half the squares, and 1e-2 of theirs."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((300, 20))
    X, y = jnp.asarray(X, dtype), jnp.asarray(X @ rng.standard_normal(20) + 0.1 * rng.standard_normal(300), dtype)
    rows, targets = np.asarray(X, np.float64), np.asarray(y, np.float64)
    return X, y, np.linalg.solve(rows.T @ rows / 300 + 1e-2 * np.eye(20), rows.T @ targets / 300)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("linear", [True, False], ids=["linear", "a function"])
def test_solvers_reach_numpys_solution_as_far_as_16_bits_tell(solver: str, dtype: Any, linear: bool) -> None:
    X, y, expected = _draw(dtype)

    def ridge(coef: jax.Array, l2: float, data: Any) -> jax.Array:
        X, y = data
        return 0.5 * jnp.mean((X @ coef - y) ** 2) + 0.5 * l2 * jnp.sum(coef**2)

    fun = px.solve.objective.ridge if linear else ridge
    params, state = SOLVERS[solver](fun).run(jnp.zeros(20, dtype), 1e-2, (X, y))
    assert params.dtype == dtype
    assert "not finite" not in state.reason
    # The function's value has eps relative accuracy: where it is level, the square root of that is what tells apart.
    assert np.abs(np.asarray(params, np.float64) - expected).max() < 2 * float(jnp.finfo(dtype).eps) ** 0.5


@pytest.mark.parametrize("what", ["fit y", "fit X", "sample_weight", "predict", "score"])
@pytest.mark.parametrize("name", ["Ridge", "Lasso", "LogisticRegression", "PoissonRegressor"])
def test_estimators_take_bfloat16_for_whatever_holds_numbers(name: str, what: str) -> None:
    X, y, _ = _draw(jnp.bfloat16)
    y = {"LogisticRegression": y > 0, "PoissonRegressor": jnp.round(jnp.abs(y))}.get(name, y).astype(jnp.bfloat16)
    weight = jnp.asarray(np.random.default_rng(1).integers(1, 4, 300), jnp.bfloat16)
    wide = {"X": np.asarray(X, np.float64), "y": np.asarray(y, np.float64), "weight": np.asarray(weight, np.float64)}
    given = {"fit y": {"y": y}, "fit X": {"X": X}, "sample_weight": {"weight": weight}}.get(what, {})
    theirs: Any = getattr(sklearn.linear_model, name)()
    if name == "PoissonRegressor":
        theirs.max_iter = 1000
    theirs.fit(wide["X"], wide["y"], sample_weight=wide["weight"])
    ours = getattr(px.solve, name)()
    found = {**wide, **given}
    ours.fit(found["X"], found["y"], sample_weight=found["weight"])
    np.testing.assert_allclose(np.ravel(ours.coef_), np.ravel(theirs.coef_), atol=1e-2)
    if what == "predict":
        np.testing.assert_allclose(ours.predict(X), theirs.predict(wide["X"]), rtol=2e-2, atol=2e-2)
    if what == "score":
        assert ours.score(X, y) == pytest.approx(theirs.score(wide["X"], wide["y"]), abs=1e-3)


def test_classes_may_be_int4() -> None:
    X, y, _ = _draw(jnp.float16)
    labels = np.asarray(y > 0).astype(int) * 3
    model = px.solve.LogisticRegression().fit(X, jnp.asarray(labels, jnp.int4))
    np.testing.assert_array_equal(model.classes_, [0, 3])
    assert model.score(X, jnp.asarray(labels, jnp.int4)) == np.mean(model.predict(X) == labels)
