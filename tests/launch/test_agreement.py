"""No public face: what processes report by is a part of runs and checkpoints, which show it in failures only.

So it is tested by itself, between processes that also add up, in one launch.
"""

from pathlib import Path

import pytest

from tests.launch._support import Launch

COLLECTIVES = """
import ctypes, os, socket
import jax, numpy as np
import paraxis as px
from paraxis._host import processes

# A name that means nothing, and one that means an address that this machine has not, where they can be given.
own_name_only, and_user = 0x04000000, 0x10000000
libc = ctypes.CDLL(None)
if libc.unshare(own_name_only) == 0 or libc.unshare(own_name_only | and_user) == 0:
    socket.sethostname(["no-such-host", "203.0.113.7"][int(os.environ["PARAXIS_PROCESS"])])

me = px.initialize()
assert px.initialize() is me
devices = jax.device_count()
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("d",))
spec = jax.sharding.PartitionSpec
over = jax.sharding.NamedSharding(mesh, spec("d"))

def collectives(row):
    return jax.lax.psum(row, "d"), jax.lax.all_gather(row[0], "d"), jax.lax.psum_scatter(row[0], "d", tiled=True)

out = (spec(), spec(), spec("d"))
run = jax.jit(jax.shard_map(collectives, mesh=mesh, in_specs=spec("d"), out_specs=out, check_vma=False))
for size in (1 << 10, 1 << 14, 1 << 18, 1 << 20):
    # Row d is what device d has: whole numbers that float32 adds exactly.
    x = (np.arange(devices * size, dtype=np.float32) % 1013).reshape(devices, size)
    x = x + np.arange(devices, dtype=np.float32)[:, None]
    total = x.sum(0, dtype=np.float64).astype(np.float32)
    summed, gathered, scattered = run(jax.make_array_from_callback(x.shape, over, lambda part: x[part]))
    for shard in summed.addressable_shards:
        assert np.array_equal(np.asarray(shard.data)[0], total)
    for shard in gathered.addressable_shards:
        assert np.array_equal(np.asarray(shard.data), x)
    for shard in scattered.addressable_shards:
        assert np.array_equal(np.asarray(shard.data), total[shard.index])
assert processes.reports(f"of {me.process}" * (me.process != 0)) == {1: "of 1"}
assert processes.reports("") == {} and processes.reports("é" * 300) == {0: "é" * 200, 1: "é" * 200}
print("exact on", devices, "of", me.num_processes, end=".\\n")
"""


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_processes_add_up_exactly_and_agree_whatever_the_host_is_called(
    launched: Launch, tmp_path: Path, devices: int
) -> None:
    """Whole numbers, from 4 KiB to 4 MiB per device: sums over processes have been wrong in versions of jaxlib."""
    script = tmp_path / "script.py"
    script.write_text(COLLECTIVES)
    status, out, error = launched(str(script), devices=devices)
    assert status == 0, error
    assert out.count(f"exact on {2 * devices} of 2.") == 2
