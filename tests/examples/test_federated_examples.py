"""What the examples of distributed and federated learning compute, against NumPy and loops over the clients."""

from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import paraxis as px
from paraxis.testing import assert_communication
from tests._support import assert_close

pytestmark = pytest.mark.slow


@pytest.fixture
def setting() -> Any:
    return import_module("_setting")


@pytest.fixture
def model(setting: Any) -> Any:
    return setting.classifier(jax.random.key(3))


def mean(trees: list[Any], weights: list[int] | None = None) -> Any:
    return jax.tree.map(lambda *each: np.average(each, axis=0, weights=weights).astype("float32"), *trees)


def test_distributed_sgd_is_full_batch_gradient_descent() -> None:
    module = import_module("distributed_sgd")
    x, y = (a.reshape(442, *a.shape[2:]).astype(np.float64) for a in module.patients())
    expected, losses = np.zeros(11), []
    for _ in range(30):
        losses.append(np.mean((x @ expected - y) ** 2))
        expected = expected - 0.2 * 2 * x.T @ (x @ expected - y) / 442
    model, found = module.train(30)
    np.testing.assert_allclose(model, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found, losses, rtol=1e-4)


def test_fedavg_is_the_average_of_clients_trained_one_by_one(setting: Any, model: Any) -> None:
    module, trained = import_module("fedavg"), []
    data = setting.digits(module.CLIENTS, by_label=True)
    for x, y in zip(data.x, data.y, strict=True):
        own = model
        for _ in range(2):
            own = jax.tree.map(lambda p, g: p - 0.1 * g, own, jax.grad(setting.cross_entropy)(own, x, y))
        trained.append(own)
    assert_close(jax.tree.map(np.asarray, module.make_round(2, 0.1)(model, data.x, data.y)), mean(trained))


def test_clients_that_stay_away_might_as_well_not_exist(setting: Any, model: Any) -> None:
    module = import_module("fedavg_partial")
    data = setting.digits(module.CLIENTS, by_label=True)
    mask = np.arange(module.CLIENTS) % 3 == 0
    spoilt = np.where(mask[:, None, None], data.x, np.nan).astype(np.float32)
    got = module.partial_round(model, spoilt, data.y, mask)
    updates = jax.vmap(module.local_update, in_axes=(None, 0, 0))(model, data.x[mask], data.y[mask])
    assert_close(got, jax.tree.map(lambda p, u: p + u.mean(0), model, updates))


def test_a_cohort_that_is_padded_gives_what_its_clients_give_one_by_one(model: Any) -> None:
    """FedAvg's mean change and SCAFFOLD's vectors: with vectors of zeros, a new one is the mean gradient."""
    module = import_module("federated_cohorts")
    cohort = module.clients().groups.sample(module.COHORT, seed=(0, 0))

    @jax.jit
    @jax.grad
    def gradient(model: Any, x: Any, y: Any) -> jax.Array:
        logits = jax.nn.relu(x @ model["w1"] + model["b1"]) @ model["w2"] + model["b2"]
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1))

    changes, counts, vectors = [], [], []
    for index in range(len(cohort)):
        x, y = cohort[index]["x"], cohort[index]["y"]
        after, used = model, []
        for _ in range(module.LOCAL_STEPS):
            used.append(gradient(after, x, y))
            after = jax.tree.map(lambda p, g: p - module.LOCAL_RATE * g, after, used[-1])
        changes.append(jax.tree.map(jnp.subtract, after, model))
        vectors.append(mean(used))
        counts.append(len(y))
    found = jax.tree.map(np.asarray, module.mean_change(model, cohort.arrays()))
    assert_close(found, mean(changes, counts), rtol=1e-4)
    zeros = jax.tree.map(jnp.zeros_like, model)
    own = jax.tree.map(lambda p: np.zeros((len(cohort), *p.shape), "float32"), model)
    _, _, new = px.Stream(at_once=1).run(module.scaffold_round, model, zeros, cohort, px.Groups.of_arrays(own))
    assert_close(new, jax.tree.map(lambda *each: np.stack(each), *vectors), rtol=1e-3, atol=1e-5)


def test_the_hypergradient_is_the_slope_of_the_loss() -> None:
    """In float64, without Paraxis: two rounds by plain ``vmap``, and central differences in the rate."""
    module, rng = import_module("federated_autodiff"), np.random.default_rng(0)
    x, y = module.synthetic(1.0, 1.0)
    model = {"w": rng.normal(0, 0.1, (60, 10)), "b": rng.normal(0, 0.1, 10)}
    small = jax.tree.map(lambda a: a.astype(np.float32), model)
    got = module.hypergradient(np.float32(0.3), small, module.average_update(small, x, y), x, y)
    with jax.enable_x64(True):
        x64 = jnp.asarray(x, jnp.float64)
        updates = jax.jit(jax.vmap(module.client_update, in_axes=(None, 0, 0)))

        def loss(log_rate: float) -> jax.Array:
            now = jax.tree.map(jnp.asarray, model)
            for _ in range(2):
                now = jax.tree.map(lambda p, u: p + np.exp(log_rate) * u.mean(0), now, updates(now, x64, y))
            return jax.vmap(module.client_loss, in_axes=(None, 0, 0))(now, x64, y).mean()

        rate = float(np.float32(0.3))
        expected = (loss(rate + 1e-4) - loss(rate - 1e-4)) / 2e-4
    np.testing.assert_allclose(got, expected, rtol=1e-3)


def test_diloco_takes_a_nesterov_step_along_the_average_move(setting: Any, model: Any) -> None:
    module, adamw = import_module("diloco"), optax.adamw(3e-3, weight_decay=1e-2)
    x, y = module.batches(setting.digits(module.WORKERS, by_label=False), 10)
    state, expected, velocity = module.start(model), model, jax.tree.map(jnp.zeros_like, model)
    moments = [adamw.init(model)] * module.WORKERS
    for i in (0, 2):
        moved = []
        for k in range(module.WORKERS):
            own = expected
            for batch in (i, i + 1):
                gradient = jax.grad(setting.cross_entropy)(own, x[k, batch], y[k, batch])
                updates, moments[k] = adamw.update(gradient, moments[k], own)
                own = optax.apply_updates(own, updates)
            moved.append(own)
        state = module.diloco_round(state, x[:, i : i + 2], y[:, i : i + 2])
        move = jax.tree.map(jnp.subtract, expected, mean(moved))
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, move)
        expected = jax.tree.map(lambda p, g, v: p - 0.7 * (g + 0.9 * v), expected, move, velocity)
    assert_close(state.model, expected, rtol=1e-3, atol=5e-5)
    size = sum(p.nbytes for p in jax.tree.leaves(model))
    for every in (1, 10):  # a round sends the model once, whatever its length
        call = module.diloco_round, state, x[:, :every], y[:, :every]
        assert_communication(*call, all_reduce=1, all_gather=0, max_bytes=size)
