"""From digits to calibrated probabilities: an ensemble is trained, averaged, scored and brought to a temperature."""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.datasets
import sklearn.metrics
from jax.sharding import Mesh

import paraxis as px
from paraxis import ensembles

pytestmark = pytest.mark.slow

SIZE = 5


class Digits(NamedTuple):
    ens: px.Ensemble
    train: tuple[np.ndarray, np.ndarray]
    held_out: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]


def make(key: jax.Array) -> Any:
    first, last = jax.random.split(key)
    return {"first": jax.random.normal(first, (64, 32)) / 8, "last": jax.random.normal(last, (32, 10)) / 6}


def logits(params: Any, x: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ params["first"]) @ params["last"]


def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return -jnp.mean(jax.nn.log_softmax(logits(params, x))[jnp.arange(len(y)), y])


def step(params: Any, x: jax.Array, y: jax.Array) -> Any:
    value, gradient = jax.value_and_grad(loss)(params, x, y)
    return jax.tree.map(lambda p, g: p - 0.5 * g, params, gradient), value


@pytest.fixture(scope="module")
def digits() -> Digits:
    images, labels = map(np.asarray, sklearn.datasets.load_digits(return_X_y=True))
    order = np.random.default_rng(0).permutation(len(labels))
    x, y = np.asarray(images / 16, np.float32)[order], labels[order].astype(np.int32)
    train, held_out, test = ((x[part], y[part]) for part in (slice(600), slice(600, 1200), slice(1200, None)))
    mesh = Mesh(np.array(jax.devices()[:2]), ("members",))
    ens = px.ensemble(make, SIZE, 0, apply=logits, mesh=mesh)
    history = ens.fit(step, train, batch_size=30, num_epochs=25, key=1, own_order=True)
    assert history.scanned
    assert (history.outputs[-1] < 0.2 * history.outputs[0]).all()
    return Digits(ens, train, held_out, test)


def of_members(digits: Digits, x: np.ndarray) -> np.ndarray:
    return np.asarray(jax.nn.softmax(digits.ens.members(x)))


def log_loss(p: np.ndarray, y: np.ndarray) -> float:
    wide = np.asarray(p, np.float64)
    return float(sklearn.metrics.log_loss(y, wide / wide.sum(-1, keepdims=True), labels=range(10)))


def test_the_average_is_likelier_than_its_members_are_on_average(digits: Digits) -> None:
    """Jensen's inequality: a law for every set of data, not an experience with this one."""
    x, y = digits.test
    each, p = of_members(digits, x), np.asarray(digits.ens.predict(x))
    np.testing.assert_allclose(p, each.mean(0), atol=1e-6)
    alone = [log_loss(one, y) for one in each]
    np.testing.assert_allclose([float(ensembles.nll(one, y)) for one in each], alone, rtol=1e-4)
    assert log_loss(p, y) < np.mean(alone)
    scores = ensembles.evaluate(each, y)
    np.testing.assert_allclose(scores.nll, log_loss(p, y), rtol=1e-4)
    assert scores.accuracy == pytest.approx(sklearn.metrics.accuracy_score(y, p.argmax(-1)))
    assert scores.accuracy > 0.9
    # The Brier score is convex in the probabilities too.
    assert scores.brier_score < np.mean([float(ensembles.brier_score(one, y)) for one in each])


def test_a_temperature_after_averaging_lowers_the_likelihood_that_it_was_fitted_to(digits: Digits) -> None:
    x, y = digits.held_out
    p = np.asarray(digits.ens.predict(x))
    temperature = ensembles.fit_temperature(p, y)
    fitted = np.asarray(ensembles.apply_temperature(p, temperature))
    assert log_loss(fitted, y) <= log_loss(p, y)
    for other in (0.9 * temperature, 1.1 * temperature):
        assert log_loss(fitted, y) < log_loss(np.asarray(ensembles.apply_temperature(p, other)), y)
    np.testing.assert_array_equal(fitted.argmax(-1), p.argmax(-1))
    unseen = np.asarray(ensembles.apply_temperature(digits.ens.predict(digits.test[0]), temperature))
    np.testing.assert_allclose(unseen.sum(-1), 1, rtol=1e-5)
    assert ensembles.cross_fitted_nll(p, y) == pytest.approx(log_loss(fitted, y), rel=0.2)


def test_members_disagree_more_the_more_noise_there_is(digits: Digits) -> None:
    x, y = digits.test
    noise = np.random.default_rng(1).normal(size=x.shape).astype(np.float32)
    scores = [ensembles.evaluate(of_members(digits, x + amount * noise), y) for amount in (0.0, 0.3, 0.6)]
    for less, more in itertools.pairwise(scores):
        assert more.disagreement > less.disagreement
        assert more.mutual_information > less.mutual_information
        assert more.nll > less.nll
    votes = of_members(digits, x).argmax(-1)
    pairs = [(votes[i] != votes[j]).mean() for i in range(SIZE) for j in range(i)]
    assert scores[0].disagreement == pytest.approx(np.mean(pairs), rel=1e-4)


def test_uncertain_rows_are_the_ones_to_look_at(digits: Digits) -> None:
    x, y = digits.test
    p = np.asarray(digits.ens.predict(x))
    wrong = p.argmax(-1) != y
    assert wrong.any()
    assert sklearn.metrics.roc_auc_score(wrong, np.asarray(ensembles.entropy(p))) > 0.8


@pytest.mark.slow
def test_training_longer_with_patience_ends_with_the_best_of_each(digits: Digits) -> None:
    ens = digits.ens[:3]
    history = ens.fit(
        step,
        digits.train,
        batch_size=60,
        num_epochs=6,
        key=2,
        validate=loss,
        validation=digits.held_out,
        patience=2,
    )
    assert history.validation is not None
    x, y = digits.held_out
    best = [log_loss(np.asarray(jax.nn.softmax(logits(params, jnp.asarray(x)))), y) for params in ens]
    np.testing.assert_allclose(best, history.validation.min(0), rtol=1e-3)


def test_one_that_failed_is_left_out(digits: Digits) -> None:
    x, _ = digits.test
    broken = digits.ens.add(jax.tree.map(lambda w: w * jnp.nan, digits.ens[0]))
    np.testing.assert_array_equal(broken.finite(), [True] * SIZE + [False])
    np.testing.assert_allclose(broken.predict(x, where=broken.finite()), digits.ens.predict(x), atol=1e-6)
    assert np.isnan(broken.predict(x)).all()
