"""One of several processes that save and restore together.

``python -m tests.train._checkpoint_processes PATH PORT NUMBER``
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import paraxis as px

NUM_PROCESSES = 2
VALUES = np.random.default_rng(0).normal(size=(8, 3000)).astype(np.float32)


def state() -> dict[str, Any]:
    """Over all devices, the same on all, one process's own, and on the host."""
    mesh = Mesh(np.array(jax.devices()), ("rows",))

    def laid(x: np.ndarray, spec: P) -> jax.Array:
        return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])

    own = jax.device_put(jnp.float32(2.5), jax.local_devices()[0])
    return {"rows": laid(VALUES, P("rows")), "all": laid(VALUES[:2], P()), "own": own, "n": np.arange(3), "k": 7}


def part(x: Any) -> bytes:
    """What this process has of a leaf."""
    shards = [shard.data for shard in x.addressable_shards] if isinstance(x, jax.Array) else [x]
    return b"".join(np.asarray(shard).tobytes() for shard in shards)


def main(path: str, port: int, number: int) -> None:
    jax.distributed.initialize(f"127.0.0.1:{port}", NUM_PROCESSES, number, cluster_detection_method="deactivate")
    before = state()
    with px.Checkpoints(path, keep=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, before, {"step": step})
    restored = checkpoints.restore(jax.tree.map(lambda x: x * 0, before))
    assert (checkpoints.steps, restored.step, restored.notes) == ((2, 3), 3, {"step": 3})
    assert restored.tree["rows"].sharding == before["rows"].sharding
    for name, leaf in before.items():
        assert part(restored.tree[name]) == part(leaf), name
    if number == 0:
        file = max((f for f in (checkpoints.path / "3").rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
        file.write_bytes(file.read_bytes()[::-1])
    multihost_utils.sync_global_devices("a checkpoint is damaged")
    assert checkpoints.restore(before).step == 2
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
