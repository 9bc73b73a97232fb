"""One of two processes that meet NaN, read, divide and save: ``python -m tests.processes._ranks DIRECTORY``."""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import paraxis as px

HERE = px.initialize()

from tests import _fits as fits, _steps as models  # noqa: E402  they make arrays


def meet_nan(directory: Path) -> str:
    """In the last row of the second batch, which rank 1 has."""
    arrays = fits.arrays()
    arrays["x"][px.loader(arrays, fits.BATCH, seed=1).rows(1)[-1], 1] = np.nan
    try:
        data = px.loader(arrays, fits.BATCH, seed=1)
        px.fit(fits.start(), px.train_step(fits.loss), data, epochs=1, checkpoint=directory / "bad")
    except px.NonFiniteError as error:
        return str(error)
    return ""


class Rows:
    asked: list[int] = []  # noqa: RUF012  by the number of a row

    def __len__(self) -> int:
        return 12

    def __getitem__(self, row: int) -> int:
        self.asked.append(row)
        return row


def held(leaf: Any) -> Any:
    """By their first rows, the parts that this process has; or all, on the host, where rows do not divide."""
    if isinstance(leaf, np.ndarray):
        return leaf.tolist()
    return {shard.index[0].start or 0: np.asarray(shard.data).tolist() for shard in leaf.addressable_shards}


def read() -> Any:
    found = []
    for batch in px.loader(Rows(), 8, seed=1, read_ahead=0, transform=fits.noisy).epoch(1):
        found.append({name: held(leaf) for name, leaf in batch.items()} | {"asked": Rows.asked[:]})
        Rows.asked.clear()
    streamed = px.loader(lambda: [np.arange(5), np.arange(4, 8)])
    batches = [held(batch) for batch in streamed.epoch(0)]
    try:
        next(px.loader(Rows(), 8, seed=1, transform=lambda rows: rows[::-1]).batches())
    except px.DataError as error:
        batches.append("for a row alone" in str(error))
    return found, batches


def divide() -> Any:
    """A step with parameters in parts: their shapes, and the whole model in rank 1, which asks nothing of the other."""
    state = px.TrainState.create(models.Net(), optax.adam(1e-2), ema=0.0)
    step = px.train_step(models.loss, shard=lambda name, x: 0 if name == "first.kernel" else None)
    state, _ = step(state, models.rows(13))
    parts = [x.data.shape for x in state.params["first"]["kernel"].addressable_shards]
    both = [state.model(ema=ema) for ema in (False, True)]  # in all processes
    values = [nnx.to_pure_dict(nnx.state(model, nnx.Param)) for model in both if HERE.process]
    return parts, jax.tree.map(lambda x: np.asarray(x).tolist(), values)


def save(path: Path) -> None:
    """Each restores what it saved; and of a damaged one, all use the one before."""
    over = NamedSharding(Mesh(np.array(jax.devices()), ("rows",)), P("rows"))
    numbers = np.arange(24_000, dtype=np.float32).reshape(8, 3000)
    spread = jax.make_array_from_callback(numbers.shape, over, lambda index: numbers[index])
    own = jax.device_put(jnp.float32(2.5), jax.local_devices()[0])
    tree: dict[str, Any] = {"rows": spread, "own": own, "n": np.arange(3), "k": 7}
    with px.Checkpoints(path, keep=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, tree, {"step": step})
    restored = checkpoints.restore(jax.tree.map(lambda x: x * 0, tree))
    assert (checkpoints.steps, restored.step, restored.notes) == ((2, 3), 3, {"step": 3})
    assert restored.tree["rows"].sharding == over
    for shard in restored.tree["rows"].addressable_shards:
        np.testing.assert_array_equal(shard.data, numbers[shard.index])
    assert (float(restored.tree["own"]), restored.tree["n"].tolist(), restored.tree["k"]) == (2.5, [0, 1, 2], 7)
    if HERE.process == 0:
        file = max((f for f in (checkpoints.path / "3").rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
        file.write_bytes(file.read_bytes()[::-1])
    multihost_utils.sync_global_devices("a checkpoint is damaged")
    assert checkpoints.restore(tree).step == 2


if __name__ == "__main__":
    DIRECTORY = Path(sys.argv[1])
    RESULT = {"nan": meet_nan(DIRECTORY), "read": read(), "divided": divide()}
    for EPOCHS in (1, 2):  # then on from the checkpoint
        RESULT["members"] = fits.members(EPOCHS, checkpoint=DIRECTORY / "members")
    save(DIRECTORY / "saved")
    (DIRECTORY / f"result-{HERE.process}.json").write_text(json.dumps(RESULT))
