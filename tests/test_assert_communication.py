"""Promises of communication, of programs written by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import paraxis as px
from paraxis.testing import assert_communication, communication
from tests._support import axis_on, values

pytestmark = pytest.mark.floor

ROWS = 16
X = np.arange(ROWS * 4, dtype=np.float32).reshape(ROWS, 4)


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))


def _shard(mesh, body, out=None):
    return jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P() if out is None else out, check_vma=False)


def test_assert_communication_names_each_broken_promise(mesh):
    def body(x):
        return jax.lax.psum(jax.lax.all_gather(x, "d", tiled=True), "d")

    size = 16 * 4 * 4
    sharded = _shard(mesh, body)
    kept = assert_communication(sharded, X, all_gather=1, all_reduce=1, all_to_all=0, max_bytes=2 * size)
    assert (kept.total_count, kept.total_bytes) == (2, 2 * size)
    assert_communication(sharded, X, all_reduce=1)  # of gathers, nothing was promised
    words = r"all_reduce=0 was promised, found 1; all_to_all=2 was promised, found 0.*has: 1 all_reduce.*1 all_gather"
    with pytest.raises(px.CommunicationError, match=words):
        assert_communication(sharded, X, all_reduce=0, all_gather=1, all_to_all=2)


def test_assert_communication_counts_a_loop_s_bytes_as_often_as_it_runs(mesh):
    def times(x):
        return jax.lax.scan(lambda x, _: (jax.lax.psum(x, "d"), None), x, length=100)[0]

    def until(x):
        return jax.lax.while_loop(lambda x: x[0, 0] < 1e5, lambda x: jax.lax.psum(x, "d"), x)

    once = ROWS // 8 * 4 * 4  # the rows of one device, 4 columns of float32
    kept = assert_communication(_shard(mesh, times), X, all_reduce=1, max_bytes=100 * once)
    told = f"1 all_reduce (100 times, {100 * once:,} bytes)"
    assert (str(kept), str(communication(_shard(mesh, times), X))) == (told, told)
    with pytest.raises(px.CommunicationError, match=rf"max_bytes={once:,} was promised, found {100 * once:,}\."):
        assert_communication(_shard(mesh, times), X, max_bytes=once)
    with pytest.raises(px.CommunicationError, match=rf"max_bytes={once:,} was promised, but a loop without a known"):
        assert_communication(_shard(mesh, until), X, max_bytes=once)
    found = assert_communication(_shard(mesh, until), X, all_reduce=1)
    assert str(found) == f"1 all_reduce ({once} bytes); a loop without a known end counts as one iteration"


def test_communication_tells_one_device_from_a_program_that_sends_nothing(mesh) -> None:
    one, promise = axis_on(1, 16), r"all_reduce=1 was promised, found 0\. .*program has: no communication"
    with pytest.raises(px.CommunicationError, match=rf"{promise}\. It is for one device, which sends nothing"):
        assert_communication(lambda x: px.reduce_sum(x, one), values(16), all_reduce=1)
    with pytest.raises(px.CommunicationError, match=rf"{promise}$"):  # on eight devices, and none of them sends
        assert_communication(_shard(mesh, jnp.sin, P("d")), X, all_reduce=1)
