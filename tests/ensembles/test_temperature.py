"""The temperature is where SciPy's minimiser finds it, and is fitted on rows other than those scored."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
import scipy.special
import sklearn.metrics

from paraxis import DataError, ShapeError
from paraxis.ensembles import apply_temperature, calibration_error, cross_fitted_nll, fit_temperature, nll


def labelled(n: int, classes: int, sharpness: float = 1.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Labels drawn from random probabilities, and those probabilities raised to a power: the temperature to find."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(n, classes)) * 1.5
    y = np.array([rng.choice(classes, p=row) for row in scipy.special.softmax(logits, axis=-1)])
    return scipy.special.softmax(sharpness * logits, axis=-1).astype(np.float32), y


def scaled(p: np.ndarray, temperature: float) -> np.ndarray:
    return scipy.special.softmax(np.log(p.astype(np.float64)) / temperature, axis=-1)


def loss(p: np.ndarray, y: np.ndarray) -> float:
    return float(sklearn.metrics.log_loss(y, p, labels=range(p.shape[1])))


def best_temperature(p: np.ndarray, y: np.ndarray) -> float:
    found: Any = scipy.optimize.minimize_scalar(
        lambda log_t: loss(scaled(p, np.exp(log_t)), y),
        bounds=(math.log(1e-2), math.log(1e2)),
        method="bounded",
        options={"xatol": 1e-9},
    )
    return float(np.exp(found.x))


@pytest.mark.parametrize("sharpness", [0.3, 1.0, 3.0])
@pytest.mark.parametrize(("n", "classes"), [(40, 2), (300, 10)])
def test_the_temperature_is_the_one_of_least_loss(n: int, classes: int, sharpness: float) -> None:
    p, y = labelled(n, classes, sharpness)
    expected = best_temperature(p, y)
    for got in (fit_temperature(p, y), fit_temperature(jnp.asarray(p), jnp.asarray(y))):
        assert type(got) is float
        np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("sharpness", [0.5, 1.0, 4.0])
def test_the_power_that_probabilities_were_raised_to_is_found(sharpness: float) -> None:
    p, y = labelled(20_000, 5, sharpness)
    temperature = fit_temperature(p, y)
    np.testing.assert_allclose(temperature, sharpness, rtol=0.05)
    calibrated = apply_temperature(p, temperature)
    assert calibration_error(calibrated, y) < 0.02
    assert nll(calibrated, y) <= nll(p, y)


def test_over_confidence_is_above_one_and_under_confidence_below() -> None:
    assert fit_temperature(*labelled(2000, 4, 3.0)) > 1.5
    assert fit_temperature(*labelled(2000, 4, 0.3)) < 0.7


def test_fitting_again_finds_nothing_to_correct() -> None:
    p, y = labelled(500, 4, 3.0)
    np.testing.assert_allclose(fit_temperature(apply_temperature(p, fit_temperature(p, y)), y), 1, rtol=1e-4)


def test_the_closed_form_of_two_classes() -> None:
    # Three of four are right: the odds 9 are to become 3 = sqrt(9).
    assert fit_temperature(np.array([[0.9, 0.1]] * 4), np.array([0, 0, 0, 1])) == pytest.approx(2, rel=1e-9)


def test_where_the_likelihood_grows_up_to_a_bound_that_bound_is_returned() -> None:
    y = np.arange(12) % 3
    for p in (np.eye(3), np.eye(3) * 0.7 + 0.1):
        assert fit_temperature(p[y], y) == 1e-2
        assert fit_temperature(p[(y + 1) % 3], y) == 1e2


def test_uniform_predictions_keep_their_temperature() -> None:
    assert fit_temperature(np.full((5, 10), 0.1, np.float32), np.arange(5)) == 1


def test_zero_probabilities_count_as_the_smallest_normal_float32() -> None:
    p = np.array([[0.9, 0.1, 0.0], [0.6, 0.4, 0.0], [1.0, 0.0, 0.0]], np.float32)
    y = np.array([0, 1, 1])
    raised = np.maximum(p.astype(np.float64), np.finfo(np.float32).tiny)
    np.testing.assert_allclose(fit_temperature(p, y), best_temperature(raised, y), rtol=1e-5)
    np.testing.assert_allclose(apply_temperature(p, 50.0), scaled(raised, 50.0), rtol=1e-5)
    assert math.isfinite(cross_fitted_nll(p, y))
    assert math.isinf(float(nll(p, y)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", [(3,), (4, 3), (2, 4, 3)])
def test_applying_a_temperature_divides_the_logarithms(shape: tuple[int, ...]) -> None:
    p = scipy.special.softmax(np.random.default_rng(0).normal(size=shape), axis=-1).astype(np.float32)
    for temperature in (0.3, 1.0, 7.0):
        for got in (apply_temperature(p, temperature), jax.jit(apply_temperature)(p, temperature)):
            assert got.dtype == jnp.float32
            np.testing.assert_allclose(got, scaled(p, temperature), rtol=1e-5)
            np.testing.assert_array_equal(got.argmax(-1), p.argmax(-1))
    np.testing.assert_allclose(apply_temperature(p, 1.0), p, rtol=1e-5)


def test_one_temperature_per_member_by_vmap() -> None:
    p = np.stack([labelled(4, 3, seed=seed)[0] for seed in range(2)])
    got = jax.vmap(apply_temperature)(p, jnp.array([0.5, 2.0]))
    np.testing.assert_allclose(got, [scaled(p[0], 0.5), scaled(p[1], 2.0)], rtol=1e-5)


def cross_fitted_by_hand(p: np.ndarray, y: np.ndarray, num_splits: int, seed: int) -> float:
    rng = np.random.default_rng(seed)
    losses = []
    for _ in range(num_splits):
        order = rng.permutation(len(p))
        first, second = order[: (len(p) + 1) // 2], order[(len(p) + 1) // 2 :]
        for fit, score in ((first, second), (second, first)):
            temperature = best_temperature(p[fit], y[fit])
            losses += [-np.log(scaled(p[row], temperature)[y[row]]) for row in score]
    return float(np.mean(losses))


@pytest.mark.parametrize(("n", "num_splits", "seed"), [(60, 1, 0), (61, 3, 5)])
def test_the_calibrated_likelihood_is_scored_on_the_other_half(n: int, num_splits: int, seed: int) -> None:
    p, y = labelled(n, 4, 2.0)
    got = cross_fitted_nll(p, y, num_splits=num_splits, seed=seed)
    assert type(got) is float
    np.testing.assert_allclose(got, cross_fitted_by_hand(p, y, num_splits, seed), rtol=1e-6)
    assert got == cross_fitted_nll(p, y, num_splits=num_splits, seed=seed)
    assert got != cross_fitted_nll(p, y, num_splits=num_splits, seed=seed + 1)


def test_the_calibrated_likelihood_does_not_see_the_confidence() -> None:
    p, y = labelled(400, 5)
    scores = [cross_fitted_nll(scaled(p, temperature), y) for temperature in (0.25, 1.0, 3.0)]
    np.testing.assert_allclose(scores, scores[0], rtol=1e-6)
    assert loss(scaled(p, 0.25), y) > 1.1 * loss(p, y)


def test_the_calibrated_likelihood_is_above_the_one_fitted_on_all_rows() -> None:
    p, y = labelled(50, 4, 3.0)
    assert cross_fitted_nll(p, y) > loss(scaled(p, best_temperature(p, y)), y)


def test_a_prediction_that_failed_makes_the_answer_nan() -> None:
    p, y = labelled(10, 3)
    p[4] = np.nan
    assert math.isnan(fit_temperature(p, y))
    assert math.isnan(cross_fitted_nll(p, y))
    np.testing.assert_array_equal(np.isnan(apply_temperature(p, 2.0)).any(-1), np.arange(10) == 4)


P4, Y4 = labelled(4, 3)
ERRORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "one-hot labels": (
        lambda: fit_temperature(P4, np.eye(3, dtype=int)[Y4]),
        ShapeError,
        r"fit_temperature: labels has shape \(4, 3\), .*write labels\.argmax\(-1\)",
    ),
    "members": (
        lambda: fit_temperature(P4[None], Y4),
        ShapeError,
        r"fit_temperature: .*write probabilities\.mean\(0\)",
    ),
    "logits": (
        lambda: fit_temperature(P4 * 3, Y4),
        DataError,
        r"fit_temperature: probabilities: row 0 sums to 3, .*write jax\.nn\.softmax\(logits\)",
    ),
    "a label too large": (lambda: cross_fitted_nll(P4, Y4 + 9), DataError, r"cross_fitted_nll: labels: \d+ in row 0"),
    "one row": (
        lambda: cross_fitted_nll(P4[:1], Y4[:1]),
        ShapeError,
        r"cross_fitted_nll: probabilities has shape \(1, 3\), expected two rows at least.*write nll\(",
    ),
    "no splits": (
        lambda: cross_fitted_nll(P4, Y4, num_splits=0),
        DataError,
        r"num_splits must be an integer of at least 1, got 0; write num_splits=5",
    ),
    "several temperatures": (
        lambda: apply_temperature(P4, jnp.ones(4)),
        ShapeError,
        r"temperature has shape \(4,\), expected a scalar.*write jax\.vmap\(apply_temperature\)",
    ),
    "temperature zero": (
        lambda: apply_temperature(P4, 0.0),
        DataError,
        r"temperature must be a number above 0, got 0\.0; write fit_temperature\(probabilities, labels\)",
    ),
    "logits to scale": (
        lambda: apply_temperature(P4 * 2, 1.0),
        DataError,
        r"apply_temperature: probabilities: row 0 sums",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_is_not_expected_is_named_with_the_line_to_write(case: str) -> None:
    call, error, message = ERRORS[case]
    with pytest.raises(error, match=message):
        call()
