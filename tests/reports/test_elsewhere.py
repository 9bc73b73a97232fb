"""Reports for devices and machines that are not here: held against formulas, and against as many simulated devices."""

import dataclasses
import os
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import paraxis as px
from paraxis.reports import Growth, Machine

pytestmark = pytest.mark.newest


def struct(*shape: int, over: Mesh | None = None, spec: tuple[Any, ...] = ()) -> jax.ShapeDtypeStruct:
    lies = None if over is None else NamedSharding(over, P(*spec))
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=lies)


HERE = Mesh(np.array(jax.devices()), ("batch",))
GRID = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))


def gradient(w: Any, x: Any) -> Any:
    return jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)


def average(x: Any) -> Any:
    clients = px.Axis("clients", 64)
    return px.reduce_mean(px.map_fn(jnp.sin, x, clients), clients)


def on_mesh_of_axis(x: Any) -> Any:
    clients = px.Axis("clients", 64, mesh=HERE, over="batch")
    return px.reduce_sum(px.map_fn(jnp.sin, x, clients), clients)


@px.program(outer=4, inner=4)
def nested(x: Any) -> Any:
    inside = lambda x: px.map_fn(jnp.sin, x, "inner")  # noqa: E731
    return px.reduce_sum(px.reduce_sum(px.map_fn(inside, x, "outer"), "inner"), "outer")


@pytest.mark.parametrize(
    ("fn", "args", "devices"),
    [
        (average, (struct(64, 10),), 16),
        (jax.jit(average), (struct(64, 10),), 512),
        (on_mesh_of_axis, (struct(64, 10),), 32),
        (nested, (struct(4, 4, 10),), 16),
        (gradient, (struct(8, 4, over=HERE), struct(512, 8, over=HERE, spec=("batch",))), 256),
        (gradient, (struct(8, 4, over=GRID), struct(512, 8, over=GRID, spec=("data",))), {"data": 32, "model": 4}),
    ],
    ids=["axis", "jitted", "axis with a mesh", "two axes", "mesh of arguments", "mesh of two axes"],
)
def test_a_report_is_of_as_many_devices_as_asked_for_and_one_of_those_here_stays(fn, args, devices) -> None:
    here = px.explain(fn)(*args)
    number = int(np.prod([*devices.values()])) if isinstance(devices, dict) else devices
    there = px.explain(fn, devices=devices)(*args)
    assert there.num_devices == number
    # What crosses devices is the same sum; it does not depend on how many these are.
    assert {(c.kind, c.bytes) for c in there.collectives if c.kind == "all_reduce"}
    again = px.explain(fn)(*args)
    assert (again.num_devices, again.communication) == (here.num_devices, here.communication)


def test_a_mesh_in_force_grows() -> None:
    with jax.set_mesh(HERE):
        laid = lambda x: jnp.sum(jax.lax.with_sharding_constraint(x, P("batch")))  # noqa: E731
        assert px.explain(laid, devices=32)(struct(512)).num_devices == 32


def loss(params: Any, batch: Any) -> Any:
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["w"]) - y) ** 2)


def test_steps_of_shapes_are_explained_and_arrays_are_left_alone() -> None:
    """A state that no machine here could hold: 4 GB of parameters and twice as much of the optimiser's."""
    step = px.train_step(loss)
    large = jax.eval_shape(lambda: px.TrainState.create({"w": jnp.zeros((2**15, 2**15))}, optax.adam(1e-3)))
    batch = (struct(1024, 2**15), struct(1024, 2**15))
    for devices in (None, 64):
        report = px.explain(step, devices=devices)(large, batch)
        assert report.num_devices == (devices or len(jax.devices()))
        sums = [c.bytes for c in report.collectives if c.is_backward and c.kind == "all_reduce"]
        assert sum(sums) in (4 * 2**30, 4 * 2**30 + 4)  # the loss goes with it, or does not
    state = px.TrainState.create({"w": jnp.zeros((8, 4))}, optax.adam(1e-3))
    rows = np.ones((16, 8), np.float32), np.ones((16, 4), np.float32)
    assert px.explain(step, devices=32)(state, rows).num_devices == 32
    state, _ = step(state, rows)
    assert state.params["w"].sharding.device_set == set(jax.devices())
    with pytest.raises(px.errors.ShapeError, match=r"jax\.ShapeDtypeStruct.* px\.explain\(step\)\(state, batch\)"):
        step(state, (struct(16, 8), struct(16, 4)))


def test_members_are_explained_on_other_devices() -> None:
    def step(w: Any, x: Any) -> Any:
        return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    members = px.ensemble(lambda key: jax.random.normal(key, (3,)), 32, 0)
    report = px.explain(members.train, devices=16)(step, struct(8, 3))
    assert (report.num_devices, report.collectives) == (16, ())
    assert report.arguments[0].shape == (32, 3)
    assert report.arguments[0].split == (16, 1)
    members.train(step, jnp.ones((8, 3)))


def test_models_and_transforms_are_explained_on_other_devices() -> None:
    shared = px.Parallel(nnx.Linear(3, 4, rngs=nnx.Rngs(0)))
    assert px.explain(shared, devices=16)(struct(32, 3)).num_devices == 16
    assert shared(jnp.ones((8, 3))).shape == (8, 4)
    model = eqx.nn.MLP(3, 1, 4, 1, key=jax.random.key(0))
    rows = px.Axis("rows", 32)
    fn = lambda model, x: px.reduce_mean(px.map_fn(lambda m, x: m(x), (px.broadcast(model, rows), x), rows), rows)  # noqa: E731
    assert px.explain(fn, devices=32)(model, struct(32, 3)).num_devices == 32


ALONE = Mesh(np.array(jax.devices()[:1]), ("batch",))  # what a user makes of all devices on a machine that has one
LAID = jax.device_put(jnp.ones((64, 8)), NamedSharding(HERE, P("batch")))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(HERE, P("batch"))) * 2,
        jax.shard_map(lambda x: jax.lax.psum(x, "batch"), mesh=HERE, in_specs=P("batch"), out_specs=P()),
        jax.jit(jnp.sum, in_shardings=NamedSharding(HERE, P("batch"))),
        lambda x: jnp.sum(x) + jnp.sum(LAID),
        lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(ALONE, P("batch"))) * 2,
        jax.shard_map(lambda x: jax.lax.psum(x, "batch"), mesh=ALONE, in_specs=P("batch"), out_specs=P()),
        jax.jit(jnp.sum, in_shardings=NamedSharding(ALONE, P("batch"))),
        jax.jit(lambda x: x * 2, out_shardings=NamedSharding(ALONE, P("batch"))),
        jax.shard_map(lambda x: x * 2, mesh=HERE.abstract_mesh, in_specs=P("batch"), out_specs=P("batch")),
    ],
    ids=[
        *("constraint", "shard_map", "in_shardings", "closed over"),
        *("constraint alone", "shard_map alone", "in_shardings alone", "out_shardings alone", "sizes"),
    ],
)
def test_what_was_laid_over_the_devices_here_is_refused(fn) -> None:
    with pytest.raises(px.errors.DeviceError, match=r"laid over the devices that are here.* --devices 16"):
        px.explain(fn, devices=16)(struct(64, 8))


def averaged(x: jax.Array) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(HERE, P("batch"))).mean()


def test_the_command_that_is_told_has_the_file_and_the_shapes() -> None:
    with pytest.raises(px.errors.DeviceError) as refused:
        px.explain(jax.jit(averaged), devices=16)(struct(64, 8))
    command = str(refused.value).partition("where there are so many: ")[2]
    assert command == f"paraxis explain {os.path.relpath(__file__)}:averaged --devices 16 --shapes 'float32[64,8]'"
    with pytest.raises(px.errors.DeviceError, match=r"averaged --devices 16 --arguments function_that_returns_them$"):
        px.explain(jax.jit(averaged), devices=16)(x=struct(64, 8))
    with pytest.raises(px.errors.DeviceError, match=r"file\.py:sum --devices 16 --shapes 'float32\[64,8\]'$"):
        px.explain(jax.jit(jnp.sum, in_shardings=NamedSharding(HERE, P("batch"))), devices=16)(struct(64, 8))


def test_keys_are_arguments_too() -> None:
    noisy = lambda key, x: average(x + jax.random.normal(key, x.shape))  # noqa: E731
    assert px.explain(noisy, devices=16)(jax.random.key(0), struct(64, 3)).num_devices == 16


def test_a_mesh_of_several_axes_must_say_which_grow() -> None:
    args = struct(8, 4, over=GRID), struct(512, 8, over=GRID, spec=("data",))
    with pytest.raises(px.errors.DeviceError, match=r"write devices=\{'data': 4, 'model': 2\} with the numbers"):
        px.explain(gradient, devices=16)(*args)
    with pytest.raises(px.errors.DeviceError, match=r"leaves out 'model'.*write devices=\{'data': 32, 'model': 2\}"):
        px.explain(gradient, devices={"data": 32})(*args)


def test_numbers_of_devices_stand_side_by_side() -> None:
    growth = px.explain(gradient, devices=[1, 8, 64])(
        struct(8, 4, over=HERE), struct(512, 8, over=HERE, spec=("batch",))
    )
    assert isinstance(growth, Growth)
    assert [(p.devices, p.flops) for p in growth.points] == [(n, 2 * 2 * 512 * 8 * 4 // n) for n in (1, 8, 64)]
    assert [p.sent for p in growth.points] == [0, 4 * 8 * 4, 4 * 8 * 4]
    header, *lines = str(growth).splitlines()
    assert header.split()[:2] == ["devices", "computes"]
    assert [line.split()[0] for line in lines] == ["1", "8", "64"]
    drawn = growth._repr_html_()
    assert drawn.count("<svg") == 3
    ends = re.findall(r">([^<>]*)</text>", drawn)  # of the scales, in the units of the table
    assert ends[:4] == ["65.5 kFLOP", "1.02 kFLOP", "1", "64"]
    assert ends[4:7] == ["128 bytes", "8", "64"]
    with pytest.raises(ValueError, match=r"Growth: reports must be a dict of reports"):
        Growth({})


# --- estimates ---------------------------------------------------------------------------------------------------

SLOW = Machine("slow", {"f32": 1e9, "bf16": 1e12}, 1e6, 1e9, 1e8, 1e6, devices_per_host=4)


def test_products_take_as_long_as_the_machine_says_for_their_dtype() -> None:
    n = 256
    report = px.explain(jnp.dot, on=SLOW)(struct(n, n), struct(n, n))
    assert report.estimate is not None
    assert report.estimate.products == pytest.approx(2 * n**3 / 1e9)
    assert (report.estimate.memory, report.estimate.sending) == (0, 0)


def test_what_is_not_a_product_takes_as_long_as_its_bytes_and_a_slice_as_its_own() -> None:
    n = 2**16
    added = px.explain(jnp.add, on=SLOW)(struct(n), struct(n)).estimate
    assert added is not None
    assert added.memory == pytest.approx(3 * 4 * n / 1e9)
    assert added.fits
    larger = px.explain(jnp.add, on=SLOW)(struct(2**18), struct(2**18)).estimate
    assert larger is not None
    assert not larger.fits

    def rows(x: Any) -> Any:  # each turn reads one row of many
        return jax.lax.scan(lambda total, row: (jnp.sin(total + row), None), jnp.zeros(64), x)[0]

    turned = px.explain(rows, on=SLOW)(struct(1000, 64)).estimate
    assert turned is not None
    assert 1000 * 3 * 4 * 64 / 1e9 <= turned.memory + turned.products < 3 * 1000 * 3 * 4 * 64 / 1e9


def test_what_does_not_fit_is_the_first_finding_and_marked_in_a_table() -> None:
    whole = struct(2**20, 4096)  # 16 GiB, and its negative as much
    report = px.explain(jnp.negative, on="v5e:8")(whole)
    assert report.findings[0].kind == "too_large"
    assert report.fits is False
    growth = px.explain(jnp.negative, devices=[1, 8], on="v5e")(struct(2**20, 4096, over=HERE, spec=("batch",)))
    assert [point.fits for point in growth.points] == [False, True]
    assert ["does NOT fit" in line for line in str(growth).splitlines()] == [False, True, False]
    assert growth._repr_html_().count("does NOT fit") == 1
    assert px.explain(jnp.negative)(struct(8)).fits is None


def test_a_table_names_the_devices_that_were_asked_for() -> None:
    growth = px.explain(jnp.negative, devices=[1, 8])(struct(8))
    assert [(point.devices, point.findings) for point in growth.points] == [(1, 0), (8, 1)]
    assert str(growth).split()[0] == "devices"


def test_new_memory_is_paid_for_where_the_system_gives_it() -> None:
    asking, n = dataclasses.replace(SLOW, allocation=1e8), 2**23
    estimates = [
        px.explain(fn, on=machine)(*args).estimate
        for fn, args in [(jnp.negative, (struct(n),)), (jax.jit(jnp.negative, donate_argnums=0), (struct(n),)),
                         (jnp.negative, (struct(n - 1),))]
        for machine in (SLOW, asking)
    ]  # fmt: skip
    seconds = [estimate.memory for estimate in estimates if estimate is not None]
    paid = [after - before for before, after in zip(seconds[::2], seconds[1::2], strict=True)]
    assert paid == pytest.approx([4 * n / 1e8, 0, 0])
    assert seconds[0] == pytest.approx(2 * 4 * n / 1e9)


def test_a_collective_takes_as_long_as_a_ring_over_its_slowest_link() -> None:
    def total(x: Any) -> Any:
        clients = px.Axis("clients", 64)
        return px.reduce_sum(px.map_fn(jnp.sin, x, clients), clients)

    numbers = {}
    for devices in (4, 8):  # one host of four, and two
        estimate = px.explain(total, devices=devices, on=SLOW)(struct(64, 1000)).estimate
        assert estimate is not None
        numbers[devices] = estimate.sending
    assert numbers[4] == pytest.approx(4000 * 2 * 3 / 4 / 1e8)
    assert numbers[8] == pytest.approx(4000 * 2 * 7 / 8 / 4e6)  # four ways out of a host, of 1e6 each


def test_machines_have_names_that_say_how_many() -> None:
    report = px.explain(average, on="h100:8x2")(struct(64, 10))
    assert report.num_devices == 16
    assert report.estimate is not None
    assert report.estimate.machine == "h100"
    assert "on h100 at its peaks" in str(report)
    assert px.explain(average, on="V5E:4")(struct(64, 10)).num_devices == 4
    assert px.explain(average, on="a100", devices=2)(struct(64, 10)).num_devices == 2
    here = Machine.here()
    assert min(here.speed("f32"), here.bandwidth, here.allocation) > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"on": "h101:8"}, r"on must be a machine.* got 'h101:8'; write on='h100:8x16'"),
        ({"on": "h100:0"}, r"on must be a machine"),
        ({"on": 8}, r"on must be a machine"),
        ({"on": "h100:8", "devices": 4}, r"on='h100:8' says how many devices there are; leave out devices=4"),
        ({"devices": 0}, r"devices must be an integer of at least 1, got 0; write px\.explain\(fn, devices=512\)"),
        ({"devices": "8"}, r"devices must be an integer"),
        ({"devices": True}, r"devices must be an integer"),
        ({"devices": []}, r"devices must be an integer"),
        ({"devices": {"data": 0}}, r"devices must be an integer"),
        ({"devices": 10**6}, r"devices must be at most"),
    ],
)
def test_wrong_devices_and_machines_are_refused(options, words) -> None:
    with pytest.raises(ValueError, match=words):
        px.explain(average, **options)


def test_equinox_jitted_functions_are_told_from_shapes_and_elsewhere() -> None:
    model = eqx.nn.MLP(8, 8, 8, 1, key=jax.random.key(0))
    fn = eqx.filter_jit(lambda model, x: jax.vmap(model)(x))
    from_shapes, elsewhere = px.explain(fn)(model, struct(4, 8)), px.explain(fn, devices=2)(model, jnp.ones((4, 8)))
    assert from_shapes.work.flops == elsewhere.work.flops == px.explain(fn)(model, jnp.ones((4, 8))).work.flops > 0


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, lambda fn: lambda x: jax.vmap(fn)(x[None])])
def test_other_devices_cannot_be_supposed_while_jax_traces(transform: Any) -> None:
    with pytest.raises(px.DeviceError, match=r"devices=2 cannot be supposed while JAX traces .*px\.explain\(sin, dev"):
        transform(lambda x: px.explain(jnp.sin, devices=2)(x))(jnp.ones(()))
