"""No public face: the demo prints what comes of all rounds, not the models of one.

A round on the devices, against the same arithmetic written as a loop over clients on one device.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import paraxis as px
from paraxis.cli.demo.fedavg import _model, _rounds
from paraxis.testing import assert_communication
from tests._support import assert_close

pytestmark = pytest.mark.slow

NUM_CLIENTS, NUM_DIGITS = 5, 6


def placed(name: str, size: int, devices: int) -> px.Axis:
    return px.Axis(name, size, mesh=Mesh(np.array(jax.devices()[:devices]), ("devices",)), over="devices")


def a_round() -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    images = rng.uniform(size=(NUM_CLIENTS, NUM_DIGITS, 28, 28, 1)).astype(np.float32)
    labels = rng.integers(0, 10, (NUM_CLIENTS, NUM_DIGITS)).astype(np.int32)
    order = rng.permuted(np.tile(np.arange(NUM_DIGITS), (NUM_CLIENTS, 1)), axis=1).reshape(NUM_CLIENTS, 2, 3)
    return _model.init(jax.random.key(0)), images, labels, order.astype(np.int32)


@jax.jit
def loss_and_gradient(params: _model.Params, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, Any]:
    def cross_entropy(params: _model.Params) -> jax.Array:
        scores = _model.logits(params, images)
        right = jnp.sum(scores * jax.nn.one_hot(labels, 10), axis=1)
        return jnp.mean(jax.nn.logsumexp(scores, axis=1) - right)

    return jax.value_and_grad(cross_entropy)(params)


def by_hand(params: _model.Params, images: np.ndarray, labels: np.ndarray, order: np.ndarray) -> tuple[Any, Any]:
    models, losses = [], []
    for client in range(NUM_CLIENTS):
        own = params
        for batch in order[client]:
            loss, gradient = loss_and_gradient(own, images[client][batch], labels[client][batch])
            own = {name: own[name] - _rounds.LEARNING_RATE * gradient[name] for name in own}
            losses.append(loss)
        models.append(own)
    mean = {name: jnp.asarray(np.mean([np.asarray(model[name]) for model in models], axis=0)) for name in params}
    return mean, jnp.asarray(np.mean(losses))


@pytest.mark.parametrize("devices", [1, 2, 5, 8])
def test_a_round_is_the_mean_of_the_clients_models(devices: int) -> None:
    inputs = a_round()
    actual = _rounds.make_round(placed("clients", NUM_CLIENTS, devices))(*inputs)
    assert_close(actual, by_hand(*inputs))


def test_only_the_model_and_the_loss_are_communicated() -> None:
    params, *rows = a_round()
    clients = placed("clients", NUM_CLIENTS, 5)
    size = sum(leaf.size for leaf in params.values()) + 1
    everything = (params, *px.scatter(tuple(rows), clients))
    kinds = {"all_gather": 0, "reduce_scatter": 0, "all_to_all": 0, "collective_permute": 0, "collective_broadcast": 0}
    assert_communication(_rounds.make_round(clients), *everything, all_reduce=1, max_bytes=4 * size, **kinds)


@pytest.mark.parametrize("devices", [1, 3])
def test_accuracy_is_the_share_of_digits_that_are_right(devices: int) -> None:
    params, images, labels, _ = a_round()
    images, labels = images[:, 0], labels[:, 0]
    best = np.argmax(np.asarray(_model.logits(params, images)), axis=1)
    labels[:3] = best[:3]
    expected = np.mean(best == labels)
    assert expected > 0
    accuracy = _rounds.make_test(placed("digits", NUM_CLIENTS, devices))(params, images, labels)
    np.testing.assert_allclose(accuracy, expected, rtol=1e-6)
