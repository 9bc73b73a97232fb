"""A line search ends where the strong Wolfe conditions hold, which NumPy checks, on functions that are hard somehow."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

import paraxis as px
from paraxis.solve import SearchResult
from tests._problems import in_float64, labelled, rosenbrock


def _numpy(s: Any) -> Any:
    return jnp if isinstance(s, jax.Array) else np


FUNCTIONS = {
    "wiggly": lambda s: -s + 0.15 * _numpy(s).sin(5 * s) + 0.02 * s**2,
    "flat ends": lambda s: _numpy(s).sqrt(1 + (s - 4) ** 2),
    "the second of Moré and Thuente 1994": lambda s: (s + 0.004) ** 5 - 2 * (s + 0.004) ** 4,
    "the first": lambda s: -s / (s**2 + 2),
    "sharp": lambda s: 1e6 * (s - 1e-4) ** 2,
    "far": lambda s: 1e-6 * (s - 5000) ** 2,
    "NaN beyond 2": lambda s: -3 * _numpy(s).log(s + 0.1) - _numpy(s).log(2 - s),
    "inf beyond 14": lambda s: _numpy(s).exp(s * 50) - 90 * s,
}


@functools.cache
def _solver(fun: Any) -> Any:
    solver = px.solve.LBFGS(lambda p, by: fun(by * p), tol=0)
    return solver, jax.jit(solver.update)


def _searched(fun: Any, first: float, dtype: str = "float64") -> tuple[float, Any]:
    """Where the first iteration of L-BFGS ends along ``fun``, of which it tries the place ``first`` first.

    Its first direction is minus the gradient, made no longer than 1.
    """
    start = jnp.zeros((), dtype)
    slope = abs(float(jax.grad(fun)(start)))
    scale = first if first * slope >= 1 else np.sqrt(first / slope)
    (solver, update), by = _solver(fun), jnp.asarray(scale, dtype)
    params, state = update(start, solver.init_state(start, by), by)
    return float(params) * scale, state


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FUNCTIONS)
@in_float64
def test_lbfgs_search_keeps_the_strong_wolfe_conditions(name: str) -> None:
    fun = FUNCTIONS[name]
    value, slope = fun(0.0), fun(1e-30j).imag / 1e-30
    for first in (1e-3, 0.1, 1.0, 10.0, 1e3):
        place, state = _searched(fun, first)
        where = f"first {first}: ended at {place}, {state!r}"
        assert not state.failed_linesearch, where
        assert fun(place) <= value + 1e-4 * place * slope + 1e-12, where
        assert abs(fun(place + 1e-30j).imag / 1e-30) <= 0.9 * abs(slope), where
        assert int(state.num_linesearch_iter) <= 30, where


def _halved(origin: Any, at: Callable[[Any], Any], first: Any) -> SearchResult:
    """A search of one's own: until the value is lower, if ever."""
    stepsize = jax.lax.while_loop(lambda s: (at(s).value > origin.value) & (s > 1e-6), lambda s: s / 2, first)
    trial = at(stepsize)
    return SearchResult(stepsize, trial, ~(trial.value <= origin.value), 1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("linesearch", ["backtracking", _halved])
@in_float64
def test_lbfgs_takes_searches_of_any_kind(linesearch: Any) -> None:
    x, y = labelled(80, 4, 2)
    linear = px.solve.objective.glm("logistic", l2=True)
    expected = scipy.optimize.minimize(
        lambda w: np.logaddexp(0, x @ w).mean() - (y * (x @ w)).mean() + 0.05 * w @ w, np.zeros(4), tol=1e-12
    ).x
    for fun, start, args, minimum in (
        (rosenbrock, [-1.2, 1.0], (), [1.0, 1.0]),
        (linear, np.zeros(4), (0.1, (x, y)), expected),
    ):
        params, state = px.solve.LBFGS(fun, linesearch=linesearch, tol=1e-6, maxiter=100).run(jnp.array(start), *args)
        assert state.error <= 1e-6, state.reason
        np.testing.assert_allclose(params, minimum, atol=2e-5)
    with pytest.raises(ValueError, match="linesearch must be one of 'zoom', 'backtracking', got 'hager-zhang'"):
        px.solve.LBFGS(rosenbrock, linesearch="hager-zhang")  # pyright: ignore[reportArgumentType]


@in_float64
def test_solvers_take_the_options_of_jaxopt() -> None:
    for kind in (px.solve.LBFGS, px.solve.ProximalGradient):
        solver = kind(lambda p: jnp.sum((p - 2) ** 2), stepsize=-1.0)
        params, state = solver.run(jnp.zeros(3))
        np.testing.assert_allclose(params, 2, atol=1e-5)
        assert {state.iter_num.dtype, state.num_fun_eval.dtype, state.num_linesearch_iter.dtype} == {np.dtype(int)}
        with pytest.raises(px.DataError, match=r"init_params are complex; write them as a pair \(real"):
            solver.run(jnp.zeros(3, complex))
    descent = px.solve.LBFGS(rosenbrock, history_size=0, maxiter=40)
    assert 0 < descent.run(jnp.array([-1.2, 1.0])).state.value < 5  # as slow as steepest descent is
    with pytest.raises(TypeError, match=r"ProximalGradient \(params, hyperparams_prox, l2reg, data\)"):
        px.solve.ProximalGradient(px.solve.objective.ridge).run(jnp.zeros(2), 0.1, (np.eye(2), np.ones(2)))


def test_lbfgs_search_decides_by_slopes_where_values_are_noise_in_float32() -> None:
    def flat(s: jax.Array) -> jax.Array:
        return 1 + 1e-9 * (s - 3) ** 2  # every value is 1 in float32

    assert float(flat(jnp.float32(0))) == float(flat(jnp.float32(3))) == 1
    for first in (0.5, 1.0, 10.0):
        place, state = _searched(flat, first, "float32")
        assert not state.failed_linesearch, first
        assert abs(place - 3) < 3, f"first {first}: went to {place}, further up than the start"
