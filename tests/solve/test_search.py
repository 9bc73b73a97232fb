"""Each rule of the line search keeps its conditions, which NumPy checks, on functions that are hard in some way."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paraxis.solve._problem import Line, Trial
from paraxis.solve._search import RULES, Found, Options, Rule, search
from tests.solve._problems import in_float64

Slice = Callable[[Any], Any]

DECREASE = 1e-4


def _steep_then_flat(s: Any) -> Any:
    return (s + 0.004) ** 5 - 2 * (s + 0.004) ** 4  # the second function of Moré and Thuente 1994


def _wiggly(s: Any) -> Any:
    return -s + 0.15 * _numpy(s).sin(5 * s) + 0.02 * s**2


def _one_pole(s: Any) -> Any:
    return -s / (s**2 + 2)  # the first function of Moré and Thuente 1994


def _flat_ends(s: Any) -> Any:
    return _numpy(s).sqrt(1 + (s - 4) ** 2)


def _sharp(s: Any) -> Any:
    return 1e6 * (s - 1e-4) ** 2


def _far(s: Any) -> Any:
    return 1e-6 * (s - 5000) ** 2


def _barrier(s: Any) -> Any:
    return -3 * _numpy(s).log(s + 0.1) - _numpy(s).log(2 - s)  # NaN beyond 2


def _overflow(s: Any) -> Any:
    return _numpy(s).exp(s * 50) - 90 * s  # inf beyond about 14


SMOOTH: dict[str, Slice] = {
    f.__name__: f for f in (_steep_then_flat, _wiggly, _one_pole, _flat_ends, _sharp, _far, _barrier, _overflow)
}


def _numpy(s: Any) -> Any:
    return jnp if isinstance(s, jax.Array) else np


def _line(fun: Slice, dtype: str = "float64") -> Line:
    unknown = jnp.full((), jnp.nan, dtype)

    def at(stepsize: jax.Array) -> Trial:
        value, slope = jax.value_and_grad(fun)(jnp.asarray(stepsize, dtype))
        return Trial(value, slope, unknown, stepsize)

    return Line(at(jnp.zeros((), dtype)), at, lambda stepsize, trial: trial.kept)


def _searched(
    fun: Slice, first: float, rule: Rule, *, slope: float = 0.9, trials: int = 30, most: float = np.inf
) -> Found:
    options = Options(rule, DECREASE, slope, trials, most)
    return jax.jit(lambda first: search(_line(fun), first, options))(jnp.asarray(first))


def _by_numpy(fun: Slice, s: float) -> tuple[float, float]:
    """Value and slope; the slope by a complex step, which is exact."""
    step = fun(np.complex128(complex(s, 1e-30)))
    return float(step.real), float(step.imag / 1e-30)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", SMOOTH)
@in_float64
def test_the_step_keeps_its_rules_conditions(name: str, rule: Rule) -> None:
    fun = SMOOTH[name]
    value0, slope0 = _by_numpy(fun, 0.0)
    for left in (0.9, 0.1):
        run = jax.jit(lambda first, left=left: search(_line(fun), first, Options(rule, DECREASE, left, 60, np.inf)))
        for first in (1e-4, 0.1, 1.0, 30.0, 1e4):
            found = run(jnp.asarray(first))
            step = float(found.stepsize)
            where = f"{name}, first step {first}, found {step} in {int(found.num_trials)} trials"
            assert step > 0, where
            assert not bool(found.failed), where
            value, slope = _by_numpy(fun, step)
            np.testing.assert_allclose(found.trial.value, value, rtol=1e-12, atol=1e-12, err_msg=where)
            np.testing.assert_allclose(found.trial.slope, slope, rtol=1e-9, atol=1e-6 * abs(slope0), err_msg=where)
            assert float(found.trial.kept) == step, where
            decreased = value <= value0 + DECREASE * step * slope0 + 1e-14 * abs(value0)
            level = value <= value0 + 1e-13 * abs(value0) and slope <= (2 * DECREASE - 1) * slope0
            assert decreased or level, where
            if rule == "zoom":
                assert abs(slope) <= left * abs(slope0) * (1 + 1e-6), where
            if rule == "hager-zhang":
                assert slope >= left * slope0 * (1 + 1e-6), where


@pytest.mark.parametrize("rule", RULES)
@in_float64
def test_few_trials_are_enough(rule: Rule) -> None:
    for fun, first in ((_barrier, 1.0), (_barrier, 1e3), (_one_pole, 0.1), (_flat_ends, 1.0), (_overflow, 1.0)):
        assert int(_searched(fun, first, rule).num_trials) <= 15, fun.__name__


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("beyond", [np.nan, np.inf, -np.inf])
@in_float64
def test_a_function_that_ends_is_searched_where_it_is_finite(beyond: float, rule: Rule) -> None:
    def cut(s: jax.Array) -> jax.Array:
        return (s - 0.01) ** 2 + jnp.where(s < 0.011, 0, beyond)

    for first in (0.005, 1.0, 500.0):
        found = _searched(cut, first, rule)
        assert 0 < float(found.stepsize) < 0.011
        assert not bool(found.failed)
        assert float(found.trial.value) < 1e-4


@pytest.mark.parametrize("rule", RULES)
def test_where_values_are_noise_slopes_decide_in_float32(rule: Rule) -> None:
    def flat(s: jax.Array) -> jax.Array:
        return 1 + 1e-9 * (s - 3) ** 2  # every value is 1 in float32

    assert float(flat(jnp.float32(0))) == float(flat(jnp.float32(3))) == 1
    options = Options(rule, DECREASE, 0.1, 30, np.inf)
    for first in (0.5, 1.0, 10.0, 200.0):
        found = search(_line(flat, "float32"), jnp.float32(first), options)
        slope, slope0 = (2e-9 * (s - 3) for s in (float(found.stepsize), 0.0))
        assert not bool(found.failed), first
        assert int(found.num_trials) <= 15, first
        assert abs(slope) < abs(slope0), f"first {first}: went to {float(found.stepsize)}, further up than the start"
        if rule == "zoom":
            assert abs(slope) <= 0.1 * abs(slope0) * (1 + 1e-5), first


@pytest.mark.parametrize("rule", RULES)
@in_float64
def test_a_search_without_success_stays_where_it_was(rule: Rule) -> None:
    def claims_to_descend(s: jax.Array) -> jax.Array:
        return 1 + s - 2 * (s - jax.lax.stop_gradient(s))  # goes up by 1, says that it goes down by 1

    for trials in (1, 2, 9):
        found = _searched(claims_to_descend, 1.0, rule, trials=trials)
        assert bool(found.failed)
        assert float(found.stepsize) == 0
        assert float(found.trial.value) == 1
        assert int(found.num_trials) == trials


@pytest.mark.parametrize("rule", RULES)
@in_float64
def test_a_search_that_runs_out_of_trials_returns_the_best_of_them(rule: Rule) -> None:
    for trials in (1, 3):
        for fun in (_steep_then_flat, _wiggly, _far, _barrier):
            found = _searched(fun, 0.3, rule, slope=1e-6, trials=trials)
            assert int(found.num_trials) <= trials
            assert bool(found.failed) == (float(found.stepsize) == 0)
            value = _by_numpy(fun, float(found.stepsize))[0]
            np.testing.assert_allclose(found.trial.value, value, rtol=1e-12, atol=1e-12)
            assert value < _by_numpy(fun, 0.0)[0] or bool(found.failed)


@pytest.mark.parametrize("rule", RULES)
@in_float64
def test_no_step_is_longer_than_the_longest(rule: Rule) -> None:
    for first in (0.1, 1.0, 1e3):
        found = _searched(_far, first, rule, most=7.0)
        assert 0 < float(found.stepsize) <= 7
        assert not bool(found.failed)
        if rule == "zoom":
            assert float(found.stepsize) == 7


@pytest.mark.parametrize("rule", ["zoom", "hager-zhang"])
@in_float64
def test_a_known_curvature_finds_the_minimum_of_a_parabola_at_once(rule: Rule) -> None:
    def at(s: jax.Array) -> Trial:
        return Trial((s - 37) ** 2, 2 * (s - 37), jnp.full((), 2.0), ())

    line = Line(at(jnp.zeros(()))._replace(curvature=jnp.full((), jnp.nan)), at, lambda stepsize, trial: trial.kept)
    for first in (0.1, 10.0, 1e3):
        found = search(line, jnp.asarray(first), Options(rule, DECREASE, 0.1, 30, np.inf))
        assert abs(float(found.stepsize) - 37) <= 3.7
        assert int(found.num_trials) <= 6
