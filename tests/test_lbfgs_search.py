"""A line search ends where the strong Wolfe conditions hold, which NumPy checks, on functions that are hard somehow."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from tests._problems import in_float64


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


def test_lbfgs_search_decides_by_slopes_where_values_are_noise_in_float32() -> None:
    def flat(s: jax.Array) -> jax.Array:
        return 1 + 1e-9 * (s - 3) ** 2  # every value is 1 in float32

    assert float(flat(jnp.float32(0))) == float(flat(jnp.float32(3))) == 1
    for first in (0.5, 1.0, 10.0):
        place, state = _searched(flat, first, "float32")
        assert not state.failed_linesearch, first
        assert abs(place - 3) < 3, f"first {first}: went to {place}, further up than the start"
