"""Two processes with devices of their own: what each of them reads, saves, and has of a model."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import paraxis as px
from tests.train._checkpoint_processes import NUM_PROCESSES, VALUES
from tests.train._models import Net, assert_near, nnx_by_hand, rows
from tests.train._processes import outputs_of

pytestmark = pytest.mark.slow

START = """
import json, sys
import jax
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]))
import numpy as np, optax
from flax import nnx
import paraxis as px
from tests.train._models import Net, loss, rows
"""
READS = """
asked = []
class Rows:
    def __len__(self):
        return 12
    def __getitem__(self, row):
        asked.append(row)
        return {"number": row, "x": np.full(3, row, np.float32)}

def noisy(rows, random):
    return rows | {"noise": np.array([generator.uniform() for generator in random])}

def mixed(rows):
    return {"number": rows["number"][::-1]}

def held(leaf):
    if isinstance(leaf, np.ndarray):  # rows that do not divide by the devices, whole in each process
        return leaf.tolist()
    return {shard.index[0].start or 0: np.asarray(shard.data).tolist() for shard in leaf.addressable_shards}

found = []
for batch in px.loader(Rows(), 8, seed=1, read_ahead=0, transform=noisy).epoch(1):
    found.append({name: held(leaf) for name, leaf in batch.items()} | {"asked": asked[:]})
    asked.clear()
streamed = px.loader(lambda: [np.arange(5), np.arange(4, 8)])
batches = [held(batch) for batch in streamed.epoch(0)]
try:
    next(px.loader(Rows(), 8, seed=1, transform=mixed).batches())
except px.DataError as error:
    batches.append("for a row alone" in str(error))
print(json.dumps([found, batches]))
"""
TRAINS = """
state = px.TrainState.create(Net(), optax.adam(1e-2), ema=0.0)
state, _ = px.train_step(loss, shard=lambda name, x: 0 if name == "first.kernel" else None)(state, rows(13))
parts = [x.data.shape for x in state.params["first"]["kernel"].addressable_shards]
model, average = state.model(), state.model(ema=True)
same = bool((model.first.kernel[...] == average.first.kernel[...]).all())
values = nnx.to_pure_dict(nnx.state(model, nnx.Param)) if sys.argv[2] == "1" else {}  # it asks nothing of the other
print(json.dumps([parts, same, jax.tree.map(lambda x: np.asarray(x).tolist(), values)]))
"""


def results_of(program: str) -> list[Any]:
    return [json.loads(out.splitlines()[-1]) for out in outputs_of(2, "-c", START + program, devices=2)]


def noisy(rows: np.ndarray, random: Any) -> dict[str, np.ndarray]:
    return {"number": rows, "noise": np.array([generator.uniform() for generator in random])}


def test_each_process_reads_the_rows_of_its_own_devices() -> None:
    first, second = results_of(READS)
    alone = px.loader(np.arange(12), 8, seed=1, transform=noisy)
    for k, (mine, theirs, batch) in enumerate(zip(first[0], second[0], alone.epoch(1), strict=True)):
        rows = alone.rows(2 + k).tolist()
        half, block = len(rows) // 2, len(rows) // 4
        assert (mine["asked"], theirs["asked"]) == (rows[:half], rows[half:])
        noise = dict(zip(np.asarray(batch["number"]).tolist(), np.asarray(batch["noise"]).tolist(), strict=True))
        expected = {"number": rows, "x": [[row] * 3 for row in rows], "noise": [noise[row] for row in rows]}
        for name, values in expected.items():
            there = {int(start): found for start, found in (mine[name] | theirs[name]).items()}
            assert there == {start: values[start : start + block] for start in range(0, len(rows), block)}
    assert first[1] == [[0, 1, 2, 3, 4], {"0": [4], "1": [5]}, True]
    assert second[1] == [[0, 1, 2, 3, 4], {"2": [6], "3": [7]}, True]


def test_of_split_parameters_each_process_has_the_whole_model() -> None:
    params, _, _ = nnx_by_hand(Net(), optax.adam(1e-2), [rows(13)])
    found = results_of(TRAINS)
    assert [(parts, same) for parts, same, _ in found] == [([[1, 16]] * 2, True)] * 2
    assert_near(jax.tree.map(np.asarray, found[1][2], is_leaf=lambda x: isinstance(x, list)), params)


def test_several_processes_save_and_one_restores(tmp_path: Path) -> None:
    """Each restores what it saved; and of a damaged one, all use the one before."""
    outputs_of(NUM_PROCESSES, "-m", "tests.train._checkpoint_processes", tmp_path, devices=1)
    target = {"rows": jax.ShapeDtypeStruct((8, 3000), "float32"), "all": np.zeros((2, 3000), "float32")}
    checkpoints = px.Checkpoints(tmp_path)
    tree = checkpoints.restore({**target, "own": np.zeros((), "float32"), "n": np.zeros(3, int), "k": 0}).tree
    np.testing.assert_array_equal(tree["rows"], VALUES)
    np.testing.assert_array_equal(tree["all"], VALUES[:2])
    assert (tree["own"], tree["n"].tolist(), tree["k"], checkpoints.steps) == (2.5, [0, 1, 2], 7, (2,))
    assert (tmp_path / "damaged-3").is_dir()
