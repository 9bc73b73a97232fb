"""Counting collectives: on programs written by hand, whose communication is known, and on texts of XLA's."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import paraxis as px
from paraxis.reports import of_program
from paraxis.testing import assert_communication
from tests._support import axis_on, values

pytestmark = pytest.mark.newest

ROWS = 16


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))


def _shard(mesh, body, out=None):
    return jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P() if out is None else out, check_vma=False)


def _rows():
    return jnp.arange(ROWS * 4, dtype=jnp.float32).reshape(ROWS, 4)


BY_HAND = {
    "all_reduce": (lambda x: jax.lax.psum(x, "d"), P(), 2 * 4 * 4),
    "all_gather": (lambda x: jax.lax.all_gather(x, "d", tiled=True), P(), 16 * 4 * 4),
    "reduce_scatter": (lambda x: jax.lax.psum_scatter(jnp.tile(x, (4, 1)), "d", tiled=True), P("d"), 8 * 4 * 4),
    "all_to_all": (lambda x: jax.lax.all_to_all(jnp.tile(x, (4, 1)), "d", 0, 0, tiled=True), P("d"), 8 * 4 * 4),
    "collective_permute": (
        lambda x: jax.lax.ppermute(x, "d", [(i, (i + 1) % 8) for i in range(8)]),
        P("d"),
        2 * 4 * 4,
    ),
}


def test_asynchronous_forms_and_groups_of_one():
    text = """
  %a = f32[8,4]{1,0} all-reduce-start(f32[8,4]{1,0} %x), replica_groups=[1,8]<=[8]
  %b = f32[8,4]{1,0} all-reduce-done(f32[8,4]{1,0} %a)
  %c = (f32[2]{0}, f32[16]{0}) all-gather-start(f32[2]{0} %y), replica_groups={{0,1,2,3,4,5,6,7}}
  %end = f32[16]{0} all-gather-done(%c)
  %d = (bf16[4]{0}, pred[]) all-reduce(bf16[4]{0} %p, pred[] %q), replica_groups={{0,1},{2,3}}
  %e = f32[8]{0} all-reduce(f32[8]{0} %z), replica_groups={{0},{1}}
  %f = f32[2]{0} reduce-scatter(f32[8]{0} %z), replica_groups=[2,4]<=[8]
  %g = f32[2]{0} reduce-scatter(f32[4]{0} %z), replica_groups=mesh['d'=4,'m'=2] {'m'}
  %h = f32[2]{0} reduce-scatter(f32[4]{0} %z), replica_groups=mesh['d'=4,'m'=2] {'d':(1)2}
  %i = f32[4]{0} ragged-all-to-all(f32[4]{0} %x), replica_groups={{0,1}}
  %j = s4[10]{0} all-to-all(s4[5]{0} %z), replica_groups={{0},{1,2}}
"""
    found = of_program(text)
    assert found.count["all_reduce"] == 2
    assert found.bytes["all_reduce"] == 8 * 4 * 4 + 4 * 2 + 1
    assert (found.count["all_gather"], found.bytes["all_gather"]) == (1, 64)
    assert (found.count["reduce_scatter"], found.bytes["reduce_scatter"]) == (3, 32 + 16 + 16)
    assert (found.count["all_to_all"], found.bytes["all_to_all"]) == (2, 16 + 5)


@pytest.mark.parametrize("kind", BY_HAND)
def test_a_broken_promise_is_named(mesh, kind):
    body, out, size = BY_HAND[kind]
    fn = _shard(mesh, body, out)
    assert assert_communication(fn, _rows(), **{kind: 1}, max_bytes=size).total_bytes == size
    with pytest.raises(px.CommunicationError, match=rf"{kind}=0 was promised, found 1.*has: 1 {kind}"):
        assert_communication(fn, _rows(), **{kind: 0})
    with pytest.raises(AssertionError, match=rf"{kind}=2 was promised, found 1"):
        assert_communication(fn, _rows(), **{kind: 2})


def test_bytes_count_as_often_as_a_loop_runs_which_has_to_be_known(mesh):
    def times(x):
        return jax.lax.scan(lambda x, _: (jax.lax.psum(x, "d"), None), x, length=100)[0]

    def until(x):
        return jax.lax.while_loop(lambda x: x[0, 0] < 1e5, lambda x: jax.lax.psum(x, "d"), x)

    once = ROWS // 8 * 4 * 4  # the rows of one device, 4 columns of float32
    assert_communication(_shard(mesh, times), _rows(), all_reduce=1, max_bytes=100 * once)
    with pytest.raises(px.CommunicationError, match=rf"max_bytes={once:,} was promised, found {100 * once:,}, loops"):
        assert_communication(_shard(mesh, times), _rows(), max_bytes=once)
    with pytest.raises(px.CommunicationError, match=rf"max_bytes={once:,} was promised, but a loop without a known"):
        assert_communication(_shard(mesh, until), _rows(), max_bytes=once)
    assert_communication(_shard(mesh, until), _rows(), all_reduce=1)


def test_a_program_on_one_device_is_told_from_one_that_sends_nothing(mesh) -> None:
    one = axis_on(1, 16)
    advice = "is for one device, which sends nothing: lay its arguments over several"
    with pytest.raises(px.CommunicationError, match=rf"all_reduce=1 was promised, found 0\. .*{advice}"):
        assert_communication(lambda x: px.reduce_sum(x, one), values(16), all_reduce=1)
    with pytest.raises(px.CommunicationError) as raised:  # on eight devices, and none of them sends
        assert_communication(_shard(mesh, jnp.sin, P("d")), _rows(), all_reduce=1)
    assert "one device" not in str(raised.value)
