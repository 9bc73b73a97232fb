"""Numbers of 16 bits: solvers reach what NumPy finds of the same numbers in float64, and estimators take them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px

NARROW = [jnp.float16, jnp.bfloat16]
SOLVERS: dict[str, Callable[[Any], Any]] = {
    "LBFGS": px.solve.LBFGS,
    "LBFGS, gram": lambda fun: px.solve.LBFGS(fun, precondition="gram"),
    "LBFGS, no matrix": lambda fun: px.solve.LBFGS(fun, precondition=None),
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
