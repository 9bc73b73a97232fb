"""L-BFGS finds the minima that are known, by the steps that JAXopt takes; and keeps JAXopt's interface."""

import pickle
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from paraxis.solve import Status, objective
from tests._problems import CLASSICS, beale, in_float64, rosenbrock
from tests._support import assert_close


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CLASSICS)
@in_float64
def test_lbfgs_finds_the_minima_that_are_known(name: str) -> None:
    problem = CLASSICS[name]
    solver = px.solve.LBFGS(problem.fun, tol=1e-7, maxiter=1000)
    for start in problem.starts:
        params, state = solver.run(jnp.array(start, float))
        params = np.asarray(params)
        assert (int(state.status), int(state.iter_num) <= 400) == (Status.CONVERGED, True), f"from {start}: {state!r}"
        slope = [problem.fun(params + e).imag / 1e-30 for e in 1e-30j * np.eye(len(params))]  # by NumPy, and exact
        assert np.linalg.norm(slope) <= 1.1e-7, start
        # Around the minimum of Powell's function the curvature vanishes, so a small gradient leaves a larger value.
        assert float(problem.fun(params)) <= 1e-9, f"from {start}: {float(state.value)}"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("history", [1, 3, 10])
@in_float64
def test_lbfgs_with_a_fixed_step_iterates_as_jaxopt_s(history: int) -> None:
    def fun(x: Any) -> Any:
        return (np.array([1.0, 3.0, 0.2, 0.7]) * x**2).sum() + 0.1 * (x[0] - x[1] * x[2]) ** 2 + 0.05 * x[3] ** 4

    start = np.array([0.1, -0.1, 0.3, 0.2]) * (10 if history == 3 else 1)  # the gradient's norm above 1, and below
    solver = px.solve.LBFGS(fun, stepsize=0.3, history_size=history, tol=0.0)
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        import jaxopt
    rival = jaxopt.LBFGS(fun, stepsize=0.3, history_size=history, tol=0.0)
    params = other = jnp.array(start)
    state, other_state = jax.jit(solver.init_state)(params), rival.init_state(other)
    step, rival_step = jax.jit(solver.update), jax.jit(rival.update)
    for _ in range(12):
        params, state = step(params, state)
        other, other_state = rival_step(other, other_state)
        np.testing.assert_allclose(params, other, rtol=1e-9, atol=1e-12)
    assert (float(state.stepsize), int(state.num_fun_eval)) == (0.3, 13)


@pytest.mark.slow
@in_float64
def test_lbfgs_takes_arguments_aux_and_gradients_of_ones_own() -> None:
    def shifted(x: jax.Array, by: Any, *, scale: float) -> Any:
        return scale * beale(x - by)

    def with_aux(x: jax.Array, by: Any, *, scale: float) -> Any:
        return shifted(x, by, scale=scale), {"distance": x - by, "count": jnp.int32(3)}

    by, start = jnp.array([1.0, -2.0]), jnp.array([2.0, -1.0])
    plain, plain_end = px.solve.LBFGS(shifted, tol=1e-9).run(start, by, scale=2.0)
    np.testing.assert_allclose(plain, [4.0, -1.5], rtol=1e-8)
    choices: tuple[tuple[dict[str, Any], Any], ...] = (
        ({"has_aux": True}, with_aux),
        ({"value_and_grad": True}, jax.value_and_grad(shifted)),
        ({"value_and_grad": jax.value_and_grad(shifted)}, shifted),
        ({"value_and_grad": True, "has_aux": True}, jax.value_and_grad(with_aux, has_aux=True)),
    )
    for options, fun in choices:
        solver = px.solve.LBFGS(fun, tol=1e-9, **options)
        params, state = solver.run(start, by, scale=2.0)
        np.testing.assert_allclose(params, plain, rtol=1e-10)
        assert int(state.iter_num) == int(plain_end.iter_num)
        np.testing.assert_allclose(state.grad, np.zeros(2), atol=1e-9)
        if options.get("has_aux"):
            np.testing.assert_allclose(state.aux["distance"], params - by, rtol=1e-12)
            assert int(state.aux["count"]) == 3


@in_float64
def test_lbfgs_run_is_a_loop_of_updates() -> None:
    solver = px.solve.LBFGS(rosenbrock, tol=1e-8)
    params = jnp.array([-1.2, 1.0])
    expected, end = solver.run(params)
    state, update = solver.init_state(params), jax.jit(solver.update)
    while int(state.status) == Status.RUNNING:
        before = float(state.value)
        params, state = update(params, state)
        assert float(state.value) <= before
    assert int(state.iter_num) == int(end.iter_num)
    assert_close((params, state.value), (expected, end.value), rtol=1e-6, atol=1e-9)


def test_lbfgs_can_be_pickled_after_a_run() -> None:
    solver = px.solve.LBFGS(beale)
    found = solver.run(jnp.ones(2)).params
    assert_close(pickle.loads(pickle.dumps(solver)).run(jnp.ones(2)).params, found)


def test_lbfgs_forgets_a_step_of_negative_curvature() -> None:
    solver, params = px.solve.LBFGS(jnp.cos, stepsize=0.5, maxiter=4, tol=0), jnp.float32(0.3)
    state, update = jax.jit(solver.init_state)(params), jax.jit(solver.update)
    values = [float(state.value)]
    for _ in range(4):
        params, state = update(params, state)
        values.append(float(state.value))
    assert (np.diff(values) < 0).all()
    assert int(state.status) == px.solve.Status.ITERATION_LIMIT


ROWS, COLUMNS = 60, 12


def _deficient(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a rank below the number of columns, whose scales differ; of some, a column is zero or there twice."""
    rng = np.random.default_rng(seed)
    rank = int(rng.integers(1, COLUMNS))
    x = rng.normal(size=(ROWS, rank)) @ rng.normal(size=(rank, COLUMNS))
    x *= 10 ** rng.uniform(-0.5, 0.5, COLUMNS) if seed % 2 else 1
    if seed % 3 == 0:
        x[:, seed % COLUMNS] = 0
    if seed % 3 == 1:
        x[:, 0] = x[:, 1]
    return x, rng.normal(size=ROWS) + x @ rng.normal(size=COLUMNS)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("precondition", [None, "auto"])
def test_lbfgs_finds_the_smallest_of_all_solutions(precondition: Any) -> None:
    solver = px.solve.LBFGS(objective.least_squares, tol=1e-4, precondition=precondition)
    for seed in range(4):
        x, y = (a.astype("float32") for a in _deficient(seed))
        params, state = solver.run(jnp.zeros(COLUMNS), (x, y))
        expected = np.linalg.lstsq(x.astype(float), y.astype(float), rcond=1e-5)[0]
        assert abs(np.linalg.norm(params) / np.linalg.norm(expected) - 1) < 1e-3, f"seed {seed}: {state.reason}"
