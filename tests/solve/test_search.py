"""Each rule of the line search keeps its conditions, which NumPy checks, on functions that are hard in some way."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from tests.solve._problems import RULES, Rule, in_float64

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


class Found(NamedTuple):
    """Where the search of a first iteration ended, along ``fun``."""

    stepsize: float
    place: float  # where the parameters are
    value: float
    slope: float
    failed: bool
    num_trials: int


def _searcher(
    fun: Callable[..., Any],
    rule: Rule,
    *,
    slope: float = 0.9,
    trials: int = 30,
    most: float = np.inf,
    dtype: str = "float64",
) -> Callable[..., Found]:
    """Searches along ``fun`` from 0, as L-BFGS does in its first iteration, whose direction is known.

    Its parameters are a number ``p``, its function is ``fun(scale * p)``. The first direction is minus the gradient,
    made no longer than 1, and the first step along it 1, which by ``scale`` is any first step along ``fun``.
    """
    start = np.zeros((), dtype)
    slope_at_start = jax.jit(jax.grad(fun))

    @functools.cache
    def run(max_stepsize: float) -> Callable[..., Any]:
        solver = px.solve.LBFGS(
            lambda p, scale, *args: fun(scale * p, *args),
            tol=0,
            linesearch=rule,
            history_size=1,
            maxls=trials,
            decrease_factor=min(DECREASE, slope / 2),
            curvature_factor=slope,
            max_stepsize=max_stepsize,
        )
        return jax.jit(lambda *args: solver.update(jnp.asarray(start), solver.init_state(start, *args), *args))

    def search(first: float, *args: Any) -> Found:
        slope0 = abs(float(slope_at_start(start, *args)))
        scale = first if first * slope0 >= 1 else np.sqrt(first / slope0)
        params, state = run(most / first)(np.asarray(scale, dtype), *args)
        return Found(
            stepsize=float(state.stepsize) * first,
            place=float(params) * scale,
            value=float(state.value),
            slope=float(state.grad) / scale,
            failed=bool(state.failed_linesearch),
            num_trials=int(state.num_linesearch_iter),
        )

    return search


@functools.cache
def _smooth_searcher(rule: Rule, *, slope: float = 0.9, trials: int = 30) -> Callable[[Slice, float], Found]:
    """Searches along any of the smooth functions, by one program."""
    search = _searcher(
        lambda s, number: jax.lax.switch(number, [*SMOOTH.values()], s), rule, slope=slope, trials=trials
    )
    return lambda fun, first: search(first, [*SMOOTH].index(fun.__name__))


def _by_numpy(fun: Slice, s: float) -> tuple[float, float]:
    """Value and slope; the slope by a complex step, which is exact."""
    step = fun(np.complex128(complex(s, 1e-30)))
    return float(step.real), float(step.imag / 1e-30)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", SMOOTH)
@in_float64
def test_the_step_keeps_its_rules_conditions(name: str, rule: Rule) -> None:
    fun = SMOOTH[name]
    value0, slope0 = _by_numpy(fun, 0.0)
    for left in (0.9, 0.1):
        search = _smooth_searcher(rule, slope=left, trials=60)
        for first in (1e-4, 0.1, 1.0, 30.0, 1e4):
            found = search(fun, first)
            step = found.place
            where = f"{name}, first step {first}, found {step} in {found.num_trials} trials"
            assert step > 0, where
            assert not found.failed, where
            value, slope = _by_numpy(fun, step)
            np.testing.assert_allclose(found.value, value, rtol=1e-12, atol=1e-12, err_msg=where)
            np.testing.assert_allclose(found.slope, slope, rtol=1e-9, atol=1e-6 * abs(slope0), err_msg=where)
            np.testing.assert_allclose(found.stepsize, step, rtol=1e-12, err_msg=where)
            decreased = value <= value0 + DECREASE * step * slope0 + 1e-14 * abs(value0)
            level = value <= value0 + 1e-13 * abs(value0) and slope <= (2 * DECREASE - 1) * slope0
            assert decreased or level, where
            if rule == "zoom":
                assert abs(slope) <= left * abs(slope0) * (1 + 1e-6), where
            if rule == "hager-zhang":
                assert slope >= left * slope0 * (1 + 1e-6), where


@in_float64
def test_decrease_is_as_much_as_was_asked_for() -> None:
    """On a parabola, whose first trial is lower than the start, but by less than that."""
    for rule in RULES:
        run = px.solve.LBFGS(
            lambda p, curvature: curvature * p**2 / 2, linesearch=rule, decrease_factor=0.4, curvature_factor=0.95
        )
        update = jax.jit(lambda p, c, run=run: run.update(p, run.init_state(p, c), c))
        for curvature in (1.3, 1.5, 1.8):  # the gradient at 0.5 is below 1: the first trial goes there
            stepsize = float(update(jnp.array(0.5), curvature).state.stepsize)
            decrease, slope = 0.125 * curvature * (1 - (1 - curvature * stepsize) ** 2), 0.25 * curvature**2
            assert 0 < stepsize < 1
            assert decrease >= 0.4 * stepsize * slope - 1e-12, f"{rule}, curvature {curvature}: {stepsize}"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rule", RULES)
@in_float64
def test_few_trials_are_enough(rule: Rule) -> None:
    for fun, first in ((_barrier, 1.0), (_barrier, 1e3), (_one_pole, 0.1), (_flat_ends, 1.0), (_overflow, 1.0)):
        assert _smooth_searcher(rule)(fun, first).num_trials <= 15, fun.__name__


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("beyond", [np.nan, np.inf, -np.inf])
@in_float64
def test_a_function_that_ends_is_searched_where_it_is_finite(beyond: float, rule: Rule) -> None:
    def cut(s: jax.Array) -> jax.Array:
        return (s - 0.01) ** 2 + jnp.where(s < 0.011, 0, beyond)

    search = _searcher(cut, rule)
    for first in (0.005, 1.0, 500.0):
        found = search(first)
        assert 0 < found.place < 0.011
        assert not found.failed
        assert found.value < 1e-4


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rule", RULES)
def test_where_values_are_noise_slopes_decide_in_float32(rule: Rule) -> None:
    def flat(s: jax.Array) -> jax.Array:
        return 1 + 1e-9 * (s - 3) ** 2  # every value is 1 in float32

    assert float(flat(jnp.float32(0))) == float(flat(jnp.float32(3))) == 1
    search = _searcher(flat, rule, slope=0.1, dtype="float32")
    for first in (0.5, 1.0, 10.0, 200.0):
        found = search(first)
        slope, slope0 = (2e-9 * (s - 3) for s in (found.place, 0.0))
        assert not found.failed, first
        assert found.num_trials <= 15, first
        assert abs(slope) < abs(slope0), f"first {first}: went to {found.place}, further up than the start"
        if rule == "zoom":
            assert abs(slope) <= 0.1 * abs(slope0) * (1 + 1e-5), first


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rule", RULES)
@in_float64
def test_a_search_without_success_stays_where_it_was(rule: Rule) -> None:
    def claims_to_descend(s: jax.Array) -> jax.Array:
        return 1 + s - 2 * (s - jax.lax.stop_gradient(s))  # goes up by 1, says that it goes down by 1

    for trials in (1, 2, 9):
        found = _searcher(claims_to_descend, rule, trials=trials)(1.0)
        assert found.failed
        assert found.stepsize == found.place == 0
        assert found.value == 1
        assert found.num_trials == trials


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("rule", RULES)
@in_float64
def test_a_search_that_runs_out_of_trials_returns_the_best_of_them(rule: Rule) -> None:
    for trials in (1, 3):
        for fun in (_steep_then_flat, _wiggly, _far, _barrier):
            found = _smooth_searcher(rule, slope=1e-6, trials=trials)(fun, 0.3)
            assert found.num_trials <= trials
            assert found.failed == (found.stepsize == 0) == (found.place == 0)
            value = _by_numpy(fun, found.place)[0]
            np.testing.assert_allclose(found.value, value, rtol=1e-12, atol=1e-12)
            assert value < _by_numpy(fun, 0.0)[0] or found.failed


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("rule", RULES)
@in_float64
def test_no_step_is_longer_than_the_longest(rule: Rule) -> None:
    search = _searcher(_far, rule, most=7.0)
    for first in (0.125, 1.0, 1024.0):  # by which 7 can be divided without rounding
        found = search(first)
        assert 0 < found.stepsize <= 7
        np.testing.assert_allclose(found.place, found.stepsize, rtol=1e-12)
        assert not found.failed
        if rule == "zoom":
            assert found.stepsize == 7


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rule", ["zoom", "hager-zhang"])
@in_float64
def test_a_known_curvature_finds_the_minimum_of_a_parabola_at_once(rule: Rule) -> None:
    """That of a linear model's squared loss, whose trials tell it; of one row, of which the prediction is to be 37."""
    solver = px.solve.LBFGS(px.solve.objective.least_squares, linesearch=rule, tol=0, precondition=None)
    start = jnp.zeros(1)
    run = jax.jit(lambda data: solver.update(start, solver.init_state(start, data), data))
    for first in (0.1, 10.0, 1e3):  # the first direction is 1 long, as the gradient is longer: so is the prediction
        params, state = run((jnp.array([[first]]), jnp.array([37.0])))
        assert abs(first * float(params[0]) - 37) <= 3.7
        assert int(state.num_linesearch_iter) <= 6
