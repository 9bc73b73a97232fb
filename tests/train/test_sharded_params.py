"""Parameters in parts on the devices: the same numbers, and less of them on each."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import paraxis as px
from tests.train._models import assert_near, axis, plain_by_hand, plain_loss, plain_params, rows, trained

ADAM = optax.adam(1e-2)
WIDE = plain_params(width=1024)


def on_one_device(tree: Any) -> int:
    """Bytes that the first device holds of it."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def by_name(name: str, x: Any) -> Any:
    return {"w": PartitionSpec(None, "batch"), "v": 0}.get(name)


@pytest.mark.parametrize("shard", ["params", by_name])
def test_parameters_in_parts_give_the_same_numbers(shard: Any) -> None:
    batches = [rows(13, seed) for seed in range(2)]
    params, losses = plain_by_hand(WIDE, ADAM, batches)
    step = px.train_step(plain_loss, axis=axis(8), shard=shard)
    state, found = trained(px.TrainState.create(WIDE, ADAM, ema=0.9), step, batches)
    assert_near(found, losses)
    assert_near(state.params, params)
    kept = (state.params, state.opt_state, state.ema)
    whole = sum(x.nbytes for x in jax.tree.leaves(kept))
    limit = 1 / 8 if shard == "params" else 0.3  # the rule leaves b, a sixth of all, whole
    assert on_one_device(kept) <= limit * whole + 64


def test_small_and_indivisible_parameters_stay_whole() -> None:
    params = {
        "small": np.ones(8, "float32"),
        "odd": np.ones((999, 3), "float32"),
        "large": np.ones((4, 2048), "float32"),
    }
    state = px.TrainState.create(params, optax.sgd(0.1, momentum=0.9))
    step = px.train_step(lambda p, b: sum(x.sum() for x in p.values()) * b["x"].mean(), axis=axis(8), shard="params")
    state, _ = step(state, {"x": np.ones(16, "float32")})
    parts = {name: x.addressable_shards[0].data.shape for name, x in state.params.items()}
    assert parts == {"small": (8,), "odd": (999, 3), "large": (4, 256)}
    assert on_one_device(state.opt_state) == on_one_device(state.params)
