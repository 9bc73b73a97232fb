"""One of two processes that restore: what one of them cannot read, or cannot see, is said by both, and nothing hangs.

``paraxis launch -n 2 -m tests.train._checkpoint_ranks PATH WHAT``
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import paraxis as px
from tests._damage import wrapped

_open = os.open


def damage_the_last_part(checkpoint: Path) -> None:
    """Of the files in which each process wrote its rows, the second one's."""
    data = sorted(checkpoint.glob("state/ocdbt.process_1/d/*"), key=lambda file: file.stat().st_size)[-1]
    content = bytearray(data.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 1000] = bytes(1000)
    data.write_bytes(content)


def badly_read(checkpoint: Path, what: str) -> Callable[..., int]:
    """In the place of `os.open`: a checkpoint's record is not what was written, or may not be read, or goes."""
    record = checkpoint / "paraxis.json"

    def opened(file: Any, *args: Any, **kwargs: Any) -> int:
        if Path(file) != record:
            return _open(file, *args, **kwargs)
        if what == "denied":
            raise PermissionError(13, "Permission denied")
        if what == "removed":  # as if the one that saves there had saved step 4, and removed this one
            text = json.loads(record.read_text())["record"].replace('"step": 2', '"step": 4')
            record.write_text(wrapped(text.encode()))
            checkpoint.rename(checkpoint.parent / "4")
            return _open(file, *args, **kwargs)
        other = checkpoint.parent.with_name("other record")
        other.write_text(record.read_text().replace("float32", "float64"))
        return _open(other, *args, **kwargs)

    return opened


def main(path: str, what: str) -> None:
    first = px.initialize().process == 0
    rows = NamedSharding(Mesh(np.array(jax.devices()), ("rows",)), P("rows"))
    values = np.random.default_rng(0).normal(size=(8, 3000)).astype(np.float32)
    x = jax.make_array_from_callback(values.shape, rows, lambda part: values[part])
    with px.Checkpoints(path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"x": x})
    if what == "damage" and first:
        damage_the_last_part(checkpoints.path / "2")
    if what in ("record", "asked for", "denied", "removed") and not first:
        os.open = badly_read(checkpoints.path / "2", what)
    if what == "elsewhere":
        px.Checkpoints(path if first else f"{path}-of-my-own")
    multihost_utils.sync_global_devices("the files are damaged")
    restored = checkpoints.restore({"x": x}, 2 if what == "asked for" else None)
    assert restored.step == (4 if what == "removed" else 1)
    for shard in restored.tree["x"].addressable_shards:
        np.testing.assert_array_equal(shard.data, values[shard.index])
    with checkpoints:  # they are in step with each other still
        checkpoints.save(5, {"x": x})
    assert checkpoints.restore({"x": x}).step == 5


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
