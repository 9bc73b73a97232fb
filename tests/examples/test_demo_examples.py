"""What the examples of the demo compute that no other example does, against plain JAX, NumPy and scikit-learn."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from sklearn.linear_model import LogisticRegression

import paraxis as px
from tests._support import assert_close

pytestmark = pytest.mark.slow

Example = Callable[[str], ModuleType]

NUM_CLIENTS, NUM_DIGITS = 5, 6


@pytest.fixture
def fedavg(example: Example) -> ModuleType:
    return example("fedavg_cnn")


def clients(devices: int) -> px.Axis:
    return px.Axis("clients", NUM_CLIENTS, mesh=Mesh(np.array(jax.devices()[:devices]), ("clients",)))


def a_round(module: ModuleType) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    images = rng.uniform(size=(NUM_CLIENTS, NUM_DIGITS, 28, 28, 1)).astype(np.float32)
    labels = rng.integers(0, 10, (NUM_CLIENTS, NUM_DIGITS)).astype(np.int32)
    order = rng.permuted(np.tile(np.arange(NUM_DIGITS), (NUM_CLIENTS, 1)), axis=1).reshape(NUM_CLIENTS, 2, 3)
    return module.initial(jax.random.key(0)), images, labels, order.astype(np.int32)


def by_hand(module: ModuleType, params: Any, images: Any, labels: Any, order: Any) -> tuple[Any, Any]:
    """A loop over clients and their steps, on one device."""

    @jax.jit
    def loss_and_gradient(params: Any, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, Any]:
        def cross_entropy(params: Any) -> jax.Array:
            scores = module.logits(params, images)
            return jnp.mean(jax.nn.logsumexp(scores, 1) - jnp.sum(scores * jax.nn.one_hot(labels, 10), 1))

        return jax.value_and_grad(cross_entropy)(params)

    models, losses = [], []
    for client in range(NUM_CLIENTS):
        own = params
        for batch in order[client]:
            loss, gradient = loss_and_gradient(own, images[client][batch], labels[client][batch])
            own = {name: own[name] - 0.15 * gradient[name] for name in own}
            losses.append(loss)
        models.append(own)
    return jax.tree.map(lambda *xs: jnp.mean(jnp.stack(xs), 0), *models), jnp.mean(jnp.stack(losses))


@pytest.mark.parametrize("devices", [1, 2, 5, 8])
def test_a_round_is_the_mean_of_the_clients_models(fedavg: ModuleType, devices: int) -> None:
    inputs = a_round(fedavg)
    assert_close(fedavg.make_round(clients(devices))(*inputs), by_hand(fedavg, *inputs))


@pytest.mark.parametrize("devices", [1, 3])
def test_a_run_that_was_stopped_resumes_to_the_bits_of_descent_with_momentum(
    example: Example, devices: int, tmp_path: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    module = example("stop_and_resume")
    train, test = (x.first(n) for x, n in zip(module.load_mnist(), (450, 120), strict=True))
    axis = px.Axis("batch", 1, mesh=Mesh(np.array(jax.devices()[:devices]), ("batch",)))
    trainer = module.Trainer((train, test), 2, axis)
    whole, stopped, resumed = trainer.run(), trainer.run(tmp_path / "run", 3), trainer.run(tmp_path / "run")
    assert 3 <= int(stopped.state.step) < 10 == int(resumed.state.step)
    assert "SIGTERM: stopped after step" in capfd.readouterr().err
    number = len(jax.tree.leaves(whole.state))
    assert module.differing(resumed, whole) == f"0 of {number} arrays, 0 of 10 losses"
    params = whole.state.params | {"dense_bias": whole.state.params["dense_bias"].at[3].add(0.5)}
    other = whole._replace(state=whole.state.replace(params=params))
    assert module.differing(other, whole) == f"1 of {number} arrays, 0 of 10 losses"

    made, drawn = jax.random.split(jax.random.key(0))
    params = module.initial(made)
    velocity = jax.tree.map(jnp.zeros_like, params)

    @jax.jit
    def gradient(params: Any, images: jax.Array, labels: jax.Array, key: jax.Array) -> Any:
        def mean_loss(params: Any) -> jax.Array:
            x = jax.nn.gelu(images.reshape(len(images), 784) @ params["hidden"] + params["hidden_bias"])
            x = jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x / 0.8, 0)
            scores = jax.nn.log_softmax(x @ params["dense"] + params["dense_bias"])
            return -jnp.mean(scores[jnp.arange(len(labels)), labels])

        return jax.grad(mean_loss)(params)

    for step in range(10):  # two epochs of five batches, the last one of 50 rows
        rows = trainer.data.rows(step)
        found = gradient(params, *(jnp.asarray(x[rows]) for x in train), jax.random.fold_in(drawn, step))
        rate = 0.1 * 0.5 * (1 + np.cos(np.pi * step / 10))
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, found)
        params = jax.tree.map(lambda p, v, rate=rate: p - rate * v, params, velocity)
    assert_close(whole.state.params, params, rtol=1e-4, atol=1e-5)


def test_a_streamed_fit_that_was_stopped_is_scikit_learns(example: Example) -> None:
    module = example("streamed_logreg")
    found = module.main(["--quick"])
    X, y = module.even_or_odd(module.load_mnist()[0].first(2000))
    assert X[0].reshape(14, 14)[4, 5] == pytest.approx(module.load_mnist()[0].images[0, 8:10, 10:12].mean())
    theirs = LogisticRegression(C=0.1, tol=1e-8, max_iter=1000).fit(X, y)
    for model in found["fits"].values():
        np.testing.assert_allclose(model.coef_, theirs.coef_, atol=1e-3)
    assert found["fits"]["resumed"].coef_.tobytes() == found["fits"]["not stopped"].coef_.tobytes()
    new, labels = found["held_out"]
    assert np.mean(found["predicted"] == theirs.predict(new)) > 0.995
    assert np.mean(found["predicted"] == labels) > 0.8
