"""One of two processes that restore: what one of them cannot read, or cannot see, is said by both, and nothing hangs.

``paraxis launch -n 2 -m tests.train._checkpoint_ranks PATH WHAT``
"""

import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from paraxis._core import processes
from paraxis.launch import initialize
from paraxis.train.checkpoints import _checkpoints
from paraxis.train.checkpoints._checkpoints import Checkpoints


def damage_the_last_part(checkpoint: Path) -> None:
    """Of the files in which each process wrote its rows, the second one's."""
    data = sorted(checkpoint.glob("state/ocdbt.process_1/d/*"), key=lambda file: file.stat().st_size)[-1]
    content = bytearray(data.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 1000] = bytes(1000)
    data.write_bytes(content)


def main(path: str, what: str) -> None:
    first = initialize().process == 0
    rows = NamedSharding(Mesh(np.array(jax.devices()), ("rows",)), P("rows"))
    values = np.random.default_rng(0).normal(size=(8, 3000)).astype(np.float32)
    x = jax.make_array_from_callback(values.shape, rows, lambda part: values[part])
    with Checkpoints(path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"x": x})
    if what == "damage" and first:
        damage_the_last_part(Path(path) / "2")
    record = checkpoints._folder.record
    if what in ("record", "asked for") and not first:
        checkpoints._folder.record = lambda step: _unreadable() if step == 2 else record(step)
    if what == "removed" and not first:
        checkpoints._folder.record = lambda step: _removed(Path(path)) if step == 2 else record(step)
    if what == "elsewhere":
        _checkpoints._PATIENCE = 1.0
        Checkpoints(path if first else f"{path}-of-my-own")
    processes.barrier("the files are damaged")
    restored = checkpoints.restore({"x": x}, 2 if what == "asked for" else None)
    assert restored.step == (4 if what == "removed" else 1)
    for shard in restored.tree["x"].addressable_shards:
        np.testing.assert_array_equal(shard.data, values[shard.index])
    with checkpoints:  # they are in step with each other still
        checkpoints.save(5, {"x": x})
    assert checkpoints.restore({"x": x}).step == 5


def _unreadable() -> dict[str, object]:
    raise _checkpoints.Damaged("its record is not what was written")


def _removed(path: Path) -> dict[str, object]:
    """As if the one that saves there had saved the checkpoint of step 4, and removed that of step 2."""
    (path / "2").rename(path / "4")
    raise _checkpoints.Damaged("there is no record")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
