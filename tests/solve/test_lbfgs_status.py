"""A status is reached by what it says, and success is never claimed where NumPy finds none."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from paraxis.solve import Status
from tests.solve._problems import CLASSICS, in_float64, labelled, rosenbrock, softmax

START = jnp.array([-1.2, 1.0], "float32")


@pytest.mark.sampled(1)
def test_converged_means_that_the_gradient_is_small() -> None:
    params, state = px.solve.LBFGS(rosenbrock, tol=1e-3).run(START)
    assert int(state.status) == Status.CONVERGED
    assert float(state.error) <= 1e-3
    a, b = np.asarray(params, "float64")
    slope = [-2 * (1 - a) - 400 * a * (b - a**2), 200 * (b - a**2)]
    assert np.linalg.norm(slope) <= 1.1e-3
    assert state.reason == "the error is as small as tol asks"


def test_a_start_at_the_minimum_is_a_solution_without_an_iteration() -> None:
    params, state = px.solve.LBFGS(rosenbrock).run(jnp.ones(2))
    assert (int(state.status), int(state.iter_num), int(state.num_fun_eval)) == (Status.CONVERGED, 0, 1)
    np.testing.assert_array_equal(params, [1, 1])


def test_a_limit_of_iterations_is_kept() -> None:
    for limit in (1, 5):
        _, state = px.solve.LBFGS(rosenbrock, maxiter=limit, tol=1e-6).run(START)
        assert (int(state.status), int(state.iter_num)) == (Status.ITERATION_LIMIT, limit)
        assert "limit of iterations" in state.reason
        assert float(state.error) > 1e-6


def test_the_error_at_a_limit_of_iterations_is_that_of_the_parameters() -> None:
    """From far away, predictions that are added up step by step keep the rounding of the first ones."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((200, 10)).astype("float32")
    y = (X @ rng.standard_normal(10)).astype("float32")
    solver = px.solve.LBFGS(px.solve.objective.least_squares, tol=1e-30, maxiter=15)
    params, state = solver.run(jnp.full(10, 1e5, "float32"), px.solve.rows(X, y))
    assert (int(state.status), int(state.iter_num)) == (Status.ITERATION_LIMIT, 15)
    grad = X.T.astype("float64") @ (X @ np.asarray(params, "float64") - y) / len(X)
    np.testing.assert_allclose(float(state.error), np.linalg.norm(grad), rtol=0.1)


def test_a_solution_in_the_last_iteration_is_a_solution() -> None:
    solver = px.solve.LBFGS(rosenbrock, tol=1e-3)
    count = int(solver.run(START).state.iter_num)
    _, state = px.solve.LBFGS(rosenbrock, tol=1e-3, maxiter=count).run(START)
    assert (int(state.status), int(state.iter_num)) == (Status.CONVERGED, count)


def test_a_gradient_of_the_wrong_sign_fails_the_search() -> None:
    def wrong(x: jax.Array) -> Any:
        return (x**2).sum(), -2 * x

    params, state = px.solve.LBFGS(wrong, value_and_grad=True).run(jnp.array([3.0, 1.0]))
    assert int(state.status) == Status.LINE_SEARCH_FAILED
    assert bool(state.failed_linesearch)
    assert "is the gradient the derivative of the value?" in state.reason
    np.testing.assert_array_equal(params, [3, 1])  # nothing worse is accepted
    assert float(state.value) == 10


@pytest.mark.sampled(1)
def test_a_gradient_with_a_wrong_part_is_not_a_solution() -> None:
    def wrong(x: jax.Array) -> Any:
        return ((x - 1) ** 2).sum(), 2 * (x - 1) * jnp.array([1.0, -1.0])

    _, state = px.solve.LBFGS(wrong, value_and_grad=True, maxiter=100).run(jnp.array([3.0, 4.0]))
    assert int(state.status) in (Status.LINE_SEARCH_FAILED, Status.PRECISION, Status.ITERATION_LIMIT)
    assert float(state.value) <= 13


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("fun", "start"),
    [
        (lambda x: jnp.log(x).sum(), [-1.0]),
        (lambda x: 1 / (x**2).sum(), [0.0]),
        (lambda x: jnp.sqrt(jnp.abs(x)).sum() * jnp.inf, [1.0]),
    ],
    ids=["NaN", "inf", "inf times"],
)
def test_a_start_that_is_not_finite_is_said(fun: Any, start: list[float]) -> None:
    _, state = px.solve.LBFGS(fun).run(jnp.array(start))
    assert (int(state.status), int(state.iter_num)) == (Status.NOT_FINITE, 0)
    assert "not finite" in state.reason


def test_a_gradient_that_is_not_finite_at_a_finite_value_is_said() -> None:
    _, state = px.solve.LBFGS(lambda x: jnp.sqrt(x).sum()).run(jnp.zeros(2))
    assert int(state.status) == Status.NOT_FINITE


@pytest.mark.parametrize("solver", [px.solve.LBFGS, px.solve.ProximalGradient])
def test_fixed_steps_out_of_the_domain_are_no_solution(solver: Any) -> None:
    """Where the value is not a number, its gradient may be zero."""

    def fun(p: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(p < 1, (p - 2) ** 2, jnp.nan))

    _, state = solver(fun, stepsize=0.6, maxiter=20).run(jnp.zeros(1))
    assert int(state.status) == Status.NOT_FINITE


def test_fixed_steps_that_diverge_are_said() -> None:
    def fun(x: jax.Array) -> jax.Array:
        return (x**4).sum()

    _, state = px.solve.LBFGS(fun, stepsize=50.0).run(jnp.array([30.0, -20.0]))
    assert int(state.status) == Status.NOT_FINITE


@pytest.mark.slow
@pytest.mark.sampled(1)
def test_no_minimum_is_no_success() -> None:
    for fun in (lambda x: x.sum(), lambda x: -(x**2).sum(), lambda x: jnp.exp(x).sum() - 2 * x.sum() ** 3):
        _, state = px.solve.LBFGS(fun, maxiter=60).run(jnp.array([1.0, 2.0]))
        assert int(state.status) not in (Status.CONVERGED, Status.RUNNING)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["Wood", "condition 1e4"])
def test_what_float32_cannot_do_is_not_claimed(name: str) -> None:
    problem = CLASSICS[name]
    solver = px.solve.LBFGS(problem.fun, tol=0.0, maxiter=2000)
    for start in problem.starts[:2]:
        _, state = solver.run(jnp.array(start, "float32"))
        where = f"{name} from {start}: {state.reason}, {int(state.iter_num)} iterations"
        assert int(state.status) == (Status.PRECISION if float(state.error) > 0 else Status.CONVERGED), where
        assert int(state.iter_num) <= 600, where
        lowest = min(problem.minima)
        assert float(state.value) <= max(problem.minima) + 1e-4 * max(1, abs(lowest)), where


def _float64_gradient(w: np.ndarray, x: np.ndarray, y: np.ndarray, l2: float) -> np.ndarray:
    p = softmax(x @ w)
    p[np.arange(len(y)), y] -= 1
    return x.T @ p / len(y) + l2 * w


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("precondition", [None, "auto"])
@pytest.mark.parametrize("spread", [0.0, 1.5], ids=["one scale", "many scales"])
def test_near_convergence_in_float32_success_is_true(spread: float, precondition: Any) -> None:
    x, y = labelled(300, 12, 3)
    scales = 10 ** np.random.default_rng(1).uniform(-spread, spread, 12)
    data = jnp.asarray(x * scales, "float32"), jnp.asarray(y)
    wide = np.asarray(data[0], "float64")
    for tol in (1e-4, 1e-6, 1e-7):
        solver = px.solve.LBFGS(
            px.solve.objective.l2_multiclass_logreg, tol=tol, maxiter=4000, precondition=precondition
        )
        params, state = solver.run(jnp.zeros((12, 3)), 1e-3, data)
        true = np.linalg.norm(_float64_gradient(np.asarray(params, "float64"), wide, y, 1e-3))
        where = f"tol {tol}, {state.reason}, {int(state.iter_num)} iterations, gradient {true}"
        if int(state.status) == Status.CONVERGED:
            assert true <= 4 * tol, where
        else:
            assert int(state.status) == Status.PRECISION, where
            assert tol <= 1e-7 * scales.max(), where
            assert true <= 1e-6 * scales.max(), where
        assert int(state.iter_num) <= (100 if precondition or not spread else 3500), where


@pytest.mark.slow
@in_float64
def test_a_status_is_of_each_problem_of_a_batch() -> None:
    def fun(x: jax.Array, sign: jax.Array) -> jax.Array:
        return jnp.log(sign) * 0 + ((x - 1) ** 2).sum()

    solver = px.solve.LBFGS(fun, maxiter=50)
    state = jax.vmap(solver.run)(jnp.array([[3.0], [1.0], [3.0]]), jnp.array([1.0, 1.0, -1.0])).state
    assert state.status.tolist() == [Status.CONVERGED, Status.CONVERGED, Status.NOT_FINITE]


def test_every_status_has_words() -> None:
    assert len({status.words for status in Status}) == len(Status)
    assert px.solve.LBFGS(rosenbrock).init_state(START).reason == "the solver has not stopped"
