"""Where an axis goes: the user's mesh or all devices, Auto or Explicit, with mesh axes left to the compiler."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import paraxis as px
from tests._support import assert_close, values


def sharding(x: Any) -> NamedSharding:
    return x.sharding


def _mesh(kind, shape=(4, 2), names=("data", "model")):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))


def _plain(w, x):
    return jnp.mean(jax.vmap(lambda row: jnp.sum(jnp.tanh(row @ w)))(x))


def _on(axis):
    def loss(w, x):
        return px.reduce_mean(
            px.map_fn(lambda w, row: jnp.sum(jnp.tanh(row @ w)), (px.broadcast(w, axis), x), axis), axis
        )

    return loss


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("over", ["data", "model", ("data", "model"), ("model", "data")])
@pytest.mark.parametrize("size", [8, 5])
def test_over_axes_of_the_mesh_in_force(kind, over, size):
    w, x = values(3, 4), values(size, 3, seed=1)
    with jax.set_mesh(_mesh(kind)):
        loss = _on(px.Axis("rows", size, over=over))
        value, gradient = jax.jit(jax.value_and_grad(loss, (0, 1)))(w, x)
        assert_close((np.asarray(value), jax.tree.map(np.asarray, gradient)), _expected(w, x))


def _expected(w, x):
    value, gradient = jax.value_and_grad(_plain, (0, 1))(w, x)
    return np.asarray(value), jax.tree.map(np.asarray, gradient)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_of_its_own(kind):
    w, x = values(3, 4), values(7, 3, seed=1)
    axis = px.Axis("rows", 7, mesh=_mesh(kind), over="data")
    assert_close(np.asarray(_on(axis)(w, x)), _expected(w, x)[0])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("said", ["by the axis", "in force"])
@pytest.mark.parametrize("where", ["no devices", "another device", "split over model"])
def test_a_broadcast_made_at_once_lies_where_somebody_said(kind, said, where):
    mesh, x = _mesh(kind), jnp.arange(4.0)
    if where == "another device":
        x = jax.device_put(x, jax.devices()[3])
    if where == "split over model":
        x = jax.device_put(x, NamedSharding(mesh, P("model")))
    with jax.set_mesh(mesh) if said == "in force" else contextlib.nullcontext():
        copies = px.broadcast(x, px.Axis("rows", 8, over="data", mesh=mesh if said == "by the axis" else None))
    rest = 2 if where == "split over model" else 4
    assert {shard.data.shape for shard in copies.addressable_shards} == {(2, rest)}
    np.testing.assert_array_equal(np.asarray(copies), np.broadcast_to(np.arange(4.0), (8, 4)))


def test_a_broadcast_made_at_once_is_bound_to_no_devices_if_nobody_said_which():
    copies = px.broadcast(jnp.arange(4.0), px.Axis("rows", 8))
    assert not copies.committed
    mesh = jax.make_mesh((2,), ("rows",), devices=jax.devices()[:2])
    assert sharding(px.map_fn(jnp.sin, copies, px.Axis("rows", 8, mesh=mesh))).mesh == mesh


@pytest.mark.filterwarnings("ignore:.*with mesh.*:DeprecationWarning")
def test_a_mesh_entered_as_before_set_mesh_is_not_passed_over_in_silence():
    axis, few = px.Axis("rows", 8), jax.make_mesh((2,), ("rows",), devices=jax.devices()[:2])
    with few, pytest.raises(px.AxisError, match=r"`with mesh:` asks for 2 of 8 devices.*with jax.set_mesh\(mesh\)"):
        px.map_fn(jnp.sin, values(8), axis)
    with few, jax.set_mesh(few):
        assert sharding(px.map_fn(jnp.sin, values(8), axis)).mesh == few
    with jax.make_mesh((8,), ("rows",)):
        assert len(px.map_fn(jnp.sin, values(8), axis).sharding.device_set) == 8


def test_the_mesh_axis_of_the_same_name_is_the_default():
    with jax.set_mesh(_mesh(AxisType.Auto, names=("rows", "model"))):
        y = px.map_fn(jnp.sin, values(8), px.Axis("rows", 8))
        assert sharding(y).spec == P("rows")


def test_all_devices_without_a_mesh():
    y = px.map_fn(jnp.sin, values(16), px.Axis("rows", 16))
    assert y.sharding.device_set == set(jax.devices())
    assert {shard.data.shape for shard in y.addressable_shards} == {(2,)}


def test_a_weight_sharded_over_an_axis_left_to_the_compiler():
    mesh = _mesh(AxisType.Auto)
    w, x = values(3, 4), values(8, 3, seed=1)
    axis = px.Axis("rows", 8, over="data")

    def body(w, row):
        w = jax.lax.with_sharding_constraint(w, P(None, "model"))
        return jnp.sum(jnp.tanh(row @ w))

    with jax.set_mesh(mesh):
        split = jax.device_put(w, NamedSharding(mesh, P(None, "model")))

        def loss(w, x):
            return px.reduce_mean(px.map_fn(body, (px.broadcast(w, axis), x), axis), axis)

        assert_close(np.asarray(jax.jit(jax.grad(loss))(split, x)), _expected(w, x)[1][0])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [8, 7, 16])
def test_a_body_with_a_shard_map_of_its_own(size):
    x = values(size, 4)
    axis = px.Axis("rows", size, over="data")

    def body(row):
        def half(part):
            return jax.lax.psum(jnp.sum(part**2), "model")

        return jax.shard_map(half, in_specs=P("model"), out_specs=P(), axis_names={"model"}, check_vma=False)(row)

    with jax.set_mesh(_mesh(AxisType.Auto)):

        def total(x):
            return px.reduce_sum(px.map_fn(body, x, axis), axis)

        assert_close(np.asarray(jax.jit(total)(x)), np.sum(np.asarray(x) ** 2, dtype=np.float32))
        assert_close(np.asarray(jax.jit(jax.grad(total))(x)), np.asarray(2 * x))


@pytest.mark.slow
def test_nested_axes_that_each_want_all_devices():
    outer, inner = px.Axis("outer", 3), px.Axis("inner", 5)
    x = values(3, 5)

    def total(x):
        per_row = px.map_fn(lambda row: px.reduce_sum(px.map_fn(jnp.sin, row, inner), inner), x, outer)
        return px.reduce_max(per_row, outer)

    plain = lambda x: jnp.max(jnp.sum(jnp.sin(x), 1))  # noqa: E731
    assert_close(total(x), plain(x))
    assert_close(jax.grad(total)(x), jax.grad(plain)(x))


def test_values_scattered_and_gathered():
    axis, x = px.Axis("rows", 16), np.arange(32.0, dtype=np.float32).reshape(16, 2)
    placed: Any = px.scatter({"x": x}, axis)["x"]
    assert {shard.data.shape for shard in placed.addressable_shards} == {(2, 2)}
    back = px.gather(placed, axis)
    assert isinstance(back, np.ndarray)
    np.testing.assert_array_equal(back, x)
    uneven = px.scatter(x[:5], px.Axis("rows", 5))
    np.testing.assert_array_equal(px.gather(uneven, px.Axis("rows", 5)), x[:5])


MISPLACED = {
    "the mesh lacks it": (
        lambda: px.reduce_sum(jnp.ones(8), px.Axis("rows", 8)),
        (
            r"axis 'rows' cannot be placed: the mesh set by jax.set_mesh has no axis 'rows'; it has 'data' \(4\), "
            r"'model' \(2\). Write px.Axis\('rows', 8, over='data'\)"
        ),
    ),
    "its own mesh lacks it": (
        lambda: px.reduce_sum(jnp.ones(8), px.Axis("rows", 8, mesh=Mesh(np.array(jax.devices()), ("d",)))),
        r"its mesh has no axis 'rows'; it has 'd' \(8\). Write px.Axis\('rows', 8, mesh=mesh, over='d'\)",
    ),
    "nested in one that took it": (
        lambda: px.map_fn(
            lambda row: px.reduce_sum(row, px.Axis("inner", 2, over="data")),
            jnp.ones((8, 2)),
            px.Axis("o", 8, over="data"),
        ),
        "mesh axis 'data', which already carries an axis that it is nested in",
    ),
    "nested on another mesh": (
        lambda: px.map_fn(
            lambda row: px.reduce_sum(row, px.Axis("inner", 2, mesh=Mesh(np.array(jax.devices()), ("d",)), over="d")),
            jnp.ones((8, 2)),
            px.Axis("o", 8, over="data"),
        ),
        "axis 'inner' has a mesh of its own.*but is mapped inside 'o'.*Put both on one mesh",
    ),
}


@pytest.mark.parametrize("case", MISPLACED)
def test_what_cannot_be_placed_is_an_error(case):
    call, message = MISPLACED[case]
    with jax.set_mesh(_mesh(AxisType.Auto)), pytest.raises(px.AxisError, match=message):
        call()


def test_over_without_a_mesh_is_an_error():
    with pytest.raises(px.AxisError, match=r"no mesh. Set one, `with jax.set_mesh\(mesh\): …`, or pass it: px.Axis"):
        px.reduce_sum(jnp.ones(8), px.Axis("rows", 8, over="data"))
