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
        return 11
    def __getitem__(self, row):
        asked.append(row)
        return {"number": row, "x": np.full(3, row, np.float32)}

def flipped(rows, random):
    return rows | {"noise": np.array([generator.uniform() for generator in random])}

def held(leaf):
    return {shard.index[0].start or 0: np.asarray(shard.data).tolist() for shard in leaf.addressable_shards}

data = px.loader(Rows(), 6, seed=1, read_ahead=0, transform=flipped)
found = []
for batch in data.epoch(1):
    found.append({name: held(leaf) for name, leaf in batch.tree.items()} | {"asked": asked[:]})
    asked.clear()

streamed = px.loader(lambda: [np.arange(5), np.arange(5, 10), np.arange(2)])
batches = [held(batch.tree) for batch in streamed.epoch(0)]
print(json.dumps([found, batches]))
"""


@pytest.mark.slow
def test_each_process_reads_the_rows_of_its_own_devices() -> None:
    first, second = (json.loads(out.splitlines()[-1]) for out in outputs_of(2, "-c", PROGRAM, devices=2))
    alone = px.loader(np.arange(11), 6, seed=1, transform=noisy)
    for k, (mine, theirs, batch) in enumerate(zip(first[0], second[0], alone.epoch(1), strict=True)):
        rows = alone.rows(2 + k).tolist()
        # Padded to eight, two for each of four devices; padding is made of the last row.
        assert mine["asked"] == rows[:4]
        assert theirs["asked"] == rows[4:]
        padded = rows + rows[-1:] * (8 - len(rows))
        for name, expected in (("number", padded), ("x", [[row] * 3 for row in padded])):
            there = {int(start): block for start, block in (mine[name] | theirs[name]).items()}
            assert there == {start: expected[start : start + 2] for start in (0, 2, 4, 6)}
        drawn = dict(zip(batch.tree["number"].tolist(), batch.tree["noise"].tolist(), strict=True))
        noise = mine["noise"]["0"] + mine["noise"]["2"] + theirs["noise"]["4"] + theirs["noise"]["6"]
        assert noise == [drawn[row] for row in padded]
    assert first[1][1] == {"0": [5, 6], "2": [7, 8]}
    assert second[1][1] == {"4": [9, 9], "6": [9, 9]}
    assert (first[1][2], second[1][2]) == ({"0": [0], "1": [1]}, {"2": [1], "3": [1]})  # one has padding only


def noisy(rows: np.ndarray, random: Any) -> dict[str, np.ndarray]:
    return {"number": rows, "noise": np.array([generator.uniform() for generator in random])}
