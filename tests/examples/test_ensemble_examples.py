"""What the examples of ensembles compute, against NumPy and against single members trained by plain JAX."""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from tests._support import assert_close

pytestmark = pytest.mark.slow

Example = Callable[[str], ModuleType]


@pytest.fixture
def digits(example: Example) -> Any:
    return loaded(example("_mnist"))


@functools.cache
def loaded(module: ModuleType) -> Any:
    return module.load_mnist()


# --- the page's CNN --------------------------------------------------------------------------------------------------


def by_hand(module: ModuleType, state: Any, batches: Any) -> Any:
    """One member's parameters after momentum by hand on cross-entropy."""

    @jax.jit
    def gradient(params: Any, images: jax.Array, labels: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            logits = module.CNN().apply({"params": params}, images)
            return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(labels, 10), -1))

        return jax.grad(loss)(params)

    params, velocity = state.params, jax.tree.map(jnp.zeros_like, state.params)
    for images, labels in batches:
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, gradient(params, images, labels))
        params = jax.tree.map(lambda p, v: p - 0.1 * v, params, velocity)
    return jax.tree.map(np.asarray, params)


def test_members_are_the_same_whatever_their_number_and_the_devices(example: Example, digits: Any) -> None:
    module = example("ensemble_mnist")
    found = module.compare(digits, 3)
    assert sorted(found) == [(size, count) for size in (1, 2, 5, 7) for count in (2, 8)]
    made = px.ensemble(module.create_train_state, 7, 0)
    batches = module.batches(digits[0], jax.random.key(2), 3)
    expected = [by_hand(module, made[index], batches) for index in range(7)]
    logits = jnp.stack([module.CNN().apply({"params": own}, digits[1].images[:200]) for own in expected])
    each = np.asarray(jax.nn.softmax(logits))
    for (size, _), (params, probs) in found.items():
        assert_close(params, jax.tree.map(lambda *xs: np.stack(xs), *expected[:size]), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(probs, each[:size].mean(0), rtol=1e-3, atol=1e-5)


# --- uncertainty -----------------------------------------------------------------------------------------------------


def test_scores_are_those_of_disjoint_ensembles_by_numpy(example: Example) -> None:
    found = example("ensemble_uncertainty").main(["--quick"])
    ens = found["ensemble"]
    assert len(ens) == 6
    for name, digits in found["sets"].items():
        scores = found["scores"][name]
        assert {size: x.shape for size, x in scores.items()} == {1: (6, 6), 2: (3, 6), 3: (2, 6), 5: (1, 6)}
        each = np.asarray(jax.nn.softmax(jnp.stack([_mlp(params, digits.images) for params, _ in ens])), np.float64)
        rows = np.arange(len(digits.labels))
        for size, x in scores.items():
            for i, (accuracy, nll, brier, _, calibrated, disagreement) in enumerate(x):
                own = each[i * size : (i + 1) * size]
                p = own.mean(0)
                assert accuracy == pytest.approx((p.argmax(-1) == digits.labels).mean(), abs=0.006)  # one tie
                assert nll == pytest.approx(-np.log(p[rows, digits.labels]).mean(), rel=1e-3)
                assert brier == pytest.approx(((p - np.eye(10)[digits.labels]) ** 2).sum(-1).mean(), rel=1e-3)
                votes = own.argmax(-1)
                pairs = [np.mean(votes[a] != votes[b]) for a in range(size) for b in range(a)]
                assert disagreement == pytest.approx(np.mean(pairs) if pairs else 0, abs=0.006)
                assert np.isfinite(calibrated)
        # The likelihood of an average is never worse than the members' on average: log is concave.
        assert scores[2][:, 1].mean() <= scores[1][:, 1].mean() + 1e-5
        assert scores[3][:, 1].mean() <= scores[1][:, 1].mean() + 1e-5


def _mlp(params: Any, images: np.ndarray) -> jax.Array:
    hidden = jnp.maximum(images.reshape(len(images), 784) @ params["w1"] + params["b1"], 0)
    return hidden @ params["w2"] + params["b2"]
