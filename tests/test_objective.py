"""Objectives are what NumPy, JAXopt and scikit-learn say, and lines, products and gradients are those of JAX."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
import scipy.stats

import paraxis as px
from paraxis.solve import objective
from paraxis.solve.objective import LossName
from tests._problems import in_float64

N, D, K = 11, 4, 3
LOSSES: tuple[LossName, ...] = ("softmax", "logistic", "squared", "poisson", "huber")


def _data(loss: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, targets that suit the loss, and weights."""
    rng = np.random.default_rng(seed)
    y: Any = {"softmax": rng.integers(0, K, N), "logistic": rng.integers(0, 2, N), "poisson": rng.poisson(2, N)}.get(
        loss, 2 * rng.normal(size=N)
    )
    return rng.normal(size=(N, D)), y, rng.uniform(0.2, 3, N)


def _params(loss: str, intercept: bool, seed: int = 1) -> Any:
    rng = np.random.default_rng(seed)
    shape = (D, K) if loss == "softmax" else (D,)
    coef = jnp.asarray(rng.normal(size=shape))
    return (coef, jnp.asarray(rng.normal(size=shape[1:]))) if intercept else coef


def _row_costs(loss: str, z: Any, y: Any) -> Any:
    """What each row costs, from the definition."""
    if loss == "softmax":
        return -jnp.take_along_axis(jax.nn.log_softmax(z), jnp.asarray(y)[:, None], 1)[:, 0]
    if loss == "logistic":
        return jnp.logaddexp(0, z) - y * z
    if loss == "poisson":
        return jnp.exp(z) - y * z
    r = abs(z - y)
    return 0.5 * r**2 if loss == "squared" else jnp.where(r < 1, 0.5 * r**2, r - 0.5)


@pytest.mark.slow
@in_float64
def test_objective_has_the_values_of_jaxopt_s_namesakes() -> None:
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        from jaxopt import objective as theirs
    names = "multiclass_logreg", "multiclass_logreg_with_intercept", "binary_logreg", "least_squares", "ridge"
    for name in (*names, "l2_multiclass_logreg", "l2_multiclass_logreg_with_intercept"):
        fun = getattr(objective, name)
        x, y, _ = _data(fun.loss)
        args = (_params(fun.loss, fun.intercept), *((0.7,) if fun.l2 else ()), (x, y))
        rival = getattr(theirs, "ridge_regression" if name == "ridge" else name)
        np.testing.assert_allclose(fun(*args), rival(*args), rtol=1e-12, err_msg=name)


@in_float64
def test_objective_of_a_distribution_is_minus_the_likelihood_of_scipy() -> None:
    """But for a constant of the targets, and with offsets."""
    rng = np.random.default_rng(5)
    x, offset, weight = rng.normal(size=(N, D)), rng.normal(size=N), rng.uniform(0.2, 3, N)
    coefs, counts, positive = rng.normal(size=(2, D)), rng.poisson(2, N), rng.gamma(2, size=N)
    for fun, y, cost in (
        (objective.glm("poisson"), counts, lambda m: -scipy.stats.poisson.logpmf(counts, m)),
        (
            objective.glm("negative_binomial", dispersion=0.5),
            counts,
            lambda m: -scipy.stats.nbinom.logpmf(counts, 2, 1 / (1 + 0.5 * m)),
        ),
        (objective.glm(lambda z, y: jnp.exp(z) - y * z), counts, lambda m: -scipy.stats.poisson.logpmf(counts, m)),
        (objective.glm("gamma"), positive, lambda m: -scipy.stats.gamma.logpdf(positive, 1, scale=m)),
        (objective.glm("tweedie", power=3), positive, lambda m: (positive - m) ** 2 / (2 * positive * m**2)),
        (objective.glm("tweedie", power=0), positive, lambda m: (positive - m) ** 2 / 2),
        (objective.glm("tweedie", power=1.5), positive, lambda m: 2 * (np.sqrt(m) + positive / np.sqrt(m))),
    ):
        found = [fun(jnp.asarray(coef), (x, y, weight, offset)) for coef in coefs]
        expected = [np.average(cost(np.exp(x @ coef + offset)), weights=weight) for coef in coefs]
        np.testing.assert_allclose(found[0] - found[1], expected[0] - expected[1], rtol=1e-10, err_msg=f"{fun}")


@pytest.mark.parametrize("loss", ["huber", "squared"])
@in_float64
def test_objective_of_several_outputs_is_the_sum_of_what_each_costs(loss: LossName) -> None:
    rng = np.random.default_rng(4)
    for rows in (N, K):  # as many rows as outputs must not mix the two up
        x, coef, weight = rng.normal(size=(rows, D)), rng.normal(size=(D, K)), rng.uniform(0.2, 3, rows)
        y, offset = rng.integers(0, 2, (rows, K)).astype(float), rng.normal(size=(rows, K))
        z = x @ coef + offset
        each = [np.average(_row_costs(loss, z[:, i], y[:, i]), weights=weight) for i in range(K)]
        np.testing.assert_allclose(objective.glm(loss)(coef, (x, y, weight, offset)), np.sum(each), rtol=1e-12)


CASES = ["plain", "all", *(pytest.param(case, marks=pytest.mark.slow) for case in ("intercept", "weights", "l2"))]


def _posed(loss: LossName, case: str) -> tuple[Any, Any, Callable[[Any], jax.Array]]:
    """A problem, where to look at it, and the same objective as a function written without the library."""
    intercept, l2 = case in ("intercept", "all"), 0.3 if case in ("l2", "all") else None
    x, y, weight = _data(loss)
    data = (x, y, weight) if case in ("weights", "all") else (x, y)
    params = _params(loss, intercept)
    fun = objective.glm(loss, intercept=intercept, l2=l2 is not None)
    shares = jnp.asarray(weight / weight.sum() if len(data) == 3 else np.full(N, 1 / N))

    def plain(params: Any) -> jax.Array:
        coef, bias = params if intercept else (params, 0.0)
        z = x @ coef + bias
        return (shares * _row_costs(loss, z, y)).sum() + 0.5 * (l2 or 0) * (coef**2).sum()

    return fun.problem(params, *(() if l2 is None else (l2,)), data), params, plain


def _close(actual: Any, expected: Any) -> None:
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-10, atol=1e-10), actual, expected)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("loss", LOSSES)
@in_float64
def test_objective_along_a_line_is_the_function_there(loss: LossName, case: str) -> None:
    problem, params, plain = _posed(loss, case)
    direction = jax.tree.map(lambda p: jnp.asarray(np.random.default_rng(5).normal(size=p.shape)), params)

    def along(stepsize: Any) -> Any:
        return jax.tree.map(lambda p, d: p + stepsize * d, params, direction)

    def value(stepsize: jax.Array) -> jax.Array:
        return plain(along(stepsize))

    @jax.jit
    def look(stepsize: jax.Array) -> Any:
        point, product, there = problem.at(params), problem.matvec(direction), along(stepsize)
        origin, at = problem.line(point, direction, product)
        trial = at(stepsize)
        end = problem.end(there, point.cache._replace(z=point.cache.z + stepsize * product), trial)
        found = origin[:2], trial[:3], (end.value, end.grad), jax.value_and_grad(problem.value)(there), end.cache.z
        at_zero = value(jnp.array(0.0)), jax.grad(value)(0.0)
        derivatives = value(stepsize), jax.grad(value)(stepsize), jax.grad(jax.grad(value))(stepsize)
        whole = jax.value_and_grad(plain)(there)
        return found, (at_zero, derivatives, whole, whole, problem.matvec(there))

    for stepsize in map(jnp.asarray, (0.0, 0.25, -1.0)):
        _close(*look(stepsize))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("loss", LOSSES)
@in_float64
def test_objective_takes_a_weight_for_a_number_of_copies_and_zero_for_none(loss: LossName) -> None:
    x, y, _ = _data(loss)
    params = _params(loss, True)
    copies = np.random.default_rng(7).integers(0, 4, N)
    fun = objective.glm(loss, intercept=True)
    look = jax.jit(jax.value_and_grad(fun))
    expected = look(params, (np.repeat(x, copies, 0), np.repeat(y, copies)))
    _close(look(params, (x, y, copies.astype(float))), expected)
    _close(look(params, (x, y, copies)), expected)  # integers, too
    wild = np.where((copies == 0)[:, None], 1e6 if loss != "poisson" else 1.0, x)
    _close(look(params, (wild, y, copies.astype(float))), expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("in_table", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
@in_float64
def test_solvers_take_an_offset_of_each_loss_to_the_minimum_of_scipy(loss: LossName, in_table: bool) -> None:
    x, y, weight = _data(loss)
    begin = jnp.zeros_like(_params(loss, False))
    offset = np.random.default_rng(8).normal(size=(N, *begin.shape[1:]))

    def cost(w: np.ndarray) -> float:
        costs = _row_costs(loss, x @ w.reshape(begin.shape) + offset, y)
        return float(np.average(costs, weights=weight) + 0.05 * w @ w)

    given = (px.Table.of_arrays(x, y),) if in_table else (x, y)
    data = px.solve.rows(*given, sample_weight=weight, offset=offset, engine=px.Stream(at_once=1) if in_table else None)
    expected = scipy.optimize.minimize(cost, np.zeros(begin.size)).x.reshape(begin.shape)
    proximal = px.solve.ProximalGradient(objective.glm(loss), px.solve.prox.elastic_net).run(begin, (0.0, 0.1), data)
    for found in (px.solve.LBFGS(objective.glm(loss, l2=True)).run(begin, 0.1, data), proximal):
        np.testing.assert_allclose(found.params, expected, rtol=0, atol=2e-4)


def test_objective_says_what_does_not_fit() -> None:
    x, y = jnp.ones((5, 2)), jnp.zeros(5, int)
    fun: Any = objective
    for call, error, text in (
        (lambda: fun.ridge(jnp.ones(2), (x, y)), TypeError, r"takes \(params, l2reg, data\)"),
        (lambda: fun.least_squares(jnp.ones(3), (x, y)), ValueError, r"must be \(d,\).*got \(5, 2\) and \(3,\)"),
        (lambda: fun.binary_logreg(jnp.ones(2), (x, y, y[:2])), ValueError, r"weight must be \(5,\).*got \(2,\)"),
        (lambda: px.solve.rows(np.ma.masked_array(x, x > 0), y), ValueError, "rows: X is a MaskedArray, which leaves"),
        (lambda: fun.multiclass_logreg(jnp.ones(2), (x, y)), ValueError, r"must be \(d, k\), an output per class"),
        (lambda: fun.multiclass_logreg_with_intercept(jnp.ones((2, 3)), (x, y)), ValueError, "must be a pair"),
        (lambda: px.solve.LBFGS(fun.poisson).run(jnp.ones(2, "float16"), (x, y)), ValueError, "params are float16"),
    ):
        with pytest.raises(error, match=text):
            call()
