"""Newton's method finds what SciPy and scikit-learn find, and reads the data and communicates as little as it says."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
import sklearn.linear_model
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import paraxis as px
from paraxis.solve import Status, objective
from tests._support import axis_on
from tests.solve._problems import CLASSICS, in_float64, labelled, off_the_minima, rosenbrock
from tests.solve.test_estimators import CASES, WEIGHT, X, assert_same_fit, new, on

# Around the minimum of Powell's singular function the curvature vanishes, so a small gradient leaves a larger value.
NEAR = 1e-9
# From here a Newton method cut short creeps along the valley, for thousands of iterations; so does SciPy's.
CREEPS = (-4, 10)
L2 = 1e-2
SMOOTH = [name for name in CASES if not name.startswith(("lasso", "elastic", "sparse"))]
EXACT: dict[str, Any] = {"solver": "newton-cholesky", "tol": 1e-12, "max_iter": 1000}


def _slope(fun: Any, x: np.ndarray) -> np.ndarray:
    """A gradient by NumPy, with complex steps, which are exact."""
    return np.array([fun(x + e).imag / 1e-30 for e in 1e-30j * np.eye(len(x))])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CLASSICS)
@in_float64
def test_it_finds_a_minimum_that_is_known_and_that_scipy_finds(name: str) -> None:
    problem = CLASSICS[name]
    slope = functools.partial(_slope, problem.fun)
    solver = px.solve.NewtonCG(problem.fun, tol=1e-7, maxiter=1000)
    for start in (start for start in problem.starts if start != CREEPS):
        params, state = solver.run(jnp.array(start, float))
        where = f"{name} from {start}: {state!r}"
        assert int(state.status) == Status.CONVERGED, where
        assert np.linalg.norm(slope(np.asarray(params))) <= 1.1e-7, where
        np.testing.assert_allclose(state.value, problem.fun(np.asarray(params)), rtol=1e-10, atol=1e-15, err_msg=where)
        assert off_the_minima(float(state.value), problem) <= NEAR, where
        assert int(state.iter_num) <= 150, where
        theirs = scipy.optimize.minimize(problem.fun, start, jac=slope, method="BFGS", options={"gtol": 1e-8}).fun
        assert off_the_minima(theirs, problem) <= NEAR, f"SciPy itself ends at {theirs} from {start}"
        if len(problem.minima) == 1:
            assert abs(float(state.value) - theirs) <= NEAR, f"{where}, SciPy {theirs}"


@in_float64
def test_a_quadratic_of_condition_1e6_takes_few_iterations() -> None:
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(20, 20)))[0]
    hessian, slope = basis * np.logspace(0, 6, 20) @ basis.T, rng.normal(size=20)
    hessian = (hessian + hessian.T) / 2
    solver = px.solve.NewtonCG(lambda p, h, b: 0.5 * p @ h @ p - b @ p, tol=1e-7, maxcg=500)
    params, state = solver.run(jnp.zeros(20), hessian, slope)
    assert int(state.status) == Status.CONVERGED, state.reason
    np.testing.assert_allclose(params, scipy.linalg.solve(hessian, slope, assume_a="pos"), rtol=0, atol=1.1e-7)
    assert int(state.iter_num) <= 20, state


@functools.cache
def _rows(kind: str) -> tuple[np.ndarray, np.ndarray]:
    x, y = labelled(120, 5, 3)
    return x, (y if kind == "softmax" else np.random.default_rng(5).poisson(np.exp(0.4 * x[:, 0] + 0.3)))


@functools.cache
def _by_sklearn(kind: str, l2: float = L2) -> tuple[np.ndarray, np.ndarray]:
    x, y = _rows(kind)
    if kind == "softmax":
        model: Any = sklearn.linear_model.LogisticRegression(C=1 / (l2 * len(x)), **EXACT).fit(x, y)
        return model.coef_.T, model.intercept_ - model.intercept_.mean()
    model = sklearn.linear_model.PoissonRegressor(alpha=l2, **EXACT).fit(x, y)
    return model.coef_, np.asarray(model.intercept_)


def _objective(kind: Any) -> tuple[Any, Any]:
    """The objective and where to start, of JAX's own dtype."""
    fun = objective.glm(kind, intercept=True, l2=True)
    return fun, fun.init(5, 3 if kind == "softmax" else None, dtype=float)


def _placed(kind: str, devices: int) -> Any:
    x, y = _rows(kind)
    return px.solve.rows(x.astype(jnp.zeros(()).dtype), y, axis=axis_on(devices, len(x)))


def _assert_solved(kind: str, params: Any, tolerance: float) -> None:
    coef, bias = (np.asarray(part, "float64") for part in params)
    bias = bias - (bias.mean() if kind == "softmax" else 0)  # the objective does not see that part
    for found, expected in zip((coef, bias), _by_sklearn(kind), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("precondition", ["auto", "gram", None])
@pytest.mark.parametrize("kind", ["poisson", "softmax"])
def test_a_linear_models_solution_is_scikit_learns_on_1_and_8_devices(kind: str, precondition: Any) -> None:
    for wide, tol, tolerance in ((True, 1e-11, 1e-9), (False, 1e-6, 1e-4)):
        with jax.enable_x64(wide):
            fun, start = _objective(kind)
            for devices in (1, 8):
                solver = px.solve.NewtonCG(fun, tol=tol, precondition=precondition)
                params, state = solver.run(start, L2, _placed(kind, devices))
                assert int(state.status) == Status.CONVERGED, f"{devices} devices: {state.reason}"
                assert params[0].dtype == ("float64" if wide else "float32")
                assert int(state.iter_num) <= 20, state
                _assert_solved(kind, params, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["poisson", "softmax"])
@in_float64
def test_a_solutions_derivative_is_that_by_finite_differences(kind: str) -> None:
    fun, start = _objective(kind)
    solver = px.solve.NewtonCG(fun, tol=1e-11)
    x, y = _rows(kind)

    def coef(l2: Any) -> jax.Array:
        return solver.run(start, l2, (jnp.asarray(x), jnp.asarray(y))).params[0]

    step = 1e-5
    expected = (_by_sklearn(kind, L2 + step)[0] - _by_sklearn(kind, L2 - step)[0]) / (2 * step)
    for derivative in (jax.jacfwd, jax.jacrev):
        found = jax.jit(derivative(coef))(jnp.asarray(L2))
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.slow
@in_float64
def test_a_batch_of_runs_is_a_loop_of_runs() -> None:
    def steeper(x: jax.Array, steep: Any) -> jax.Array:
        return (1 - x[0]) ** 2 + steep * (x[1] - x[0] ** 2) ** 2

    fun, start = _objective("softmax")
    x, y = _rows("softmax")
    data = jnp.asarray(x), jnp.asarray(y)
    starts, steep = jnp.array([[-1.2, 1.0], [1.0, 1.0], [3.0, -2.0]]), jnp.array([100.0, 5.0, 1.0])
    plain, linear = px.solve.NewtonCG(steeper, tol=1e-8), px.solve.NewtonCG(fun, tol=1e-10)
    strengths = jnp.array([1e-3, 1e-2, 1.0])
    for run, batch in (
        (plain.run, (starts, steep)),
        (lambda l2, _: linear.run(start, l2, data), (strengths, strengths)),
    ):
        params, state = jax.vmap(run)(*batch)
        assert state.status.tolist() == [Status.CONVERGED] * 3
        assert len(set(state.iter_num.tolist())) > 1
        for i in range(3):
            one, end = run(batch[0][i], batch[1][i])
            jax.tree.map(lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=1e-8, atol=1e-10), params, one)
            for count in ("iter_num", "num_cg_iter", "data_passes"):
                assert int(getattr(state, count)[i]) == int(getattr(end, count)), count


@pytest.mark.slow
def test_a_status_is_reached_by_what_it_says() -> None:
    state = px.solve.NewtonCG(rosenbrock).run(jnp.ones(2)).state
    assert (int(state.status), int(state.iter_num), int(state.num_cg_iter)) == (Status.CONVERGED, 0, 0)
    state = px.solve.NewtonCG(rosenbrock, maxiter=4).run(jnp.array([-1.2, 1.0])).state
    assert (int(state.status), int(state.iter_num)) == (Status.ITERATION_LIMIT, 4)
    for fun, begin in ((lambda x: jnp.log(x).sum(), -1.0), (lambda x: 1 / (x**2).sum(), 0.0)):
        state = px.solve.NewtonCG(fun).run(jnp.array([begin])).state
        assert (int(state.status), int(state.iter_num)) == (Status.NOT_FINITE, 0)
    for fun in (lambda x: x.sum(), lambda x: -(x**2).sum()):
        state = px.solve.NewtonCG(fun, maxiter=60).run(jnp.array([1.0, 2.0])).state
        assert int(state.status) not in (Status.CONVERGED, Status.RUNNING), state


@pytest.mark.slow
def test_a_gradient_of_the_wrong_sign_fails_the_search() -> None:
    for power in (2, 4):
        solver = px.solve.NewtonCG(
            lambda x, power=power: ((x**power).sum(), -power * x ** (power - 1)), value_and_grad=True
        )
        params, state = solver.run(jnp.array([3.0, 1.0]))
        assert int(state.status) == Status.LINE_SEARCH_FAILED, state.reason
        assert bool(state.failed_linesearch)
        np.testing.assert_array_equal(params, [3, 1])  # nothing worse is accepted


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("loss", ["softmax", "poisson"])
def test_an_update_has_at_most_three_all_reduces_and_gathers_nothing(loss: str, kind: AxisType) -> None:
    fun, start = _objective(loss)
    x, y = _rows(loss)
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",), axis_types=(kind,))
    data = jax.device_put((x.astype("float32"), y), NamedSharding(mesh, P("data")))
    for precondition in ("gram", None):
        solver = px.solve.NewtonCG(fun, precondition=precondition)
        state = solver.init_state(start, L2, data)
        text = jax.jit(solver.update).lower(start, state, L2, data).compile().as_text() or ""
        # Results may be arrays, or tuples ``(f32[], f32[5,3]{1,0})``.
        found = [re.findall(rf"= (?:\(.*?\)|\S+) {name}(?:-start)?\(", text) for name in ("all-reduce", "all-gather")]
        assert 1 <= len(found[0]) <= 3, found
        assert not found[1], found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("precondition", ["gram", None])
@pytest.mark.parametrize("kind", ["poisson", "softmax"])
def test_the_rows_are_read_once_per_iteration_and_twice_per_product(kind: str, precondition: Any) -> None:
    fun, start = _objective(kind)
    solver, data = px.solve.NewtonCG(fun, precondition=precondition, tol=1e-4), _placed(kind, 1)
    assert int(jax.jit(solver.init_state)(start, L2, data).data_passes) == 2
    end = solver.run(start, L2, data).state
    assert int(end.status) == Status.CONVERGED
    assert int(end.num_cg_iter) >= int(end.iter_num) > 1
    assert int(end.data_passes) == 2 + int(end.iter_num) + 2 * int(end.num_cg_iter) + 2  # the last two confirm it


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["poisson", "softmax"])
@in_float64
def test_a_gram_matrix_saves_products_where_columns_differ_in_scale(kind: str) -> None:
    fun, start = _objective(kind)
    x, y = _rows(kind)
    data = jnp.asarray(x * np.logspace(-1.5, 1.0, 5)), jnp.asarray(y)
    ends = {p: px.solve.NewtonCG(fun, tol=1e-8, precondition=p).run(start, 1e-4, data) for p in ("gram", None)}
    assert [int(end.state.status) for end in ends.values()] == [Status.CONVERGED] * 2
    np.testing.assert_allclose(ends["gram"].state.value, ends[None].state.value, rtol=1e-10)
    assert int(ends["gram"].state.num_cg_iter) < int(ends[None].state.num_cg_iter)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", SMOOTH)
def test_estimators_fit_as_scikit_learns(case: str) -> None:
    ours, theirs, y = CASES[case]
    found = on(1, ours, solver="newton-cg", tol=1e-11).fit(X, y, WEIGHT)
    assert_same_fit(found, new(theirs).fit(X, y, WEIGHT), 1e-8)


def test_what_cannot_be_asked_is_said() -> None:
    solver: Any = px.solve.NewtonCG
    for options, text in (
        ({"precondition": "full"}, r"NewtonCG: precondition must be one of .*got 'full'; write precondition='auto'"),
        ({"maxiter": 0}, "NewtonCG: maxiter must be positive, got 0"),
        ({"maxcg": -1}, "NewtonCG: maxcg must be positive, got -1"),
        ({"maxls": 0}, "NewtonCG: maxls must be positive, got 0"),
        ({"tol": -1.0}, r"NewtonCG: tol must not be negative, got -1\.0; write tol=0"),
    ):
        with pytest.raises(ValueError, match=text):
            solver(rosenbrock, **options)
    for call in (solver(rosenbrock).run, solver(rosenbrock).init_state):
        with pytest.raises(ValueError, match=r"NewtonCG\.\w+: init_params must hold at least one array, got \(\)"):
            call(())
