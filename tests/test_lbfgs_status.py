"""A status is reached by what it says, and success is never claimed where NumPy finds none."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from paraxis.solve import Status
from tests._problems import CLASSICS
from tests._support import compilations


def test_lbfgs_gives_the_error_of_its_parameters_at_a_limit_of_iterations() -> None:
    """From far away, predictions that are added up step by step keep the rounding of the first ones."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((200, 10)).astype("float32")
    y = (X @ rng.standard_normal(10)).astype("float32")
    solver = px.solve.LBFGS(px.solve.objective.least_squares, tol=1e-30, maxiter=15)
    params, state = solver.run(jnp.full(10, 1e5, "float32"), px.solve.rows(X, y))
    assert (int(state.status), int(state.iter_num)) == (Status.ITERATION_LIMIT, 15)
    grad = X.T.astype("float64") @ (X @ np.asarray(params, "float64") - y) / len(X)
    np.testing.assert_allclose(float(state.error), np.linalg.norm(grad), rtol=0.1)


@pytest.mark.parametrize(("solver", "given"), [(px.solve.LBFGS, ()), (px.solve.ProximalGradient, (None,))])
def test_lbfgs_is_compiled_once_for_all_tolerances_and_limits_of_an_objective(solver: Any, given: Any) -> None:
    X = np.random.default_rng(0).standard_normal((40, 3)).astype("float32")
    data = X, X[:, 0] + X[:, 1] ** 2 > X[:, 2]

    def run(tol: float, maxiter: int) -> Any:
        return (
            solver(px.solve.objective.glm("logistic"), tol=tol, maxiter=maxiter).run(jnp.zeros(3), *given, data).state
        )

    run(1e-1, 100)
    with compilations() as compiled:
        states = [run(1e-3, 100), run(0, 3), run(0, 0)]
    limit = Status.ITERATION_LIMIT
    assert ([int(state.status) for state in states], compiled) == ([Status.CONVERGED, limit, limit], [])
    assert (float(states[0].error) <= 1e-3, *(int(state.iter_num) for state in states[1:])) == (True, 3, 0)


def test_lbfgs_fails_the_search_for_a_gradient_of_the_wrong_sign() -> None:
    def wrong(x: jax.Array) -> Any:
        return (x**2).sum(), -2 * x

    params, state = px.solve.LBFGS(wrong, value_and_grad=True).run(jnp.array([3.0, 1.0]))
    assert (int(state.status), bool(state.failed_linesearch)) == (Status.LINE_SEARCH_FAILED, True)
    np.testing.assert_array_equal([*params, state.value], [3, 1, 10])  # nothing worse is accepted


@pytest.mark.parametrize("solver", [px.solve.LBFGS, px.solve.ProximalGradient])
def test_lbfgs_takes_a_start_or_steps_out_of_the_domain_for_no_solution(solver: Any) -> None:
    """Where the value is not a number, its gradient may be zero."""

    def fun(p: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(p < 1, (p - 2) ** 2, jnp.nan))

    for start in (0.0, 2.0):  # outside, where no iteration is made
        _, state = solver(fun, stepsize=0.6, maxiter=20).run(jnp.array([start]))
        assert (int(state.status), int(state.iter_num) > 0) == (Status.NOT_FINITE, start == 0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["Wood", "condition 1e4"])
def test_lbfgs_claims_nothing_that_float32_cannot_do(name: str) -> None:
    problem = CLASSICS[name]
    solver = px.solve.LBFGS(problem.fun, tol=0.0, maxiter=2000)
    for start in problem.starts[:2]:
        _, state = solver.run(jnp.array(start, "float32"))
        where = f"{name} from {start}: {state.reason}, {int(state.iter_num)} iterations"
        assert int(state.status) == (Status.PRECISION if float(state.error) > 0 else Status.CONVERGED), where
        assert int(state.iter_num) <= 600, where
        assert float(state.value) <= 1e-4, where
