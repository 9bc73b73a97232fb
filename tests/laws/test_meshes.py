"""Where an axis may lie: meshes set or given, Auto and Explicit, shared with other axes, nested."""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import paraxis as px
from tests._support import assert_close, mesh_over, values


def loss(axis: px.Axis, w: jax.Array, x: jax.Array) -> Any:
    """``w (2,)``, ``x (size, 2)``: a broadcast, two maps and every kind of reduction."""
    y = px.map_fn(lambda w, x: jnp.tanh(w * x), (px.broadcast(w, axis), x), axis)
    z = px.map_fn(lambda y, x: (y * x).sum() - px.pmean(y.sum(), axis), (y, x), axis)
    keep = np.arange(axis.size) % 2 == 0
    return (
        px.reduce_mean(z**2, axis)
        + px.reduce_weighted_mean(y, x[:, 0], axis).sum()
        + px.reduce_sum(y, axis, where=keep).sum()
        + px.reduce_max(z, axis) * px.reduce_min(y, axis).sum()
    )


def plain_loss(w: jax.Array, x: jax.Array) -> jax.Array:
    y = jnp.tanh(w * x)
    z = (y * x).sum(1) - y.sum(1).mean()
    weighted = (x[:, :1] * y).sum(0) / x[:, 0].sum()
    return (z**2).mean() + weighted.sum() + y[::2].sum() + z.max() * y.min(0).sum()


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=str)
def kind(request: pytest.FixtureRequest) -> AxisType:
    return request.param


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [3, 8, 10])
@pytest.mark.parametrize("given", [True, False], ids=["mesh given", "mesh set"])
def test_axes_lie_over_one_or_several_axes_of_a_mesh(kind: AxisType, size: int, given: bool) -> None:
    if kind == AxisType.Explicit and size < 8 and jax.__version_info__ < (0, 12):
        pytest.xfail(
            "with jaxlib 0.10, a gradient of reduce_max is wrong where devices have no element (docs/placement.md)"
        )
    mesh, w, x = mesh_over(kind, a=2, b=2, c=2), values(2), values(size, 2)

    def derived(fn: Any) -> Any:
        slope = lambda w, x: jax.jvp(fn, (w, x), (jnp.cos(w), jnp.cos(x)))[1]  # noqa: E731
        both = jax.jit(lambda w, x: (jax.value_and_grad(fn, argnums=(0, 1))(w, x), slope(w, x)))
        return jax.tree.map(np.asarray, both(w, x))

    expected = derived(plain_loss)
    for over in ("b", ("c", "a", "b")):
        axis = px.Axis("rows", size, over=over, mesh=mesh if given else None)
        with jax.set_mesh(mesh):
            assert_close(derived(functools.partial(loss, axis)), expected, rtol=1e-4)


def test_an_element_sees_nothing_of_a_mesh_that_its_axis_takes(kind: AxisType) -> None:
    seen: list[bool] = []
    with jax.set_mesh(mesh_over(kind, b=8)):
        rows = px.Axis("rows", 8, over="b")
        px.map_fn(lambda x: (seen.append(jax.sharding.get_abstract_mesh().empty), x)[1], jnp.ones(8), rows)
    assert seen
    assert all(seen)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("said", ["by the axis", "in force"])
@pytest.mark.parametrize("where", ["no devices", "another device", "split over model"])
def test_a_broadcast_made_at_once_lies_where_somebody_said(kind: AxisType, said: str, where: str) -> None:
    mesh, x = mesh_over(kind, data=4, model=2), jnp.arange(4.0)
    if where == "another device":
        x = jax.device_put(x, jax.devices()[3])
    if where == "split over model":
        x = jax.device_put(x, NamedSharding(mesh, P("model")))
    with jax.set_mesh(mesh) if said == "in force" else contextlib.nullcontext():
        copies = px.broadcast(x, px.Axis("rows", 8, over="data", mesh=mesh if said == "by the axis" else None))
    rest = 2 if where == "split over model" else 4
    assert {shard.data.shape for shard in copies.addressable_shards} == {(2, rest)}
    np.testing.assert_array_equal(np.asarray(copies), np.broadcast_to(np.arange(4.0), (8, 4)))


def test_values_are_scattered_and_gathered() -> None:
    axis, x = px.Axis("rows", 16), np.arange(32.0, dtype=np.float32).reshape(16, 2)
    placed: Any = px.scatter({"x": x}, axis)["x"]
    assert {shard.data.shape for shard in placed.addressable_shards} == {(2, 2)}
    back = px.gather(placed, axis)
    assert isinstance(back, np.ndarray)
    np.testing.assert_array_equal(back, x)
    uneven = px.scatter(x[:5], px.Axis("rows", 5))
    np.testing.assert_array_equal(px.gather(uneven, px.Axis("rows", 5)), x[:5])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [4, 7])
def test_a_body_may_lay_a_weight_over_another_axis(size: int) -> None:
    mesh, axis = mesh_over(data=2, model=4), px.Axis("rows", size, over="data")
    w, x = values(4, 8), values(size, 4)

    def body(w: jax.Array, x: jax.Array) -> jax.Array:
        w = lax.with_sharding_constraint(w, NamedSharding(jax.sharding.get_abstract_mesh(), P(None, "model")))
        return jnp.tanh(x @ w).sum()

    def mean(w: jax.Array, x: jax.Array) -> jax.Array:
        return px.reduce_mean(px.map_fn(body, (px.broadcast(w, axis), x), axis), axis)

    with jax.set_mesh(mesh):
        split = jax.device_put(w, NamedSharding(mesh, P(None, "model")))
        got = jax.jit(jax.value_and_grad(mean))(split, x)
    assert_close(got, jax.jit(jax.value_and_grad(lambda w: jnp.tanh(x @ w).sum(1).mean()))(w), rtol=1e-4)


def test_an_axis_may_have_the_name_of_another_s_mesh_axis() -> None:
    x = values(3, 5)
    rows, columns = px.Axis("rows", 3, over="columns"), px.Axis("columns", 5, over="rows")

    def body(x: jax.Array) -> Any:
        return px.psum(x, rows), px.pmean(x, columns), lax.all_gather(x, "rows"), lax.axis_size("columns")

    with jax.set_mesh(mesh_over(rows=4, columns=2)):
        got = jax.jit(lambda x: px.map_fn(lambda x: px.map_fn(body, x, columns), x, rows))(x)
    plain = lambda x: (lax.psum(x, "r"), lax.pmean(x, "c"), lax.all_gather(x, "r"), lax.axis_size("c"))  # noqa: E731
    assert_close(got, jax.vmap(jax.vmap(plain, axis_name="c"), axis_name="r")(x))


def test_an_axis_that_the_mesh_lacks_is_refused() -> None:
    axis, x = px.Axis("clients", 4), values(4)
    lacks = r"axis 'clients' cannot be placed: the mesh set by jax\.set_mesh has no axis 'clients'; .*over='data'\)"
    for verb in (px.broadcast, px.reduce_sum, px.scatter, px.gather, lambda x, axis: px.map_fn(jnp.sin, x, axis)):
        with jax.set_mesh(mesh_over(data=2, model=4)), pytest.raises(px.AxisError, match=lacks):
            verb(x, axis)
    with pytest.raises(px.AxisError, match=r"its mesh has no axis 'nodes'"):
        px.reduce_sum(x, px.Axis("clients", 4, mesh=mesh_over(data=2), over=("data", "nodes")))
    with pytest.raises(px.AxisError, match=r"cannot be placed over 'data': there is no mesh"):
        px.reduce_sum(x, px.Axis("clients", 4, over="data"))


def test_nested_axes_that_clash_are_refused() -> None:
    mesh, x = mesh_over(data=2, model=4), values(4, 4)
    outer = px.Axis("pods", 4, mesh=mesh, over="data")
    with pytest.raises(px.AxisError, match="mesh axis 'data', which already carries an axis that it is nested in"):
        px.map_fn(lambda x: px.reduce_sum(x, px.Axis("clients", 4, over="data")), x, outer)
    with pytest.raises(px.AxisError, match=r"axis 'clients' has a mesh of its own, .*mapped inside 'pods'.*one mesh"):
        px.map_fn(lambda x: px.reduce_sum(x, px.Axis("clients", 4, mesh=mesh_over(clients=2))), x, outer)
    with pytest.raises(px.AxisError, match=r"has no axis 'rest'"):
        px.map_fn(lambda x: px.reduce_sum(x, px.Axis("clients", 4, over="rest")), x, outer)


BODIES = {
    "a linear system": lambda w, x: lax.custom_linear_solve(
        lambda q: (2 + x[0] ** 2) * q, w, lambda _, b: b / (2 + x[0] ** 2), symmetric=True
    ),
    "a call that does nothing": lambda w, x: jnp.argmax(jax.jit(lambda x: x)(x).reshape(-1)) * jax.jit(lambda w: w)(w),
    "a loop that does nothing": lambda w, x: lax.scan(lambda c, _: (c, c), w, None, length=2)[1].sum(0) * x[0],
    "a branch that does nothing": lambda w, x: lax.cond(x[0] > 0.5, lambda w: w, lambda w: 2 * w, w),
    "its own derivative, passed on": lambda w, x: jax.vjp(jax.jit(lambda w: w), w)[1](w * x[0])[0],
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("types", ["E", "AE", "EE"])
def test_operations_keep_the_mesh_that_they_were_traced_with(body: str, types: str) -> None:
    """Types that name the user's mesh may stand in an operation's parameters, and in bodies without operations."""
    kinds = tuple({"A": AxisType.Auto, "E": AxisType.Explicit}[kind] for kind in types)
    devices = np.array(jax.devices()[:4]).reshape((4,) if len(kinds) == 1 else (2, 2))
    mesh = Mesh(devices, ("rows", "other")[: len(kinds)], axis_types=kinds)
    fn, w, x = BODIES[body], values(2), values(5, 2)
    plain = lambda w: jax.vmap(lambda x: fn(w, x))(x)  # noqa: E731
    expected = jax.jit(lambda w: (plain(w), jax.grad(lambda w: plain(w).sum())(w)))(w)
    axis = px.Axis("rows", 5, mesh=mesh)

    def mapped(w: jax.Array) -> jax.Array:
        return px.map_fn(fn, (px.broadcast(w, axis), x), axis)

    with jax.set_mesh(mesh):
        got = jax.jit(lambda w: (mapped(w), jax.grad(lambda w: px.reduce_sum(mapped(w), axis).sum())(w)))(w)
    assert_close(jax.tree.map(np.asarray, got), jax.tree.map(np.asarray, expected), rtol=1e-5)


def with_constants(x: jax.Array) -> Any:
    table = jnp.arange(3.0)
    drawn = x + jax.random.normal(jax.random.key(0), x.shape)
    return jnp.searchsorted(table, x), jnp.interp(x, table, table**2), jnp.histogram(x, bins=3)[0], drawn


@pytest.mark.sampled(2)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_constants_have_the_type_of_the_mesh_where_they_are_used(kind: AxisType, jit: bool) -> None:
    x = np.asarray(values(16, 5))
    run = lambda x: px.map_fn(with_constants, x, px.Axis("rows", 16, over="a"))  # noqa: E731
    with jax.set_mesh(mesh_over(kind, a=8)):
        found = (jax.jit(run) if jit else run)(x)
    assert_close(jax.device_get(found), jax.device_get(jax.jit(jax.vmap(with_constants))(x)), rtol=1e-5)


def test_a_callback_beside_axes_that_are_left_to_the_compiler_is_refused(kind: AxisType) -> None:
    def body(x: jax.Array) -> jax.Array:
        return jax.pure_callback(lambda x: 2 * np.asarray(x), x, x, vmap_method="sequential")

    x, mesh = np.asarray(values(8, 3)), mesh_over(kind, a=4, b=2)
    with jax.set_mesh(mesh):
        with pytest.raises(NotImplementedError, match=r"callbacks are only supported .* when all mesh axes"):
            px.map_fn(body, x, px.Axis("rows", 8, over="a", mesh=mesh))
        assert_close(np.asarray(px.map_fn(body, x, px.Axis("rows", 8, mesh=mesh, over=("a", "b")))), 2 * x)


@pytest.mark.filterwarnings("ignore:.*with mesh.*:DeprecationWarning")
def test_a_map_under_the_old_with_mesh_is_refused_over_fewer_devices() -> None:
    axis, few = px.Axis("rows", 8), mesh_over(rows=2)
    with few, pytest.raises(px.AxisError, match=r"`with mesh:` asks for 2 of 8 devices.*with jax.set_mesh\(mesh\)"):
        px.map_fn(jnp.sin, values(8), axis)
    with few, jax.set_mesh(few):
        assert px.map_fn(jnp.sin, values(8), axis).sharding.device_set == set(jax.devices()[:2])
