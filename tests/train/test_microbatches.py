"""Micro-batches are added up to the whole batch, the same ones on any devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import paraxis as px
from tests.train._models import (
    Net,
    Rows,
    assert_near,
    axis,
    loss,
    plain_by_hand,
    plain_loss,
    plain_params,
    rows,
    trained,
)

pytestmark = pytest.mark.newest

ADAM = optax.adam(1e-2)


def cut(batch: Rows, number: int) -> list[Rows]:
    return [jax.tree.map(lambda x, c=c: x[c::number], batch) for c in range(number)]


def weighted(params: Any, batch: Any) -> Any:
    """Rows count by their weight, which may be zero for all of a micro-batch."""
    losses = plain_loss(params, batch)
    return px.Mean(jnp.sum(losses * batch["weight"]), jnp.sum(batch["weight"])), {"losses": losses}


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("devices", "microbatches"), [(1, 3), (8, 2), (2, 20)])
def test_micro_batches_add_up_to_the_whole_batch(devices: int, microbatches: int) -> None:
    batch = rows(13) | {"weight": np.arange(13, dtype="float32") % 3}

    def mean(params: Any, batch: Any) -> jax.Array:
        return jnp.sum(plain_loss(params, batch) * batch["weight"]) / 12

    params, losses = plain_by_hand(plain_params(), ADAM, [batch, batch], mean)
    step = px.train_step(weighted, axis=axis(devices), microbatches=microbatches)
    state, found = trained(px.TrainState.create(plain_params(), ADAM), step, [batch, batch])
    assert_near(found, losses)
    assert_near(state.params, params)
    _, metrics = step(px.TrainState.create(plain_params(), ADAM), batch)
    assert_near(float(metrics["losses"]), np.mean(plain_loss(plain_params(), batch)))


@pytest.mark.parametrize("devices", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_the_gradient_is_that_of_the_whole_batch(devices: int) -> None:
    """For numbers of rows that are a multiple, that are none, and that are fewer than the micro-batches."""
    batches = [rows(size, size) for size in (15, 13, 3)]
    params, losses = plain_by_hand(plain_params(), ADAM, batches)
    step = px.train_step(lambda p, batch: jnp.mean(plain_loss(p, batch)), axis=axis(devices), microbatches=5)
    state, found = trained(px.TrainState.create(plain_params(), ADAM), step, batches)
    assert_near(found, losses)
    assert_near(state.params, params)


@pytest.mark.slow
def test_micro_batches_are_those_of_optax() -> None:
    batch, every = rows(12), optax.MultiSteps(ADAM, 4)
    params = jax.tree.map(jnp.asarray, plain_params())
    opt_state = every.init(params)
    for part in cut(batch, 4):
        gradient = jax.grad(lambda p, part=part: jnp.mean(plain_loss(p, part)))(params)
        updates, opt_state = every.update(gradient, opt_state, params)
        params: Any = optax.apply_updates(params, updates)
    step = px.train_step(plain_loss, axis=axis(8), microbatches=4)
    assert_near(step(px.TrainState.create(plain_params(), ADAM), batch)[0].params, params)


@pytest.mark.parametrize("devices", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_batch_norm_takes_the_same_micro_batches_on_any_devices(devices: int) -> None:
    batch, net = rows(13), Net(dropout=0)
    graph, params, rest = nnx.split(net, nnx.Param, ...)
    sums: Any = jax.tree.map(jnp.zeros_like, params)
    for part in cut(batch, 3):

        def total(params: Any, rest: Any, part: Any) -> Any:
            model = nnx.merge(graph, params, rest, copy=True)
            return len(part["x"]) * loss(model, part), nnx.split(model, nnx.Param, ...)[2]

        gradient, rest = jax.jit(jax.grad(total, has_aux=True))(params, rest, part)
        sums = jax.tree.map(jnp.add, sums, gradient)
    expected = jax.tree.map(lambda p, s: p - 0.1 * s / 13, params, sums)

    step = px.train_step(loss, axis=axis(devices), microbatches=3)
    state, _ = step(px.TrainState.create(net, optax.sgd(0.1)), batch)
    assert_near(state.params, nnx.to_pure_dict(expected))
    assert_near(state.mutable["norm"], nnx.to_pure_dict(rest)["norm"])
