"""Penalised and bounded problems end where scikit-learn, SciPy and JAXopt end, on any devices and in any transform."""

import functools
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from sklearn.linear_model import ElasticNet, Lasso, MultiTaskLasso

import paraxis as px
from paraxis.solve import ProximalGradient, Status, objective, prox
from tests._support import axis_on
from tests.solve._problems import in_float64

RNG = np.random.default_rng(2)
NUM_ROWS, NUM_FEATURES = 60, 8
X = RNG.normal(size=(NUM_ROWS, NUM_FEATURES)) * np.logspace(0, -0.7, NUM_FEATURES)
TRUE = np.array([2.0, 0, -1, 0, 3, 0, 0, -2])
Y = X @ TRUE + 0.1 * RNG.normal(size=NUM_ROWS)
LABELS = (RNG.random(NUM_ROWS) < 1 / (1 + np.exp(-X @ TRUE))).astype(float)
START = np.zeros(NUM_FEATURES)


def _lasso(strength: float, weight: Any = None) -> np.ndarray:
    oracle = Lasso(alpha=strength, fit_intercept=False, tol=1e-14, max_iter=100000)
    return oracle.fit(X, Y, sample_weight=weight).coef_


def _half_mean_square(params: Any, data: Any) -> jax.Array:
    return 0.5 * jnp.mean((data[0] @ params - data[1]) ** 2)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("fun", [objective.least_squares, _half_mean_square])
@pytest.mark.parametrize("acceleration", [True, False])
@in_float64
def test_the_lasso_is_that_of_scikit_learn(fun: Callable[..., Any], acceleration: bool) -> None:
    solver = ProximalGradient(fun, prox.l1, tol=1e-10, maxiter=5000, acceleration=acceleration)
    params, state = solver.run(jnp.asarray(START), 0.05, (X, Y))
    assert state.status == Status.CONVERGED
    expected = _lasso(0.05)
    np.testing.assert_allclose(params, expected, atol=1e-8)
    np.testing.assert_array_equal(params == 0, expected == 0)
    np.testing.assert_allclose(state.value, 0.5 * np.mean((X @ params - Y) ** 2), rtol=1e-10)


@pytest.mark.slow
@in_float64
def test_the_elastic_net_with_an_intercept_is_that_of_scikit_learn() -> None:
    oracle = ElasticNet(alpha=0.1, l1_ratio=0.4, tol=1e-14, max_iter=100000).fit(X, Y + 5)
    solver = ProximalGradient(objective.glm("squared", intercept=True), prox.first(prox.elastic_net), tol=1e-10)
    (coef, bias), state = solver.run((jnp.asarray(START), jnp.array(0.0)), (0.04, 0.06), (X, Y + 5))
    assert state.status == Status.CONVERGED
    np.testing.assert_allclose(coef, oracle.coef_, atol=1e-8)
    np.testing.assert_allclose(bias, oracle.intercept_, atol=1e-8)


@in_float64
def test_the_group_lasso_is_that_of_scikit_learn() -> None:
    targets = np.stack([Y, X @ TRUE[::-1] + 0.1], 1)
    oracle = MultiTaskLasso(alpha=0.3, fit_intercept=False, tol=1e-14, max_iter=100000).fit(X, targets)
    # Theirs sums over the outputs, ours averages.
    solver = ProximalGradient(objective.least_squares, prox.group, tol=1e-10, maxiter=5000)
    params, _ = solver.run(jnp.zeros((NUM_FEATURES, 2)), 0.15, (X, targets))
    np.testing.assert_allclose(params, oracle.coef_.T, atol=1e-7)
    assert np.any(np.all(np.asarray(params) == 0, 1))


@pytest.mark.slow
@in_float64
def test_bounds_are_met_as_scipy_meets_them() -> None:
    bounded = ProximalGradient(objective.least_squares, prox.box, tol=1e-11, maxiter=5000)
    params, _ = bounded.run(jnp.asarray(START), (-0.5, 1.5), (X, Y))
    np.testing.assert_allclose(params, scipy.optimize.lsq_linear(X, Y, (-0.5, 1.5), tol=1e-14).x, atol=1e-7)
    positive = ProximalGradient(objective.least_squares, prox.non_negative, tol=1e-11, maxiter=5000)
    params, _ = positive.run(jnp.full(NUM_FEATURES, -3.0), None, (X, Y))
    np.testing.assert_allclose(params, scipy.optimize.nnls(X, Y)[0], atol=1e-7)


@pytest.mark.slow
@in_float64
def test_a_function_that_is_no_linear_model_is_bounded_as_by_l_bfgs_b() -> None:
    def rosenbrock(p: Any) -> Any:
        return (1 - p[0]) ** 2 + 100 * (p[1] - p[0] ** 2) ** 2

    params, state = ProximalGradient(rosenbrock, prox.box, tol=1e-9, maxiter=20000).run(
        jnp.array([-1.2, 1.0]), (jnp.array([-2.0, -2.0]), jnp.array([0.8, 2.0]))
    )
    options = {"ftol": 1e-15, "gtol": 1e-10}
    oracle = scipy.optimize.minimize(
        rosenbrock, [-1.2, 1.0], method="L-BFGS-B", bounds=[(-2, 0.8), (-2, 2)], options=options
    )
    assert state.status == Status.CONVERGED
    np.testing.assert_allclose(params, oracle.x, atol=1e-5)


@in_float64
def test_mixtures_on_the_simplex_are_those_of_scipy() -> None:
    params, state = ProximalGradient(_half_mean_square, prox.simplex, tol=1e-11, maxiter=5000).run(
        jnp.asarray(START), 1.0, (X, Y)
    )

    def fun(w: np.ndarray) -> float:
        return float(0.5 * np.mean((X @ w - Y) ** 2))

    rule = {"type": "eq", "fun": lambda w: w.sum() - 1}
    oracle = scipy.optimize.minimize(
        fun, np.full(NUM_FEATURES, 1 / NUM_FEATURES), method="SLSQP", bounds=[(0, None)] * NUM_FEATURES,
        constraints=[rule], options={"ftol": 1e-14, "maxiter": 1000},
    )  # fmt: skip
    assert state.status == Status.CONVERGED
    np.testing.assert_allclose(params, oracle.x, atol=1e-5)
    assert fun(np.asarray(params)) <= oracle.fun + 1e-10


@pytest.mark.slow
@in_float64
def test_it_ends_where_jaxopt_ends_on_classes() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import jaxopt
    labels = (np.argsort(X[:, :3], 1)[:, 0]).astype(int)
    start = jnp.zeros((NUM_FEATURES, 3))
    theirs = jaxopt.ProximalGradient(
        jaxopt.objective.multiclass_logreg, jaxopt.prox.prox_lasso, tol=1e-7, maxiter=3000
    ).run(start, 0.03, (X, labels))
    params, _ = ProximalGradient(objective.multiclass_logreg, prox.l1, tol=1e-9, maxiter=3000).run(
        start, 0.03, (X, labels)
    )
    np.testing.assert_allclose(params, theirs.params, atol=1e-4)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_devices", [1, 2, 3, 8])
@pytest.mark.parametrize("constraint", ["l1", "box"])
def test_rows_on_any_devices_lead_to_the_same_optimum(num_devices: int, constraint: str) -> None:
    weight = np.where(np.arange(NUM_ROWS) % 7 == 3, 0.0, 1.0)
    wrong = np.where(weight > 0, Y, 1e3)  # what has no weight does not count
    data = px.solve.rows(X.astype("float32"), wrong.astype("float32"), weight, axis=axis_on(num_devices, NUM_ROWS))
    hyper = 0.05 if constraint == "l1" else (jnp.full(NUM_FEATURES, -0.5), 1.5)
    solver = ProximalGradient(objective.least_squares, getattr(prox, constraint))
    params, state = solver.run(jnp.zeros(NUM_FEATURES), hyper, data)
    kept = weight > 0
    bounds = (-0.5, 1.5)
    oracle = _lasso(0.05, weight) if constraint == "l1" else scipy.optimize.lsq_linear(X[kept], Y[kept], bounds).x
    assert state.status == Status.CONVERGED
    np.testing.assert_allclose(params, oracle, atol=2e-4)


@pytest.mark.slow
@in_float64
def test_a_batch_of_strengths_is_solved_as_one_by_one() -> None:
    strengths = jnp.array([0.01, 0.05, 0.3, 10.0])
    solver = ProximalGradient(objective.least_squares, prox.l1, tol=1e-10, maxiter=2000)
    params, state = jax.jit(jax.vmap(lambda s: solver.run(jnp.asarray(START), s, (X, Y))))(strengths)
    for strength, found in zip(strengths, params, strict=True):
        np.testing.assert_allclose(found, _lasso(float(strength)), atol=1e-8)
    assert np.all(state.status == Status.CONVERGED)
    assert len(set(state.iter_num.tolist())) > 1


@pytest.mark.slow
@in_float64
def test_passes_over_the_data_are_those_that_are_counted() -> None:
    solver = ProximalGradient(objective.least_squares, prox.l1, tol=1e-10)
    _, state = solver.run(jnp.asarray(START), 0.05, (X, Y))
    refreshed = state.iter_num // 50  # predictions computed anew, of the velocity and of the last change
    confirmed = 2
    expected = 2 + state.iter_num + state.num_linesearch_iter + 2 * refreshed + confirmed
    assert state.data_passes == expected
    assert state.num_linesearch_iter <= 1.5 * state.iter_num
    fixed = ProximalGradient(objective.least_squares, prox.l1, tol=1e-10, stepsize=0.4, maxiter=5000)
    params, state = fixed.run(jnp.asarray(START), 0.05, (X, Y))
    assert state.data_passes == 2 + 2 * state.iter_num + 2 * (state.iter_num // 50) + confirmed
    np.testing.assert_allclose(params, _lasso(0.05), atol=1e-8)


def test_an_update_sums_over_the_devices_twice_and_gathers_nothing() -> None:
    data = px.solve.rows(X.astype("float32"), Y.astype("float32"), axis=axis_on(8, NUM_ROWS))
    solver = ProximalGradient(objective.least_squares, prox.l1)
    params = jnp.zeros(NUM_FEATURES)
    state = solver.init_state(params, 0.05, data)
    program = jax.jit(solver.update).lower(params, state, 0.05, data).compile().as_text() or ""
    assert len(re.findall(r" all-reduce(?:-start)?\(", program)) == 2
    assert "all-gather" not in program


@pytest.mark.slow
def test_float32_ends_at_the_solution_and_says_when_it_can_do_no_more() -> None:
    data = (jnp.asarray(X, "float32"), jnp.asarray(Y, "float32"))
    params, state = ProximalGradient(objective.least_squares, prox.l1, tol=2e-6).run(
        jnp.zeros(NUM_FEATURES), 0.05, data
    )
    assert state.status == Status.CONVERGED
    np.testing.assert_allclose(params, _lasso(0.05), atol=2e-5)
    # On this scale a step of the right size is lost in the parameters' rounding: no step is no proof of a solution.
    _, state = ProximalGradient(objective.least_squares, prox.l1, tol=1e-12, maxiter=5000).run(
        jnp.full(NUM_FEATURES, 0.1), 0.05, (1e3 * data[0], 1e3 * data[1])
    )
    assert state.status == Status.PRECISION


def _differences(solved: Callable[[float], np.ndarray], at: float) -> np.ndarray:
    return (solved(at * (1 + 1e-4)) - solved(at * (1 - 1e-4))) / (2e-4 * at)


@pytest.mark.slow
@in_float64
def test_the_lasso_has_the_derivative_of_scikit_learn_s_solutions() -> None:
    expected = _differences(_lasso, 0.05)

    def solved(strength: Any) -> Any:
        solver = ProximalGradient(objective.least_squares, prox.l1, tol=1e-11, maxiter=5000)
        return solver.run(jnp.asarray(START), strength, (X, Y)).params

    np.testing.assert_allclose(jax.jacfwd(solved)(0.05), expected, atol=1e-6)
    np.testing.assert_allclose(jax.jacrev(solved)(0.05), expected, atol=1e-6)


@pytest.mark.slow
@in_float64
def test_the_elastic_net_has_the_derivative_of_scikit_learn_s_solutions() -> None:
    def oracle(l1: float, l2: float) -> np.ndarray:
        alpha = l1 + l2
        net = ElasticNet(alpha=alpha, l1_ratio=l1 / alpha, fit_intercept=False, tol=1e-15, max_iter=10**6)
        return net.fit(X, Y).coef_

    def solved(hyper: Any) -> Any:
        solver = ProximalGradient(objective.least_squares, prox.elastic_net, tol=1e-11, maxiter=5000)
        return solver.run(jnp.asarray(START), hyper, (X, Y)).params

    by_l1, by_l2 = jax.jacrev(solved)((0.05, 0.1))
    np.testing.assert_allclose(by_l1, _differences(lambda s: oracle(s, 0.1), 0.05), atol=1e-5)
    np.testing.assert_allclose(by_l2, _differences(lambda s: oracle(0.05, s), 0.1), atol=1e-5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["group", "simplex", "box"])
@in_float64
def test_solutions_have_the_derivatives_of_finite_differences_by_data_and_hyperparameters(name: str) -> None:
    hyper = {"group": 0.4, "simplex": 1.5, "box": (-0.5, 1.5)}[name]
    solver = ProximalGradient(_half_mean_square, getattr(prox, name), tol=1e-12, maxiter=5000)
    weigh = jnp.arange(1.0, 1 + NUM_FEATURES)

    def solved(factor: Any) -> Any:
        scaled = jax.tree.map(lambda h: h * factor, hyper)
        return weigh @ solver.run(jnp.asarray(START), scaled, (X, Y * factor**2)).params

    run = jax.jit(jax.value_and_grad(solved))
    expected = (run(1 + 1e-4)[0] - run(1 - 1e-4)[0]) / 2e-4
    np.testing.assert_allclose(run(1.0)[1], expected, rtol=1e-6)


@pytest.mark.slow
def test_the_derivative_keeps_its_digits_in_float32_on_a_large_scale() -> None:
    def solved(strength: Any, dtype: str) -> Any:
        data = (jnp.asarray(100 * X, dtype), jnp.asarray(100 * Y, dtype))
        solver = ProximalGradient(objective.least_squares, prox.l1, tol=1e-2, maxiter=5000)
        return solver.run(jnp.zeros(NUM_FEATURES, dtype), strength, data).params

    expected = _differences(lambda s: _lasso(s / 1e4), 500.0)
    found = jax.jacrev(functools.partial(solved, dtype="float32"))(500.0)
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.slow
@in_float64
def test_what_function_and_operator_close_over_is_differentiated() -> None:
    def solved(strength: Any) -> Any:
        def fun(p: Any) -> jax.Array:
            return _half_mean_square(p, (X, Y * strength * 20))

        def operator(x: Any, hyper: Any, scaling: Any) -> Any:
            return prox.l1(x, strength, scaling)

        return jnp.sum(ProximalGradient(fun, operator, tol=1e-11, maxiter=5000).run(jnp.asarray(START)).params)

    expected = (solved(0.05 + 1e-6) - solved(0.05 - 1e-6)) / 2e-6
    np.testing.assert_allclose(jax.grad(solved)(0.05), expected, rtol=1e-5)


@pytest.mark.slow
@in_float64
def test_updates_one_by_one_are_the_run() -> None:
    solver = ProximalGradient(objective.least_squares, prox.l1, tol=1e-9)
    params, state = jnp.asarray(START), solver.init_state(jnp.asarray(START), 0.05, (X, Y))
    assert state.error == np.inf
    traces = []

    @jax.jit
    def update(params: Any, state: Any) -> Any:
        traces.append(1)
        return solver.update(params, state, 0.05, (X, Y))

    while state.status == Status.RUNNING:
        params, state = update(params, state)
    assert len(traces) == 1
    whole = solver.run(jnp.asarray(START), 0.05, (X, Y))
    assert state.iter_num == whole.state.iter_num
    np.testing.assert_allclose(params, whole.params, atol=1e-12)


def test_an_extrapolation_out_of_the_domain_is_taken_back() -> None:
    def fun(p: Any) -> jax.Array:
        return jnp.sum(p - 1e-3 * jnp.log(p))

    params, state = ProximalGradient(fun, prox.none, tol=1e-4, maxiter=2000).run(jnp.array([2.0, 5.0]))
    assert state.status == Status.CONVERGED
    np.testing.assert_allclose(params, [1e-3, 1e-3], rtol=1e-3)


def test_a_start_outside_the_domain_is_not_finite() -> None:
    _, state = ProximalGradient(lambda p: jnp.sum(jnp.log(p)), prox.box).run(jnp.array([-1.0]), (0.0, 1.0))
    assert state.status == Status.NOT_FINITE
    assert "not finite" in state.reason


def test_an_operator_that_changes_shapes_is_named() -> None:
    solver = ProximalGradient(_half_mean_square, lambda x, hyper, scaling: x[None])
    with pytest.raises(px.ShapeError, match=r"ProximalGradient\.run: prox must return the like of params.*\(8,\)"):
        solver.run(jnp.asarray(START, "float32"), None, (X, Y))


@pytest.mark.parametrize(
    ("operator", "hyper"),
    [
        (prox.box, (1.0, 0.0)),
        (prox.box, (np.zeros(8), np.r_[np.ones(7), -2])),
        (prox.box, (0.0, np.nan)),
        (prox.l1, -0.1),
        (prox.l1, np.nan),
        (prox.group, -2.0),
        (prox.elastic_net, (0.1, -1.0)),
        (prox.simplex, -1.0),
    ],
)
def test_hyperparameters_without_sense_are_refused(operator: prox.Prox, hyper: Any) -> None:
    start = jnp.zeros(8)
    for solver, params in (
        (ProximalGradient(lambda w: jnp.sum(w**2), operator), start),
        (ProximalGradient(lambda pair: jnp.sum(pair[0] ** 2), prox.first(operator)), (start, jnp.zeros(()))),
    ):
        with pytest.raises(px.DataError, match=r"ProximalGradient\.run: hyperparams_prox of prox\."):
            solver.run(params, hyper)


@pytest.mark.parametrize("operator", [prox.l1, prox.elastic_net, prox.group, prox.box, prox.first(prox.l1)])
def test_a_penalty_without_a_strength_is_refused(operator: prox.Prox) -> None:
    with pytest.raises(TypeError, match="needs hyperparams_prox"):
        ProximalGradient(lambda w: jnp.sum((w[0] - 1) ** 2), operator).run((jnp.zeros(8), jnp.zeros(())))


@pytest.mark.slow
def test_a_solution_in_float32_is_one_by_numpy_or_is_not_called_one() -> None:
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(400, 3)) * [1, 1e-1, 1e-2]).astype("float32")
    y = (x @ np.array([1.0, 10.0, 100.0]) + 0.1 * rng.normal(size=400)).astype("float32")
    wide = x.astype(float)
    for begin in (np.zeros(3), np.full(3, 1e3)):
        for tol in (1e-4, 1e-5):
            solver = px.solve.ProximalGradient(px.solve.objective.least_squares, prox.l1, tol=tol, maxiter=3000)
            w, state = solver.run(jnp.asarray(begin, "float32"), 1e-4, (jnp.asarray(x), jnp.asarray(y)))
            w = np.asarray(w, float)
            grad = wide.T @ (wide @ w - y) / 400
            moved = np.sign(w - grad) * np.maximum(np.abs(w - grad) - 1e-4, 0)
            if int(state.status) == Status.CONVERGED:
                assert np.linalg.norm(w - moved) <= 4 * tol, state.reason
            else:
                assert int(state.status) in (Status.PRECISION, Status.ITERATION_LIMIT), state.reason
