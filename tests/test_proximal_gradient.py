"""Penalised and bounded problems end where scikit-learn, SciPy and JAXopt end, on any devices and in any transform."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.linear_model import Lasso, MultiTaskLasso

import paraxis as px
from paraxis.solve import ProximalGradient, Status, objective, prox
from tests._problems import in_float64
from tests._support import at_night, axis_on

RNG = np.random.default_rng(2)
NUM_ROWS, NUM_FEATURES = 60, 8
X = RNG.normal(size=(NUM_ROWS, NUM_FEATURES)) * np.logspace(0, -0.7, NUM_FEATURES)
TRUE = np.array([2.0, 0, -1, 0, 3, 0, 0, -2])
Y = X @ TRUE + 0.1 * RNG.normal(size=NUM_ROWS)
LABELS = (RNG.random(NUM_ROWS) < 1 / (1 + np.exp(-X @ TRUE))).astype(float)
START = np.zeros(NUM_FEATURES)


def _half_mean_square(params: Any, data: Any) -> jax.Array:
    return 0.5 * jnp.mean((data[0] @ params - data[1]) ** 2)


VALUES: dict[str, tuple[Callable[..., Any], Any, Callable[[np.ndarray], Any]]] = {
    "l1": (prox.l1, 0.05, lambda w: 0.05 * np.abs(w).sum()),
    "box": (prox.box, (-0.5, 0.5), lambda w: 0.0),
    "group": (prox.group, np.full((NUM_FEATURES, 1), 0.1), lambda w: 0.1 * np.sqrt((w**2).sum(1)).sum()),
    "elastic net": (prox.elastic_net, (0.05, 0.3), lambda w: 0.05 * np.abs(w).sum() + 0.15 * (w**2).sum()),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", VALUES)
@in_float64
def test_proximal_gradient_tells_what_it_minimises_the_penalty_included(name: str) -> None:
    operator, hyper, penalty = VALUES[name]
    seen: list[px.solve.Iteration] = []
    targets = np.stack([Y, -Y], 1)
    solver = ProximalGradient(objective.glm("squared", intercept=True), operator, verbose=seen.append)
    free = jax.tree.map(lambda strength: (strength, 0.0), hyper)  # of the intercept
    (coef, bias), state = solver.run((jnp.zeros((NUM_FEATURES, 2)), jnp.ones(2)), free, (X, targets))
    expected = 0.5 * np.mean(np.sum((X @ coef + bias - targets) ** 2, 1)) + penalty(np.asarray(coef))
    np.testing.assert_allclose((seen[-1].value, state.value), expected, rtol=1e-9)
    assert seen[0].value > seen[-1].value


@pytest.mark.slow
@in_float64
def test_proximal_gradient_finds_the_group_lasso_of_scikit_learn() -> None:
    targets = np.stack([Y, X @ TRUE[::-1] + 0.1], 1)
    oracle = MultiTaskLasso(alpha=0.3, fit_intercept=False, tol=1e-14, max_iter=100000).fit(X, targets)
    solver = ProximalGradient(objective.least_squares, prox.group, tol=1e-10, maxiter=5000)
    params, _ = solver.run(jnp.zeros((NUM_FEATURES, 2)), 0.3, (X, targets))
    np.testing.assert_allclose(params, oracle.coef_.T, atol=1e-7)
    assert np.any(np.all(np.asarray(params) == 0, 1))


@pytest.mark.parametrize("num_devices", [8, *at_night([1, 3], 2)])
def test_proximal_gradient_finds_the_same_optimum_for_rows_on_any_devices(num_devices: int) -> None:
    weight = np.where(np.arange(NUM_ROWS) % 7 == 3, 0.0, 1.0)
    wrong = np.where(weight > 0, Y, 1e3)  # what has no weight does not count
    data = px.solve.rows(X.astype("float32"), wrong.astype("float32"), weight, axis=axis_on(num_devices, NUM_ROWS))
    params, state = ProximalGradient(objective.least_squares, prox.l1).run(jnp.zeros(NUM_FEATURES), 0.05, data)
    assert state.status == Status.CONVERGED
    oracle = Lasso(alpha=0.05, fit_intercept=False, tol=1e-14, max_iter=100000).fit(X, Y, sample_weight=weight)
    np.testing.assert_allclose(params, oracle.coef_, atol=2e-4)


def test_proximal_gradient_sums_twice_an_update_and_gathers_nothing() -> None:
    data = px.solve.rows(X.astype("float32"), Y.astype("float32"), axis=axis_on(8, NUM_ROWS))
    solver = ProximalGradient(objective.least_squares, prox.l1)
    params = jnp.zeros(NUM_FEATURES)
    state = solver.init_state(params, 0.05, data)
    program = jax.jit(solver.update).lower(params, state, 0.05, data).compile().as_text() or ""
    assert len(re.findall(r" all-reduce(?:-start)?\(", program)) == 2
    assert "all-gather" not in program


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["group", "box"])
@in_float64
def test_proximal_gradient_solutions_have_the_derivatives_of_finite_differences(name: str) -> None:
    hyper = {"group": 0.4, "box": (-0.5, 1.5)}[name]
    solver = ProximalGradient(_half_mean_square, getattr(prox, name), tol=1e-12, maxiter=5000)
    weigh = jnp.arange(1.0, 1 + NUM_FEATURES)

    def solved(factor: Any) -> Any:
        scaled = jax.tree.map(lambda h: h * factor, hyper)
        return weigh @ solver.run(jnp.asarray(START), scaled, (X, Y * factor**2)).params

    run = jax.jit(jax.value_and_grad(solved))
    expected = (run(1 + 1e-4)[0] - run(1 - 1e-4)[0]) / 2e-4
    np.testing.assert_allclose(run(1.0)[1], expected, rtol=1e-6)


@in_float64
def test_proximal_gradient_differentiates_what_function_and_operator_close_over() -> None:
    @jax.jit
    def solved(strength: Any) -> Any:
        def fun(p: Any) -> jax.Array:
            return _half_mean_square(p, (X, Y * strength * 20))

        def operator(x: Any, hyper: Any, scaling: Any) -> Any:
            return prox.l1(x, strength, scaling)

        return jnp.sum(ProximalGradient(fun, operator, tol=1e-11, maxiter=5000).run(jnp.asarray(START)).params)

    expected = (solved(0.05 + 1e-6) - solved(0.05 - 1e-6)) / 2e-6
    np.testing.assert_allclose(jax.grad(solved)(0.05), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("operator", "hyper"),
    [*((one, None) for one in (prox.l1, prox.group, prox.box)), (prox.box, (1.0, -2.0)), (prox.l1, np.nan)],
)
def test_proximal_gradient_refuses_hyperparameters_without_sense(operator: Callable[..., Any], hyper: Any) -> None:
    with pytest.raises((px.DataError, TypeError), match=r"ProximalGradient\.run: hyperparams_prox of prox\."):
        ProximalGradient(lambda w: jnp.sum(w**2), operator).run(jnp.zeros(8), hyper)
