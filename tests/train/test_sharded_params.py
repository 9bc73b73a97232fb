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


@pytest.mark.parametrize(("shard", "limit"), [("params", 1 / 8), (by_name, 0.3)])  # the rule leaves a sixth whole
def test_parameters_in_parts_give_the_same_numbers(shard: Any, limit: float) -> None:
    batches = [rows(13, seed) for seed in range(2)]
    params, losses = plain_by_hand(WIDE, ADAM, batches)
    step = px.train_step(plain_loss, axis=axis(8), shard=shard)
    state, found = trained(px.TrainState.create(WIDE, ADAM, ema=0.9), step, batches)
    assert_near((found, state.params), (losses, params))
    kept = (state.params, state.opt_state, state.ema)
    assert on_one_device(kept) <= limit * sum(x.nbytes for x in jax.tree.leaves(kept)) + 64


def test_small_and_indivisible_parameters_stay_whole() -> None:
    shapes = {"small": (8,), "odd": (999, 3), "large": (4, 2048)}
    state = px.TrainState.create({k: np.ones(s, "float32") for k, s in shapes.items()}, optax.sgd(0.1, momentum=0.9))
    step = px.train_step(lambda p, b: sum(x.sum() for x in p.values()) * b["x"].mean(), axis=axis(8), shard="params")
    state, _ = step(state, {"x": np.ones(16, "float32")})
    parts = {name: x.addressable_shards[0].data.shape for name, x in state.params.items()}
    assert parts == {"small": (8,), "odd": (999, 3), "large": (4, 256)}
    assert on_one_device(state.opt_state) == on_one_device(state.params)
