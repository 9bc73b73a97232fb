"""Two processes with two devices each, parameters split over all four: each gets the whole model."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest

from tests.train._models import Net, nnx_by_hand, rows

ROOT = Path(__file__).parents[2]
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


def both() -> list[Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    env = {**os.environ, "PYTHONPATH": path, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    env.pop("JAX_COMPILATION_CACHE_DIR", None)  # its entries are not written atomically
    command = [sys.executable, "-c", PROGRAM, port]
    running = [
        subprocess.Popen([*command, str(rank)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        done = [process.communicate(timeout=240) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], done
    return [json.loads(out.splitlines()[-1]) for out, _ in done]


@pytest.mark.slow
def test_each_process_has_the_whole_model() -> None:
    params, rest, _ = nnx_by_hand(Net(), optax.adam(1e-2), [rows(13)])
    found = both()
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
