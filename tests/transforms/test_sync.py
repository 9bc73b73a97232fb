"""What becomes of variables that many devices write under ``px.Parallel``: rules, BatchNorm, random streams, errors."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

import paraxis as px
from tests._support import assert_close, at_night, values
from tests.transforms._models import Normed

DEVICES = [1, 2, 3, 8]
SOME_DEVICES = [1, 8, *at_night([2, 3], 2)]


class Total(nnx.Variable[Any]):
    pass


class Special(Total):
    pass


class Store(nnx.Module):
    """Variables by name."""

    v: nnx.Variable[Any]

    def __init__(self, **variables: nnx.Variable[Any]) -> None:
        for name, variable in variables.items():
            setattr(self, name, variable)

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)[...]


def mesh_of(devices: int, kind: AxisType = AxisType.Auto) -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]), ("device",), axis_types=(kind,))


def add_index(store: Store) -> None:
    """Each device adds its number to every variable."""
    for v in px.variables(store):
        v.set_value(v[...] + px.axis_index("device").astype(v[...].dtype))


def rewrite(store: Store) -> None:
    """Each device writes what was there."""
    for v in px.variables(store):
        v.set_value(v[...] * 1)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("devices", "kind"), [*((n, AxisType.Auto) for n in DEVICES), (8, AxisType.Explicit)], ids=str)
def test_each_rule(devices: int, kind: AxisType) -> None:
    start = np.array([1.0, 2.0], "float32")
    stacked = start + np.arange(devices, dtype="float32")[:, None]
    expected: dict[str, Any] = {
        "mean": stacked.mean(0),
        "sum": stacked.sum(0),
        "max": stacked.max(0),
        "min": stacked.min(0),
        "first": stacked[0],
        "stack": stacked,
        "median": np.median(stacked, axis=0).astype("float32"),
    }
    rules: dict[str, Any] = {name: name for name in expected} | {"median": lambda x: jnp.median(x, axis=0)}
    own = Store(**{name: Total(jnp.asarray(start), sync=rule) for name, rule in rules.items()})
    named = Store(**{name: Total(jnp.asarray(start)) for name in rules})
    px.Parallel(add_index, own, mesh=mesh_of(devices, kind))()
    sync = {f"(Store).{name}": rule for name, rule in rules.items()}
    px.Parallel(add_index, named, sync=sync, mesh=mesh_of(devices, kind))()
    for store in (own, named):
        assert_close({name: np.asarray(store[name]) for name in rules}, expected)


def test_which_rule_goes_first() -> None:
    start = jnp.array([1.0])

    def after(variable: nnx.Variable[Any], sync: dict[Any, Any]) -> float:
        store = Store(v=variable)
        px.Parallel(add_index, store, sync=sync, mesh=mesh_of(2))()
        return float(store["v"][0])

    everything = {"(Store).v": "max", Special: "min", Total: "sum", nnx.Variable: "mean"}
    assert after(Special(start, sync="mean"), everything) == 1.5
    assert after(Special(start), everything) == 2.0
    assert after(Special(start), {Total: "sum", nnx.Variable: "mean", Special: "min"}) == 1.0
    assert after(Special(start), {nnx.Variable: "mean", Total: "sum"}) == 3.0
    assert after(nnx.BatchStat(start), {}) == 1.5
    assert after(nnx.BatchStat(start), {nnx.BatchStat: "max"}) == 2.0


def test_no_rule_is_an_error_that_names_the_variable() -> None:
    with pytest.raises(px.StateError, match=r"variable \(Store\)\.v could be left.*sync=\{.*Total: 'mean'\}"):
        px.Parallel(add_index, Store(v=Total(jnp.ones(2))))()
    for variable, sync in (
        (nnx.BatchStat(jnp.ones(2)), {nnx.BatchStat: None}),
        (Total(1.0, sync=None), {Total: "sum"}),
    ):
        with pytest.raises(px.StateError, match=r"variable \(Store\)\.v could be left.*'mean'"):
            px.Parallel(add_index, Store(v=variable), sync=sync)()
    store = Store(v=Total(jnp.arange(3.0)))
    px.Parallel(rewrite, store)()  # the same on all devices: no rule is needed
    assert store["v"].tolist() == [0, 1, 2]


INTEGERS: dict[str, Any] = {
    "int32": [0, -7, 2**25 + 1, -(2**25) - 3],
    "uint32": [0, 5, 2**25 + 1, 2**31 + 1],
    "int8": [0, -5, 100],
}


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_keep_their_dtype_and_are_exact(dtype: str) -> None:
    start = np.array(INTEGERS[dtype], dtype)
    stacked = start.astype("int64") + np.arange(8)[:, None]
    expected = {
        "mean": np.floor(stacked.mean(0) + 0.5),  # in float64: a half is rounded up
        "sum": stacked.sum(0).astype(dtype),  # wraps as the dtype does
        "max": stacked.max(0),
        "min": stacked.min(0),
        "first": stacked[0],
        "stack": stacked,
    }
    store = Store(**{rule: nnx.Variable(jnp.asarray(start), sync=rule) for rule in expected})
    px.Parallel(add_index, store)()
    for rule, value in expected.items():
        got = np.asarray(store[rule])
        assert got.dtype == dtype, rule
        assert got.tolist() == value.astype(dtype).tolist(), rule


@pytest.mark.parametrize("devices", SOME_DEVICES)
def test_batch_statistics_of_each_device_are_averaged(devices: int) -> None:
    net, x = nnx.BatchNorm(3, momentum=0.9, rngs=nnx.Rngs(0)), values(24, 3)
    y = px.Parallel(net, mesh=mesh_of(devices))(x)
    shares = np.asarray(x, "float64").reshape(devices, -1, 3)
    normed = (shares - shares.mean(1, keepdims=True)) / np.sqrt(shares.var(1, keepdims=True) + 1e-5)
    assert_close(np.asarray(y), normed.reshape(24, 3).astype("float32"), rtol=1e-4, atol=1e-4)
    assert_close(np.asarray(net.mean[...]), (0.1 * shares.mean(1).mean(0)).astype("float32"))
    assert_close(np.asarray(net.var[...]), (0.9 + 0.1 * shares.var(1).mean(0)).astype("float32"))


def loss(net: Normed, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    out = net(x)
    return ((out - y) ** 2).mean(), out


@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", SOME_DEVICES)
def test_synchronised_batch_norm_is_that_of_one_device(devices: int) -> None:
    def step(net: Normed, x: jax.Array, y: jax.Array) -> Any:
        gradients, (_, out) = px.GradValues(loss, net)(x, y)
        return px.pmean(gradients, "device"), out

    x, y = values(24, 3) * 4 - 4, values(24, 4, seed=1)  # around zero, where NNX's variance is not rounded away
    net, alone = Normed(nnx.Rngs(0)), Normed(nnx.Rngs(0))
    synchronised = px.Parallel(step, net, sync_batch_norm=True, reduce=("same", "concat"), mesh=mesh_of(devices))
    on_one = nnx.value_and_grad(loss, has_aux=True)
    synchronised(x, y)
    on_one(alone, x, y)
    gradients, out = synchronised(x, y)
    (_, out_alone), gradients_alone = on_one(alone, x, y)
    by_name = dict(zip(px.variables(alone).subset(nnx.Param).names(), jax.tree.leaves(gradients_alone), strict=True))
    assert_close(np.asarray(out), np.asarray(out_alone), rtol=1e-5)
    assert_close({n: np.asarray(g) for n, g in gradients.items()}, {n: np.asarray(g) for n, g in by_name.items()})
    for ours, theirs in zip(px.variables(net), px.variables(alone), strict=True):
        assert_close(np.asarray(ours[...]), np.asarray(theirs[...]), rtol=1e-5)
    assert net.norm.axis_name is None
    assert_close(np.asarray(net(x)), np.asarray(alone(x)), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", SOME_DEVICES)
def test_each_device_and_each_call_has_its_own_mask(devices: int) -> None:
    drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    fast = px.Parallel(lambda drop, x: (drop(x), drop(x)), drop, reduce="stack", mesh=mesh_of(devices))
    assert drop.rngs is not None
    masks: list[bytes] = []
    for call in range(1, 4):
        for y in fast(jnp.ones((24, 64))):
            masks += [np.asarray(share[0] > 0).tobytes() for share in y]
        assert (drop.rngs.count[...].shape, int(drop.rngs.count[...])) == ((), call)
    assert len(set(masks)) == len(masks) == 3 * 2 * devices
    again = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    first = px.Parallel(again, mesh=mesh_of(devices), reduce="stack")(jnp.ones((24, 64)))
    assert [np.asarray(share[0] > 0).tobytes() for share in first] == masks[:devices]


def cubed(net: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    out = net(x)
    return (out**3).mean(), out


REACHED: dict[str, Any] = {
    "a function that is compiled": lambda net: (px.Jit(px.Jit(net)),),
    "gradients that are bound": lambda net: (lambda gv, x: gv(x)[1][1], px.GradValues(cubed, net)),
    "gradients inside": lambda net: (lambda net, x: nnx.value_and_grad(cubed, has_aux=True)(net, x)[0][1], net),
    "one that is made inside": lambda net: (lambda net, x: net(x) + nnx.BatchNorm(3, rngs=nnx.Rngs(0))(x) * 0, net),
    "NNX's own transformation": lambda net: (lambda net, x: nnx.remat(lambda net, x: net(x))(net, x), net),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("way", REACHED)
def test_batch_norm_is_synchronised_however_it_is_reached(way: str) -> None:
    x = (values(16, 3) - 1) * jnp.arange(1.0, 17.0)[:, None]  # shares that differ
    net, alone = (nnx.BatchNorm(3, momentum=0.5, rngs=nnx.Rngs(0)) for _ in range(2))
    fn, *given = REACHED[way](net)
    out = px.Parallel(fn, *given, sync_batch_norm=True)(x)
    assert_close(np.asarray(out), np.asarray(alone(x)), rtol=1e-4)
    assert_close(np.asarray(net.var[...]), np.asarray(alone.var[...]), rtol=1e-4)
    assert net.axis_name is None
