"""Gradient descent reaches the minima that SciPy and JAXopt reach, and its steps are those of the textbook."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

import paraxis as px
from paraxis.solve import GradientDescent, Status, objective
from tests._support import at_night, axis_on
from tests.solve._problems import in_float64

RNG = np.random.default_rng(1)
X = RNG.normal(size=(60, 5)) * np.logspace(0, -1, 5)
LABELS = (RNG.random(60) < 1 / (1 + np.exp(-X @ np.arange(5.0)))).astype(float)


def _logistic(w: Any, l2: Any, X: Any, y: Any, np: Any = jnp) -> Any:
    z = X @ w
    return np.mean(np.logaddexp(0, z) - y * z) + 0.5 * l2 * np.sum(w**2)


def _minimum(l2: float) -> np.ndarray:
    return scipy.optimize.root(_slope, np.zeros(5), args=(l2,), tol=1e-14).x


def _slope(w: np.ndarray, l2: float) -> np.ndarray:
    return X.T @ (1 / (1 + np.exp(-X @ w)) - LABELS) / len(X) + l2 * w


@pytest.mark.sampled(1)
@pytest.mark.parametrize("acceleration", [True, False])
@in_float64
def test_it_finds_the_minimum_that_scipy_finds(acceleration: bool) -> None:
    solver = GradientDescent(_logistic, acceleration=acceleration, tol=1e-8, maxiter=5000)
    params, state = solver.run(jnp.zeros(5), 0.05, X, LABELS)
    assert state.status == Status.CONVERGED
    assert state.error <= 1e-8
    np.testing.assert_allclose(params, _minimum(0.05), atol=1e-6)
    np.testing.assert_allclose(state.value, _logistic(np.asarray(params), 0.05, X, LABELS, np), rtol=1e-12)


@pytest.mark.slow
@in_float64
def test_a_linear_model_reads_its_data_less_often_and_ends_at_the_same_minimum() -> None:
    fun = objective.glm("logistic", l2=True)
    params, state = GradientDescent(fun, tol=1e-8).run(jnp.zeros(5), 0.05, (X, LABELS))
    _, plain = GradientDescent(_logistic, tol=1e-8).run(jnp.zeros(5), 0.05, X, LABELS)
    np.testing.assert_allclose(params, _minimum(0.05), atol=1e-6)
    confirmed = 2
    assert state.data_passes == 2 + state.iter_num + state.num_linesearch_iter + confirmed
    assert state.data_passes < plain.data_passes


@pytest.mark.sampled(1)
@in_float64
def test_fixed_steps_are_those_of_the_textbook() -> None:
    solver = GradientDescent(_logistic, stepsize=0.7, acceleration=False, maxiter=3, tol=1e-12)
    state, update = jax.jit(solver.init_state)(jnp.zeros(5), 0.05, X, LABELS), jax.jit(solver.update)
    params, expected = jnp.zeros(5), np.zeros(5)
    for _ in range(3):
        params, state = update(params, state, 0.05, X, LABELS)
        slope = _slope(expected, 0.05)
        expected = expected - 0.7 * slope
        np.testing.assert_allclose(state.error, np.linalg.norm(slope), rtol=1e-10)
        np.testing.assert_allclose(params, expected, rtol=1e-10)
    assert state.status == Status.ITERATION_LIMIT
    assert state.iter_num == 3


@in_float64
def test_accelerated_fixed_steps_are_those_of_jaxopt() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import jaxopt
    theirs = jaxopt.GradientDescent(_logistic, stepsize=0.7, maxiter=4, tol=0)
    ours = GradientDescent(_logistic, stepsize=0.7, maxiter=4, tol=1e-12)
    start = jnp.zeros(5)
    expected, state = start, theirs.init_state(start, 0.05, X, LABELS)
    params, own, update = start, jax.jit(ours.init_state)(start, 0.05, X, LABELS), jax.jit(ours.update)
    for _ in range(4):
        expected, state = theirs.update(expected, state, 0.05, X, LABELS)
        params, own = update(params, own, 0.05, X, LABELS)
        np.testing.assert_allclose(params, expected, rtol=1e-10)
        np.testing.assert_allclose(own.velocity, state.velocity, rtol=1e-10)


@pytest.mark.slow
@in_float64
def test_the_solution_has_the_derivative_of_finite_differences() -> None:
    def solved(l2: Any) -> Any:
        return GradientDescent(_logistic, tol=1e-11, maxiter=5000).run(jnp.zeros(5), l2, X, LABELS).params

    expected = (_minimum(0.05 + 1e-4) - _minimum(0.05 - 1e-4)) / 2e-4
    np.testing.assert_allclose(jax.jacrev(solved)(0.05), expected, rtol=1e-4)
    np.testing.assert_allclose(jax.jacfwd(solved)(0.05), expected, rtol=1e-4)


def test_trees_aux_and_gradients_that_come_along() -> None:
    def fun(params: Any, target: Any) -> Any:
        value = (params["a"] - target) ** 2 + jnp.sum((params["b"] + 1) ** 2)
        return (value, {"twice": 2 * params["a"]}), {"a": 2 * (params["a"] - target), "b": 2 * (params["b"] + 1)}

    start = {"a": jnp.array(0.0), "b": jnp.zeros(2)}
    params, state = GradientDescent(fun, True, True).run(start, 3.0)
    np.testing.assert_allclose(params["a"], 3, atol=1e-4)
    np.testing.assert_allclose(params["b"], [-1, -1], atol=1e-4)
    np.testing.assert_allclose(state.aux["twice"], 2 * params["a"])


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [8, *at_night([1, 3], 2)])
def test_rows_on_any_devices_lead_to_the_same_minimum(num_devices: int) -> None:
    data = px.solve.rows(X.astype("float32"), LABELS.astype("float32"), axis=axis_on(num_devices, len(X)))
    params, state = GradientDescent(objective.glm("logistic", l2=True)).run(jnp.zeros(5), 0.05, data)
    assert state.status == Status.CONVERGED
    np.testing.assert_allclose(params, _minimum(0.05), atol=1e-3)


@pytest.mark.slow
def test_what_diverges_is_said_to_be_not_finite_and_what_cannot_descend_to_have_failed() -> None:
    _, state = GradientDescent(lambda p: jnp.sum(p**4), stepsize=10.0).run(jnp.ones(2))
    assert state.status == Status.NOT_FINITE
    wrong = GradientDescent(lambda p: (jnp.where(jnp.all(p == 0), 0.0, 1.0), jnp.ones_like(p)), True)
    params, state = wrong.run(jnp.zeros(2))
    assert state.status == Status.LINE_SEARCH_FAILED
    np.testing.assert_array_equal(params, [0, 0])
    uphill = GradientDescent(lambda p: (jnp.sum((p - 1) ** 2), -2 * (p - 1)), True)
    assert uphill.run(jnp.zeros(2)).state.status != Status.CONVERGED


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stepsize": -1.0}, r"GradientDescent: stepsize .*got -1\.0; write 0\.0"),
        ({"maxiter": 0}, r"GradientDescent: maxiter must be positive, got 0"),
        ({"decrease_factor": 1.5}, r"GradientDescent: decrease_factor .*got 1\.5; write 0\.5"),
    ],
)
def test_options_that_cannot_be_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GradientDescent(_logistic, **options)


def test_integers_are_no_parameters() -> None:
    with pytest.raises(
        px.ShapeError, match=r"GradientDescent\.run: init_params must be of a floating dtype.*jnp\.zeros"
    ):
        GradientDescent(lambda p: jnp.sum(p**2)).run(jnp.arange(3))
