"""Two processes with two devices each: what each of them reads, and what lies there."""

import json
from typing import Any

import numpy as np
import pytest

import paraxis as px
from tests.train._processes import outputs_of

PROGRAM = """
import json, sys
import jax
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]))
import numpy as np
import paraxis as px

asked = []
class Rows:
    def __len__(self):
        return 12
    def __getitem__(self, row):
        asked.append(row)
        return {"number": row, "x": np.full(3, row, np.float32)}

def flipped(rows, random):
    return rows | {"noise": np.array([generator.uniform() for generator in random])}

def held(leaf):
    if isinstance(leaf, np.ndarray):  # rows that do not divide by the devices, whole in each process
        return leaf.tolist()
    return {shard.index[0].start or 0: np.asarray(shard.data).tolist() for shard in leaf.addressable_shards}

data = px.loader(Rows(), 8, seed=1, read_ahead=0, transform=flipped)
found = []
for batch in data.epoch(1):
    found.append({name: held(leaf) for name, leaf in batch.items()} | {"asked": asked[:]})
    asked.clear()

streamed = px.loader(lambda: [np.arange(5), np.arange(4, 8)])
batches = [held(batch) for batch in streamed.epoch(0)]
print(json.dumps([found, batches]))
"""


@pytest.mark.slow
def test_each_process_reads_the_rows_of_its_own_devices() -> None:
    first, second = (json.loads(out.splitlines()[-1]) for out in outputs_of(2, "-c", PROGRAM, devices=2))
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
    assert first[1] == [[0, 1, 2, 3, 4], {"0": [4], "1": [5]}]
    assert second[1] == [[0, 1, 2, 3, 4], {"2": [6], "3": [7]}]


def noisy(rows: np.ndarray, random: Any) -> dict[str, np.ndarray]:
    return {"number": rows, "noise": np.array([generator.uniform() for generator in random])}
