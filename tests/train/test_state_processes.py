"""Two processes with two devices each, parameters split over all four: each gets the whole model."""

import json

import numpy as np
import optax
import pytest

from tests.train._models import Net, nnx_by_hand, rows
from tests.train._processes import outputs_of

PROGRAM = """
import json, sys
import jax
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]))
import numpy as np, optax
from flax import nnx
import paraxis as px
from tests.train._models import Net, loss, rows

state = px.TrainState.create(Net(), optax.adam(1e-2), ema=0.0)
state, _ = px.train_step(loss, shard=lambda name, x: 0 if name == "first.kernel" else None)(state, rows(13))
parts = [x.data.shape for x in state.params["first"]["kernel"].addressable_shards]
model, average = state.model(), state.model(ema=True)
same = bool((model.first.kernel[...] == average.first.kernel[...]).all())
values = []
if sys.argv[2] == "1":  # it asks nothing of the other process
    model.eval()
    values = nnx.to_pure_dict(nnx.state(model, nnx.Param)), model(rows(3)["x"])
    values = jax.tree.map(lambda x: np.asarray(x).tolist(), values)
print(json.dumps([parts, same, values]))
"""


@pytest.mark.slow
def test_each_process_has_the_whole_model() -> None:
    params, rest, _ = nnx_by_hand(Net(), optax.adam(1e-2), [rows(13)])
    found = [json.loads(out.splitlines()[-1]) for out in outputs_of(2, "-c", PROGRAM, devices=2)]
    assert [parts for parts, _, _ in found] == [[[1, 16]] * 2] * 2
    assert [same for _, same, _ in found] == [True, True]
    kept, outputs = found[1][2]
    for layer, name in (("first", "kernel"), ("norm", "scale"), ("last", "kernel"), ("last", "bias")):
        np.testing.assert_allclose(kept[layer][name], params[layer][name], rtol=1e-4, atol=2e-5)
    hidden = rows(3)["x"] @ params["first"]["kernel"]
    normed = (hidden - rest["norm"]["mean"]) / np.sqrt(np.asarray(rest["norm"]["var"]) + 1e-5)
    normed = normed * params["norm"]["scale"] + params["norm"]["bias"]
    expected = np.maximum(normed, 0) @ params["last"]["kernel"] + params["last"]["bias"]
    np.testing.assert_allclose(outputs, expected[:, 0], rtol=1e-4, atol=2e-5)
