"""What the examples compute, against independent computations."""

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
def setting(example):
    return example("_setting")


@pytest.fixture
def model(setting):
    return setting.classifier(jax.random.key(3))


def descent(loss, model, rate, num_steps):
    for _ in range(num_steps):
        model = jax.tree.map(lambda p, g: p - rate * g, model, jax.grad(loss)(model))
    return model


# --- distributed SGD -------------------------------------------------------------------------------------------------


def test_distributed_sgd_is_full_batch_gradient_descent(example):
    module = example("distributed_sgd")
    x, y = (a.reshape(442, *a.shape[2:]).astype(np.float64) for a in module.patients())
    expected, losses = np.zeros(11), []
    for _ in range(30):
        losses.append(np.mean((x @ expected - y) ** 2))
        expected = expected - 0.2 * 2 * x.T @ (x @ expected - y) / 442
    model, found = module.train(30)
    np.testing.assert_allclose(model, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found, losses, rtol=1e-4)


# --- FedAvg ----------------------------------------------------------------------------------------------------------


def test_fedavg_is_the_average_of_clients_trained_one_by_one(example, setting, model):
    module = example("fedavg")
    data = setting.digits(module.CLIENTS, by_label=True)
    trained = [
        descent(lambda m, x=x, y=y: setting.cross_entropy(m, x, y), model, 0.1, 2)
        for x, y in zip(data.x, data.y, strict=True)
    ]
    got = module.make_round(2, 0.1)(model, data.x, data.y)
    assert_close(got, jax.tree.map(lambda *ws: jnp.mean(jnp.stack(ws), 0), *trained))


# --- partial participation -------------------------------------------------------------------------------------------


def test_clients_that_stay_away_might_as_well_not_exist(example, setting, model):
    module = example("fedavg_partial")
    data = setting.digits(module.CLIENTS, by_label=True)
    mask = np.arange(module.CLIENTS) % 3 == 0
    spoilt = np.where(mask[:, None, None], data.x, np.nan).astype(np.float32)
    got = module.partial_round(model, spoilt, data.y, mask)
    updates = jax.vmap(module.local_update, in_axes=(None, 0, 0))(model, data.x[mask], data.y[mask])
    assert_close(got, jax.tree.map(lambda p, u: p + u.mean(0), model, updates))


# --- cohorts of clients of different size ----------------------------------------------------------------------------


def test_a_cohort_that_is_padded_gives_what_its_clients_give_one_by_one(example, model):
    """FedAvg's mean change and SCAFFOLD's vectors, by loops in NumPy over clients that are not padded."""
    module = example("federated_cohorts")
    cohort = module.clients().groups.sample(module.COHORT, seed=(0, 0))
    rate, steps = module.LOCAL_RATE, module.LOCAL_STEPS

    @jax.jit
    def gradient(model, x, y):
        return jax.grad(
            lambda m: (
                -jnp.mean(
                    jnp.take_along_axis(
                        jax.nn.log_softmax(jax.nn.relu(x @ m["w1"] + m["b1"]) @ m["w2"] + m["b2"]), y[:, None], 1
                    )
                )
            )
        )(model)

    changes, counts, vectors = [], [], []
    for index in range(len(cohort)):
        x, y = cohort[index]["x"], cohort[index]["y"]
        after, used = model, jax.tree.map(jnp.zeros_like, model)
        for _ in range(steps):
            g = gradient(after, x, y)
            after = jax.tree.map(lambda p, g: p - rate * g, after, g)
            used = jax.tree.map(lambda u, g: u + g / steps, used, g)
        changes.append(jax.tree.map(jnp.subtract, after, model))
        vectors.append(used)  # with vectors of zeros, the new one is the mean gradient
        counts.append(len(y))
    expected = jax.tree.map(lambda *each: np.average(each, axis=0, weights=counts).astype("float32"), *changes)
    padded = cohort.arrays()
    assert_close(jax.tree.map(np.asarray, module.mean_change(model, padded)), expected, rtol=1e-4)
    zeros = jax.tree.map(jnp.zeros_like, model)
    own = jax.tree.map(lambda p: np.zeros((len(cohort), *p.shape), "float32"), model)
    _, _, new = px.Stream(at_once=1).run(module.scaffold_round, model, zeros, cohort, px.Groups.of_arrays(own))
    assert_close(new, jax.tree.map(lambda *each: np.stack(each), *vectors), rtol=1e-3, atol=1e-5)


# --- federated automatic differentiation -----------------------------------------------------------------------------


def test_the_hypergradient_is_the_slope_of_the_loss(example):
    """In float64, without Paraxis: two rounds by plain ``vmap``, and central differences in the rate."""
    module = example("federated_autodiff")
    x, y = module.synthetic(1.0, 1.0)
    rng = np.random.default_rng(0)
    model = {"w": rng.normal(0, 0.1, (60, 10)), "b": rng.normal(0, 0.1, 10)}
    small = jax.tree.map(lambda a: a.astype(np.float32), model)
    log_rate = np.float32(0.3)
    update = module.average_update(small, x, y)
    got = module.hypergradient(log_rate, small, update, x, y)

    with jax.enable_x64(True):
        x64 = jnp.asarray(x, jnp.float64)
        updates = jax.jit(jax.vmap(module.client_update, in_axes=(None, 0, 0)))

        def average(model):
            return jax.tree.map(lambda u: u.mean(0), updates(model, x64, y))

        def loss(log_rate):
            now = jax.tree.map(jnp.asarray, model)
            for _ in range(2):
                now = jax.tree.map(lambda p, u: p + np.exp(log_rate) * u, now, average(now))
            return jax.vmap(module.client_loss, in_axes=(None, 0, 0))(now, x64, y).mean()

        expected = (loss(float(log_rate) + 1e-4) - loss(float(log_rate) - 1e-4)) / 2e-4
    np.testing.assert_allclose(got, expected, rtol=1e-3)


# --- DiLoCo ----------------------------------------------------------------------------------------------------------


def adamw_alone(setting, model, moments, x, y):
    adamw = optax.adamw(3e-3, weight_decay=1e-2)
    for batch_x, batch_y in zip(x, y, strict=True):
        gradient = jax.grad(setting.cross_entropy)(model, batch_x, batch_y)
        updates, moments = adamw.update(gradient, moments, model)
        model = optax.apply_updates(model, updates)
    return model, moments


def test_diloco_takes_a_nesterov_step_along_the_average_move(example, setting, model):
    module = example("diloco")
    x, y = module.batches(setting.digits(module.WORKERS, by_label=False), 4)
    state, expected, velocity = module.start(model), model, jax.tree.map(jnp.zeros_like, model)
    moments = [optax.adamw(3e-3).init(model)] * module.WORKERS
    for i in (0, 2):
        state = module.diloco_round(state, x[:, i : i + 2], y[:, i : i + 2])
        pairs = [adamw_alone(setting, expected, moments[k], x[k, i : i + 2], y[k, i : i + 2]) for k in range(len(x))]
        moments = [pair[1] for pair in pairs]
        move = jax.tree.map(lambda p, *ws: p - jnp.mean(jnp.stack(ws), 0), expected, *(pair[0] for pair in pairs))
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, move)
        expected = jax.tree.map(lambda p, g, v: p - 0.7 * (g + 0.9 * v), expected, move, velocity)
    assert_close(state.model, expected, rtol=1e-3, atol=5e-5)


def test_a_diloco_round_communicates_the_model_once_whatever_its_length(example, setting, model):
    module = example("diloco")
    x, y = module.batches(setting.digits(module.WORKERS, by_label=False), 10)
    size = sum(p.nbytes for p in jax.tree.leaves(model))
    state = module.start(model)
    for every in (1, 10):
        call = (state, x[:, :every], y[:, :every])
        assert_communication(module.diloco_round, *call, all_reduce=1, all_gather=0, max_bytes=size)
