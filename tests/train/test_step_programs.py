"""What a step compiles to: its collectives, its traces, its memory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import paraxis as px
from paraxis.testing import assert_communication, communication
from tests.train._models import FEATURES, Net, assert_near, axis, loss, plain_loss, plain_params, rows

ADAM = optax.adam(1e-2)


def test_a_step_communicates_as_one_written_by_hand() -> None:
    """With batch normalisation, on a batch that divides; one that does not adds nothing."""
    mesh = Mesh(np.array(jax.devices()), ("batch",))
    state = px.TrainState.create(Net(dropout=0), ADAM)

    def by_hand(params: Any, opt_state: Any, batch: Any) -> Any:
        def of(params: Any) -> Any:
            model, after = state.recipe.form.make(params, state.mutable, None, "train")
            return loss(model, batch), after()

        (value, rest), gradient = jax.value_and_grad(of, has_aux=True)(params)
        updates, opt_state = ADAM.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, rest, value

    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("batch"))
    jitted = jax.jit(by_hand, in_shardings=(whole, whole, split), out_shardings=whole)
    expected = communication(jitted, state.params, state.opt_state, rows(16)).count
    step = px.train_step(loss, axis=px.Axis("batch", 1, mesh=mesh))
    assert [communication(step, state, rows(size)).count for size in (16, 13)] == [expected] * 2


def test_micro_batches_bring_no_rows_together() -> None:
    step = px.train_step(plain_loss, axis=axis(8), microbatches=3)
    state = px.TrainState.create(plain_params(), ADAM)
    assert_communication(step, state, rows(13), all_gather=0, all_to_all=0, collective_permute=0)


@pytest.mark.parametrize("devices", [1, 2])
def test_there_is_one_trace_per_number_of_rows(devices: int) -> None:
    traces = []

    def spy(params: Any, batch: Any) -> jax.Array:
        traces.append(batch["x"].shape)
        return plain_loss(params, batch)

    step, state = px.train_step(spy, axis=axis(devices)), px.TrainState.create(plain_params(), ADAM)
    for size in (6, 5, 6, 5, 6):
        state, _ = step(state, rows(size))
    assert traces == [(6, FEATURES), (5, FEATURES)]


@pytest.mark.parametrize("donate", [True, False])
def test_the_memory_of_a_state_is_used_again_if_it_may_be(donate: bool) -> None:
    given = jax.tree.map(jnp.asarray, plain_params())
    state = px.TrainState.create(given, ADAM)
    px.train_step(plain_loss, axis=axis(1), donate=donate)(state, rows(6))
    assert state.params["w"].is_deleted() == donate
    assert not given["w"].is_deleted()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_a_mesh_that_is_set_is_used(kind: Any) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("batch", "model"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        state, metrics = px.train_step(plain_loss)(px.TrainState.create(plain_params(), ADAM), rows(5))
    assert_near(float(metrics["loss"]), np.mean(np.asarray(plain_loss(plain_params(), rows(5)))))
    assert len(state.params["w"].devices()) == 4


def test_a_batch_on_the_host_may_be_changed_once_a_step_returns() -> None:
    batch = {"x": np.ones((1 << 16, FEATURES), "float32"), "y": np.ones(1 << 16, "float32")}
    step = px.train_step(plain_loss, axis=axis(8), donate=False)
    state = px.TrainState.create(plain_params(), ADAM)
    _, expected = step(state, jax.tree.map(np.copy, batch))
    _, metrics = step(state, batch)
    for x in batch.values():
        x[:] = np.nan
    assert float(metrics["loss"]) == float(expected["loss"])
