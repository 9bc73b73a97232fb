"""What a step compiles to: its collectives, its traces, its memory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import paraxis as px
from paraxis.testing import assert_communication, communication
from tests.train._models import FEATURES, assert_near, axis, of_nnx, plain_loss, plain_params, rows

ADAM = optax.adam(1e-2)


def plain_state() -> px.TrainState:
    return px.TrainState.create(plain_params(), ADAM)


def test_train_step_communicates_as_a_step_by_hand() -> None:
    """With batch normalisation and dropout; a batch that does not divide adds nothing, micro-batches gather no rows."""
    mesh, model = Mesh(np.array(jax.devices()), ("batch",)), of_nnx()

    def by_hand(params: Any, opt_state: Any, batch: Any) -> Any:
        (value, rest), gradient = jax.value_and_grad(model.fn, has_aux=True)(params, model.rest, batch, 0)
        updates, opt_state = ADAM.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, rest, value

    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("batch"))
    jitted = jax.jit(by_hand, in_shardings=(whole, whole, split), out_shardings=whole)
    expected = communication(jitted, model.params, ADAM.init(model.params), rows(16)).count
    state = px.TrainState.create(model.model, ADAM)
    step = px.train_step(model.loss, axis=px.Axis("batch", 1, mesh=mesh))
    assert [communication(step, state, rows(size)).count for size in (16, 13)] == [expected] * 2
    parts = px.train_step(plain_loss, axis=axis(8), microbatches=3)
    assert_communication(parts, plain_state(), rows(13), all_gather=0, all_to_all=0, collective_permute=0)


def test_train_step_is_traced_once_for_each_number_of_rows() -> None:
    traces = []

    def spy(params: Any, batch: Any) -> jax.Array:
        traces.append(batch["x"].shape)
        return plain_loss(params, batch)

    step, state = px.train_step(spy, axis=axis(2)), plain_state()
    for size in (6, 5, 6, 5, 6):
        state, _ = step(state, rows(size))
    assert traces == [(6, FEATURES), (5, FEATURES)]


@pytest.mark.parametrize("donate", [True, False])
def test_train_step_uses_the_memory_of_a_state_again_if_it_may(donate: bool) -> None:
    given = jax.tree.map(jnp.asarray, plain_params())
    state = px.TrainState.create(given, ADAM)
    px.train_step(plain_loss, axis=axis(1), donate=donate)(state, rows(6))
    assert state.params["w"].is_deleted() == donate
    assert not given["w"].is_deleted()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_train_step_uses_a_mesh_that_is_set(kind: AxisType) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("batch", "model"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        state, metrics = px.train_step(plain_loss)(plain_state(), rows(5))
    assert_near(float(metrics["loss"]), np.mean(np.asarray(plain_loss(plain_params(), rows(5)))))
    assert len(state.params["w"].devices()) == 4


def test_a_batch_on_the_host_may_be_changed_once_a_step_returns() -> None:
    batch = {"x": np.ones((1 << 16, FEATURES), "float32"), "y": np.ones(1 << 16, "float32")}
    step, state = px.train_step(plain_loss, axis=axis(8), donate=False), plain_state()
    _, expected = step(state, jax.tree.map(np.copy, batch))
    _, metrics = step(state, batch)
    for x in batch.values():
        x[:] = np.nan
    assert float(metrics["loss"]) == float(expected["loss"])
