"""Micro-batches are added up to the whole batch, the same ones on any devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import paraxis as px
from tests.train._models import Net, assert_near, axis, loss, plain_by_hand, plain_loss, plain_params, rows, trained

pytestmark = pytest.mark.newest

ADAM = optax.adam(1e-2)


def weighted(params: Any, batch: Any) -> Any:
    """Rows count by their weight, which may be zero for all of a micro-batch."""
    losses = plain_loss(params, batch)
    return px.Mean(jnp.sum(losses * batch["weight"]), jnp.sum(batch["weight"])), {"losses": losses}


def weighted_mean(params: Any, batch: Any) -> jax.Array:
    return jnp.sum(plain_loss(params, batch) * batch["weight"]) / jnp.sum(batch["weight"])


def mean(params: Any, batch: Any) -> jax.Array:
    return jnp.mean(plain_loss(params, batch))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("fn", "devices", "microbatches"),
    [(mean, 8, 5), (mean, 1, 5), (weighted, 1, 3), (weighted, 8, 2), (weighted, 2, 20)],
)
def test_micro_batches_add_up_to_the_whole_batch(fn: Any, devices: int, microbatches: int) -> None:
    """For numbers of rows that are a multiple, that are none, and that are fewer than the micro-batches."""
    batches = [rows(size, size) | {"weight": np.arange(size, dtype="float32") % 3} for size in (15, 13, 3)]
    params, losses = plain_by_hand(plain_params(), ADAM, batches, weighted_mean if fn is weighted else mean)
    step = px.train_step(fn, axis=axis(devices), microbatches=microbatches)
    state, found = trained(px.TrainState.create(plain_params(), ADAM), step, batches)
    assert_near((found, state.params), (losses, params))


@pytest.mark.slow
def test_micro_batches_are_those_of_optax() -> None:
    batch, every = rows(12), optax.MultiSteps(ADAM, 4)
    parts = [jax.tree.map(lambda x, c=c: x[c::4], batch) for c in range(4)]
    params, _ = plain_by_hand(plain_params(), every, parts)
    step = px.train_step(plain_loss, axis=axis(8), microbatches=4)
    assert_near(step(px.TrainState.create(plain_params(), ADAM), batch)[0].params, params)


@pytest.mark.parametrize("devices", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_batch_norm_takes_the_same_micro_batches_on_any_devices(devices: int) -> None:
    batch, net = rows(13), Net(dropout=0)
    graph, params, rest = nnx.split(net, nnx.Param, ...)
    sums: Any = jax.tree.map(jnp.zeros_like, params)

    def total(params: Any, rest: Any, part: Any) -> Any:
        model = nnx.merge(graph, params, rest, copy=True)
        return len(part["x"]) * loss(model, part), nnx.split(model, nnx.Param, ...)[2]

    for c in range(3):
        gradient, rest = jax.jit(jax.grad(total, has_aux=True))(params, rest, {k: x[c::3] for k, x in batch.items()})
        sums = jax.tree.map(jnp.add, sums, gradient)
    expected = jax.tree.map(lambda p, s: p - 0.1 * s / 13, params, sums)
    state, _ = px.train_step(loss, axis=axis(devices), microbatches=3)(px.TrainState.create(net, optax.sgd(0.1)), batch)
    assert_near(state.params, nnx.to_pure_dict(expected))
    assert_near(state.mutable["norm"], nnx.to_pure_dict(rest)["norm"])
