"""Programs compiled for TPUs that are not here, by libtpu: skipped where it is not installed (extra ``tpu``)."""

import importlib.util
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import paraxis as px
from tests._explained import HANDED_ON, PROGRAMS, lies, sent, struct
from tests._support import mesh_over
from tests.test_explain_findings import until

pytestmark = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")

# What a TPU's compiler makes of some programs: it sends what is only multiplied as bfloat16, sums before it scatters
# what is small, and gathers in a ring beside a product.
HALF = ("collective_permute", HANDED_ON[1] // 2, *HANDED_ON[2:])
BLOCKS = [("collective_permute", 2 * 4 * 2, times, ("d",)) for times in (1, 2, 2, 2, 2)]
SENT = {name: expected for name, (_, _, expected) in PROGRAMS.items()} | {
    "sharded weights, gathered when used": BLOCKS,
    "pipeline": [HALF, PROGRAMS["pipeline"][2][1]],
    "gradient of the pipeline": [HALF, HANDED_ON, PROGRAMS["gradient of the pipeline"][2][2]],
    "weights in parts, gathered and scattered": [
        ("all_gather", 16 * 4 * 2, 1, ("d",)),
        ("all_reduce", 16 * 4 * 4, 1, ("d",)),
    ],
}


@pytest.mark.floor
@pytest.mark.parametrize("name", PROGRAMS)
def test_explain_finds_what_tpus_send_as_known_by_hand(name: str) -> None:
    fn, args, _ = PROGRAMS[name]
    report = px.explain(fn, on="v5e:2x4")(*args)
    assert sorted(sent(report)) == sorted(SENT[name])
    assert report.num_devices == 8
    assert report.work.factor in (1, None)
    assert report.unchecked == ()
    assert {c.is_ring for c in report.collectives} == {SENT[name] is BLOCKS}
    assert {c.line.file for c in report.collectives if c.line} == {sys.modules[struct.__module__].__file__}


def test_explain_finds_a_condition_that_chips_exchange() -> None:
    rows, x = px.Axis("rows", 64), struct(64, 4, lies=lies(mesh_over(d=8), "d"))
    assert px.explain(jax.vmap(until), on="v5e:2x4")(x).found("condition")
    (alone,) = px.explain(lambda x: px.map_fn(until, x, rows), on="v5e:2x4")(x).findings
    assert alone.kind == "waiting"  # for the others of a chip, and for no other chip


def test_explain_for_a_topology_has_the_program_s_names_shardings_and_donations() -> None:
    over = mesh_over(d=2, m=4)
    w = {"a": struct(8, 16, lies=lies(over, None, "m")), "unread": struct(3)}
    step = jax.jit(lambda w, x, key: ({**w, "a": w["a"] - x.T @ (x @ w["a"])}, x.sum()), donate_argnums=0)
    here, there = (
        px.explain(step, on=on)(w, struct(4, 8, lies=lies(over, "d")), jax.random.key(0)) for on in (None, "v5e:2x4")
    )
    assert there.arguments == here.arguments
    assert [(x.name, x.shape, x.split) for x in there.results] == [(x.name, x.shape, x.split) for x in here.results]
    assert there.memory.arguments >= here.memory.arguments  # a TPU's tiles are of 8 × 128 numbers
    assert there.memory.donated >= 8 * 16 // 4 * 4


def test_explain_lays_axes_over_all_chips_of_a_larger_topology() -> None:
    clients = px.Axis("clients", 40)

    def mean(w, x):
        return px.reduce_mean(px.map_fn(lambda w, x: jnp.tanh(x @ w), (px.broadcast(w, clients), x), clients), clients)

    before = dict(os.environ)
    report = px.explain(mean, on="v5e:4x4")(struct(64, 32), struct(40, 8, 64))
    assert {**os.environ} == before
    assert sent(report) == [("all_reduce", 8 * 32 * 4, 1, ("clients",))]
    assert report.collectives[0].verb == "px.reduce_mean"
    assert "padded to 48" in report.found("padding")[0].text
    alone = px.explain(lambda x, key: x @ x + jax.random.normal(key), on="v5e:4x4")
    report = alone(struct(64, 64), jax.random.key(0))  # lies nowhere, so on one chip
    assert (report.num_devices, report.work.factor) == (1, 1)


def test_explain_takes_devices_of_a_topology_as_jax_has_them() -> None:
    from jax.experimental import topologies

    chips = topologies.get_topology_desc("v5e:2x2", platform="tpu").devices
    over = NamedSharding(Mesh(np.array(chips), ("d",)), P("d"))
    for on in (None, "v5e:2x2"):
        assert sent(px.explain(lambda x: x.sum(), on=on)(struct(64, lies=over))) == [("all_reduce", 4, 1, ("d",))]


def test_explain_refuses_what_no_chip_holds_and_no_topology_has(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        px.explain(lambda x: jax.nn.softmax(x @ x.T) @ x, on="v5e:2x2")(struct(131072, 128, dtype=jnp.bfloat16))
    with pytest.raises(jax.errors.JaxRuntimeError, match='Topology layout "v5e:3x3"'):
        px.explain(jnp.sin, on="v5e:3x3")
    with pytest.raises(ValueError, match=r"calls Python at test_explain_topology.py:\d+, and on= has no host for it"):
        px.explain(lambda x: jax.debug.print("{}", x) or x, on="v5e:2x2")(struct(3))
    with pytest.raises(ValueError, match="lies over 8 devices, and the topology of on= has 4 chips"):
        px.explain(lambda x: x * 2, on="v5e:2x2")(struct(64, lies=lies(mesh_over(d=8), "d")))
    monkeypatch.setitem(sys.modules, "libtpu", None)
    with pytest.raises(ModuleNotFoundError, match=r"on=.* needs libtpu, .*; write pip install 'paraxis\[tpu\]'"):
        px.explain(jnp.sin, on="v5e:4x4")


@pytest.mark.parametrize("shard", [None, "params"])
def test_explain_lays_a_training_step_over_all_chips_without_a_state(shard) -> None:
    make = lambda: px.TrainState.create({"w": jnp.zeros((2000, 1024))}, optax.adam(0.1))  # noqa: E731
    step = px.train_step(lambda params, batch: ((batch["x"] @ params["w"]) ** 2).mean(1), shard=shard)
    report = px.explain(step, on="v5e:4x4")(jax.eval_shape(make), {"x": struct(4096, 2000)})
    assert (report.num_devices, report.work.factor) == (16, 1)  # and eight are simulated here
    assert not report.found("gather")  # of 125 rows a chip, by blocks
    assert [x.split for x in report.arguments if x.name == "state.params['w']"] == [(16, 1) if shard else (1, 1)]


def test_explain_lays_an_ensemble_of_shapes_over_all_chips() -> None:
    ens = px.ensemble(jax.random.normal, 32, jax.eval_shape(jax.random.key, 0), apply=jnp.multiply)
    for explained, args in ((ens.train, (jnp.subtract, np.float32(3))), (ens.predict, (struct(5),))):
        report = px.explain(explained, on="v5e:4x4")(*args)
        assert (report.num_devices, report.arguments[0].split) == (16, (16,))
