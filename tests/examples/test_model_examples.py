"""What the examples of ensembles, linear models and private gradients compute, against NumPy, JAX and scikit-learn."""

from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss

from tests._support import assert_close
from tests.examples.conftest import Quick

pytestmark = pytest.mark.slow


def test_scores_are_those_of_disjoint_ensembles_by_numpy(quick: Quick) -> None:
    found, _, _ = quick("ensemble_uncertainty")
    for name, digits in found["sets"].items():
        logits = jnp.stack([_mlp(params, digits.images) for params, _ in found["ensemble"]])
        each, rows = np.asarray(jax.nn.softmax(logits), np.float64), np.arange(len(digits.labels))
        assert {size: x.shape for size, x in found["scores"][name].items()} == {
            size: (6 // size, 6) for size in (1, 2, 3, 5)
        }
        for size, x in found["scores"][name].items():
            for i, (accuracy, nll, brier, *_) in enumerate(x):
                p = each[i * size : (i + 1) * size].mean(0)
                assert accuracy == pytest.approx((p.argmax(-1) == digits.labels).mean(), abs=0.006)  # one tie
                assert nll == pytest.approx(-np.log(p[rows, digits.labels]).mean(), rel=1e-3)
                assert brier == pytest.approx(((p - np.eye(10)[digits.labels]) ** 2).sum(-1).mean(), rel=1e-3)


def _mlp(params: Any, images: np.ndarray) -> jax.Array:
    hidden = jnp.maximum(images.reshape(len(images), 784) @ params["w1"] + params["b1"], 0)
    return hidden @ params["w2"] + params["b2"]


@pytest.mark.parametrize("devices", [1, 3, 8])
def test_the_loop_of_sharded_logreg_ends_at_scikit_learns_solution(devices: int) -> None:
    """Ten classes that overlap, so that there is a solution without a penalty; rows that do not divide by 8."""
    module, rng = import_module("sharded_logreg"), np.random.default_rng(0)
    y = rng.integers(0, 10, 1_003)
    x = (rng.normal(size=(10, 12))[y] / 2 + rng.normal(size=(1_003, 12))).astype(np.float32)
    run = module.minimise(module.on_devices(module.Labelled(x, y.astype(np.int32)), devices), 30)
    coef = LogisticRegression(C=np.inf, fit_intercept=False, max_iter=5_000, tol=1e-10).fit(x.astype(float), y).coef_.T
    scores = np.exp(x @ coef)
    assert run.values[-1] == pytest.approx(log_loss(y, scores / scores.sum(1, keepdims=True)), rel=1e-6)
    # Without a penalty, the same may be added to the coefficients of every class.
    np.testing.assert_allclose(*(c - c.mean(1, keepdims=True) for c in (np.asarray(run.params), coef)), atol=1e-3)
    assert run.communicated.total_count == (2 if devices > 1 else 0)


def test_a_table_with_text_and_gaps_is_fitted_as_by_scikit_learn(quick: Quick) -> None:
    module, (found, _, _) = import_module("fit_table"), quick("fit_table")
    table = module.patients()
    y, income = table["sick"].to_numpy(), table["income"].to_numpy()
    train = module.train_test_split(np.arange(len(y)), test_size=0.2, random_state=0)[0]
    numbers = {name: table[name].to_numpy() for name in ("age", "visits")}
    numbers |= {"income": np.where(np.isnan(income), np.nanmean(income[train]), income)}
    columns = {f"number__{name}": (x - x[train].mean()) / x[train].std() for name, x in numbers.items()}
    for name, level in (("smoker", "yes"), ("smoker", "no"), ("city", "Bern"), ("city", "Basel")):
        columns[f"text__{name}_{level}"] = table[name].to_numpy() == level
    theirs = LogisticRegression(C=found["model"].C, solver="newton-cholesky", tol=1e-10)
    theirs.fit(np.transpose([*columns.values()])[train], y[train])
    np.testing.assert_allclose([found["coefficients"][name] for name in columns], theirs.coef_[0], atol=1e-4)
    assert found["scores"]["the model"] > found["scores"]["no column"] + 0.2


@pytest.mark.parametrize("parallel", [False, True])
def test_a_private_step_is_a_noisy_mean_of_clipped_gradients(parallel: bool) -> None:
    module, data = import_module("private_gradients"), import_module("_setting").digits(1, by_label=False)
    x, labels = data.x[0], data.y[0]

    def weights(net: Any) -> list[jax.Array]:
        """Bias and kernel of the first and the last layer, in the order of the variables' names."""
        return [p[...] for layer in (net.layers[0], net.layers[2]) for p in (layer.bias, layer.kernel)]

    def loss(w: list[jax.Array], x: jax.Array, label: jax.Array) -> jax.Array:
        return -jax.nn.log_softmax(jnp.maximum(x @ w[1] + w[0], 0) @ w[3] + w[2])[label]

    w = weights(module.classifier())
    rows = np.random.default_rng(0).choice(len(x), module.BATCH, replace=False)
    each = jax.vmap(jax.grad(loss), in_axes=(None, 0, 0))(w, x[rows], labels[rows])
    norms = np.sqrt(sum(np.sum(np.asarray(g).reshape(len(g), -1) ** 2, axis=1) for g in each))
    keys = jax.random.split(jax.random.fold_in(jax.random.key(1), 0), 4)
    total = [jnp.tensordot(np.minimum(1, 1 / norms), g, 1) for g in each]
    total = [g + 2.0 * jax.random.normal(k, g.shape) for k, g in zip(keys, total, strict=True)]
    net, before, after = module.train(1, 2.0, x, labels, parallel=parallel)
    assert_close(weights(net), [p - 0.5 * g / module.BATCH for p, g in zip(w, total, strict=True)], rtol=1e-4)
    assert (before, after) == (pytest.approx(norms.max(), rel=1e-4), pytest.approx(1.0, rel=1e-5))
