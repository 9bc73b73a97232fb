"""``px.Parallel`` gives what one device gives, whatever the devices are and however their results are put together."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import paraxis as px
from tests._support import assert_close, at_night, values
from tests.transforms._models import MLP, Tied

SOME_DEVICES = [1, 8, *at_night([2, 3], 2)]


def mesh_of(devices: int, name: str = "device", kind: AxisType = AxisType.Auto) -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]), (name,), axis_types=(kind,))


def grid(*names: str, kind: AxisType = AxisType.Auto) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(4, 2), names, axis_types=(kind, kind))


def mlp() -> MLP:
    return MLP(nnx.Rngs(0))


def host(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), tree)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", SOME_DEVICES)
def test_a_module_gives_what_it_gives_on_one_device(devices: int) -> None:
    x, mesh = values(24, 3), mesh_of(devices)
    for net in (mlp(), Tied(nnx.Rngs(0))):
        got = px.Parallel(net, mesh=mesh)(x)
        assert_close(host(got), net(x), rtol=1e-6)
        assert got.sharding.device_set == set(jax.devices()[:devices])
    net, other = mlp(), Tied(nnx.Rngs(1))
    assert_close(host(px.Parallel(lambda a, b, x: a(b(x)) + 1, net, other, mesh=mesh)(x)), net(other(x)) + 1)
    assert_close(host(px.Parallel(net.first, mesh=mesh)(x)), net.first(x))
    assert_close(host(px.Parallel(net.first.__call__, mesh=mesh)(x)), net.first(x))
    assert_close(host(px.Parallel(lambda x: x * 2, mesh=mesh)(x)), x * 2)


# What each word does to results that are stacked, (devices, ...).
REDUCTIONS: dict[Any, Callable[[jax.Array], jax.Array]] = {
    "concat": lambda y: jnp.concatenate(y) if y.ndim > 1 else y,
    "stack": lambda y: y,
    "first": lambda y: y[0],
    "mean": lambda y: jnp.mean(y, 0),
    "sum": lambda y: jnp.sum(y, 0),
    "max": lambda y: jnp.max(y, 0),
    "min": lambda y: jnp.min(y, 0),
}
OUTPUTS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "rows": lambda x: jnp.sin(x),
    "a scalar": lambda x: x.mean(),
    "one dimension": lambda x: x.sum(0),
    "integers": lambda x: (x * 10).astype("int32"),
    "booleans": lambda x: x > 1,
    "half precision": lambda x: x.astype("bfloat16"),
    "the same for all": lambda x: jnp.arange(3.0),
    "an integer for all": lambda x: jnp.asarray(x.shape[1]),
}


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 3, 8])
def test_each_reduction_of_each_output(devices: int) -> None:
    x = values(24, 3)
    for name, output in OUTPUTS.items():
        stacked = jnp.stack([output(share) for share in jnp.split(x, devices)])
        body = lambda x, output=output: (output(x),) * len(REDUCTIONS)  # noqa: E731
        got = px.Parallel(body, mesh=mesh_of(devices), reduce=tuple(REDUCTIONS))(x)
        for kind, one in zip(REDUCTIONS, got, strict=True):
            expected = REDUCTIONS[kind](stacked)
            try:
                assert_close(host(one), host(expected), rtol=1e-2 if expected.dtype == jnp.bfloat16 else 2e-5)
            except AssertionError as error:
                raise AssertionError(f"{name}, reduce={kind!r}: {error}") from error


def test_the_same_is_checked_before_anything_runs() -> None:
    net, x = mlp(), values(16, 3)
    got = px.Parallel(lambda net, x: px.pmean(net(x).mean(), "device"), net, reduce="same")(x)
    assert_close(np.asarray(got), np.asarray(net(x)).mean())
    with pytest.raises(px.StateError, match=r"result\['a'\] is to be the same.*depends on the device's share; .*pmean"):
        px.Parallel(lambda net, x: {"a": net(x)}, net, reduce="same")(x)
    assert_close(host(px.Parallel(net, reduce="same", check=False)(x)), net(x)[:2])


@pytest.mark.parametrize("devices", SOME_DEVICES)
def test_collectives_are_over_all_devices(devices: int) -> None:
    x = values(24, 3)
    total = px.Parallel(lambda x: x / px.psum(x.sum(), "device"), mesh=mesh_of(devices))(x)
    assert_close(host(total), x / x.sum())
    lax_total = px.Parallel(lambda x: x / jax.lax.psum(x.sum(), "d"), mesh=mesh_of(devices, "d"), axis_name="d")(x)
    assert_close(host(lax_total), x / x.sum())
    body = lambda: (px.axis_index("device"), jnp.asarray(px.axis_size("device")))  # noqa: E731
    index, size = px.Parallel(body, mesh=mesh_of(devices), reduce=("concat", "same"))()
    assert index.tolist() == list(range(devices))
    assert int(size) == devices


KINDS = [AxisType.Auto, AxisType.Explicit]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_mesh_that_is_given_or_set(kind: AxisType) -> None:
    x, expected = values(24, 3), mlp()(values(24, 3))
    body = lambda net, x: (net(x), px.pmean(net(x), "device"))  # noqa: E731
    places: list[tuple[Mesh, Any, int]] = [
        (mesh_of(2, "rows", kind), "rows", 2),
        (grid("device", "model", kind=kind), None, 4),
        (grid("replica", "rows", kind=kind), ("replica", "rows"), 8),
    ]
    for mesh, over, devices in places:
        mean = np.asarray(expected).reshape(devices, -1, 4).mean(0)
        net = mlp()
        given = px.Parallel(body, net, mesh=mesh, over=over, reduce=("concat", "same"))(x)
        assert_close(jax.tree.map(np.asarray, given), (np.asarray(expected), mean))
        with jax.set_mesh(mesh):
            as_set = px.Parallel(body, net, over=over, reduce=("concat", "same"))(x)
        assert_close(jax.tree.map(np.asarray, as_set), (np.asarray(expected), mean))


def test_an_axis_that_the_mesh_lacks_is_named() -> None:
    net, x = mlp(), values(8, 3)
    with pytest.raises(px.AxisError, match="no axis 'device'; it has 'rows'"):
        px.Parallel(net, mesh=mesh_of(2, "rows"))(x)
    with jax.set_mesh(mesh_of(2, "rows")), pytest.raises(px.AxisError, match=r"no axis 'device'; it has 'rows'"):
        px.Parallel(net)(x)


def test_arguments_that_lie_elsewhere() -> None:
    x = values(24, 3)
    expected = np.asarray(mlp()(x))
    rows = NamedSharding(mesh_of(8, "other"), P("other"))
    places = [jax.devices()[5], rows, NamedSharding(mesh_of(4), P("device")), NamedSharding(mesh_of(2), P())]
    for devices in (1, 3, 8):
        fast = px.Parallel(mlp(), mesh=mesh_of(devices))
        for given in (np.asarray(x), *(jax.device_put(x, place) for place in places), x):
            assert_close(np.asarray(fast(given)), expected)


def test_variables_are_sent_to_all_devices_once() -> None:
    net = mlp()
    net.last.kernel.set_value(jax.device_put(net.last.kernel[...], jax.devices()[3]))
    fast, mesh = px.Parallel(net), mesh_of(8)
    x = jax.device_put(values(16, 3), NamedSharding(mesh, P("device")))
    fast(x)
    there = [v[...] for v in px.variables(net)]
    assert all(v.sharding.is_fully_replicated and len(v.sharding.device_set) == 8 for v in there)
    with jax.transfer_guard("disallow"):
        y = fast(x)
    assert all(v[...] is old for v, old in zip(px.variables(net), there, strict=True))
    assert_close(np.asarray(y), np.asarray(mlp()(values(16, 3))))
    net.last.kernel.set_value(jnp.zeros((8, 4)))
    assert not np.asarray(fast(x)).any()
