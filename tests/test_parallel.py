"""``px.Parallel`` gives what one device gives: arguments split, results combined, variables that devices write."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import paraxis as px
from tests._modules import Normed, Tied, host, mesh_of, mlp
from tests._support import assert_close, at_night, mesh_over, values

SOME_DEVICES = [1, 8, *at_night([2, 3], 2)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", SOME_DEVICES)
def test_parallel_gives_what_a_module_gives_on_one_device(devices: int) -> None:
    x, mesh = values(24, 3), mesh_of(devices)
    for net in (mlp(), Tied(nnx.Rngs(0))):
        got = px.Parallel(net, mesh=mesh)(x)
        assert_close(host(got), net(x), rtol=1e-6)
        assert px.Parallel(net, mesh=mesh)(x[:0]).shape == net(x[:0]).shape
        assert got.sharding.device_set == set(jax.devices()[:devices])
    net, other = mlp(), Tied(nnx.Rngs(1))
    assert_close(host(px.Parallel(lambda a, b, x: a(b(x)) + 1, net, other, mesh=mesh)(x)), net(other(x)) + 1)
    assert_close(host(px.Parallel(net.first, mesh=mesh)(x)), net.first(x))
    assert_close(host(px.Parallel(net.first.__call__, mesh=mesh)(x)), net.first(x))
    assert_close(host(px.Parallel(lambda x: x * 2, mesh=mesh)(x)), x * 2)


# What each word does to results that are stacked, (devices, ...).
RULES: dict[str, Callable[[Any], Any]] = {
    "stack": lambda y: y,
    "first": lambda y: y[0],
    "mean": lambda y: y.mean(0),
    "sum": lambda y: y.sum(0),
    "max": lambda y: y.max(0),
    "min": lambda y: y.min(0),
}
REDUCTIONS = RULES | {"concat": lambda y: jnp.concatenate(y) if y.ndim > 1 else y}


@pytest.mark.parametrize("devices", [8, *at_night([1, 3], 2)])
def test_parallel_reduces_results_in_each_way(devices: int) -> None:
    """Rows, integers, scalars, and what is the same for all."""
    x, mesh = values(24, 3), mesh_of(devices)
    outputs = lambda x: [jnp.sin(x), (x * 10).astype("int32"), x.sum(0) > 3 * len(x), x.mean(), jnp.arange(3.0)]  # noqa: E731
    stacked = jax.jit(jax.vmap(outputs))(x.reshape(devices, -1, 3))
    got = px.Parallel(lambda x: (outputs(x),) * len(REDUCTIONS), mesh=mesh, reduce=tuple(REDUCTIONS))(x)
    expected = jax.jit(lambda stacked: {kind: [oracle(y) for y in stacked] for kind, oracle in REDUCTIONS.items()})
    assert_close(dict(zip(REDUCTIONS, map(host, got), strict=True)), expected(stacked))


def test_parallel_checks_what_is_to_be_the_same_before_anything_runs() -> None:
    net, x = mlp(), values(16, 3)
    got = px.Parallel(lambda net, x: px.pmean(net(x).mean(), "device"), net, reduce="same")(x)
    assert_close(np.asarray(got), np.asarray(net(x)).mean())
    with pytest.raises(px.StateError, match=r"result\['a'\] is to be the same.*depends on the device's share; .*pmean"):
        px.Parallel(lambda net, x: {"a": net(x)}, net, reduce="same")(x)
    assert_close(host(px.Parallel(net, reduce="same", check=False)(x)), net(x)[:2])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_parallel_runs_on_a_mesh_that_is_given_or_set(kind: AxisType) -> None:
    x, expected = values(24, 3), mlp()(values(24, 3))
    body = lambda net, x: (net(x), px.pmean(net(x), "device"))  # noqa: E731
    places: list[tuple[Mesh, Any, int]] = [
        (mesh_of(2, "rows", kind), "rows", 2),
        (mesh_over(kind, device=4, model=2), None, 4),
        (mesh_over(kind, replica=4, rows=2), ("replica", "rows"), 8),
    ]
    for mesh, over, devices in places:
        mean = np.asarray(expected).reshape(devices, -1, 4).mean(0)
        net = mlp()
        given = px.Parallel(body, net, mesh=mesh, over=over, reduce=("concat", "same"))(x)
        assert_close(jax.tree.map(np.asarray, given), (np.asarray(expected), mean))
        with jax.set_mesh(mesh):
            as_set = px.Parallel(body, net, over=over, reduce=("concat", "same"))(x)
        assert_close(jax.tree.map(np.asarray, as_set), (np.asarray(expected), mean))


def test_parallel_takes_arguments_that_lie_elsewhere() -> None:
    x = values(24, 3)
    expected = np.asarray(mlp()(x))
    rows = NamedSharding(mesh_of(8, "other"), P("other"))
    places = [jax.devices()[5], rows, NamedSharding(mesh_of(4), P("device")), NamedSharding(mesh_of(2), P())]
    for devices in (1, 3, 8):
        fast = px.Parallel(mlp(), mesh=mesh_of(devices))
        for given in (np.asarray(x), *(jax.device_put(x, place) for place in places), x):
            assert_close(np.asarray(fast(given)), expected)


def test_parallel_sends_variables_to_all_devices_once() -> None:
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


TREES: dict[str, tuple[Any, Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "a dict": (0, lambda d: d["a"] * d["b"][0][:, None], lambda: ({"a": values(24, 3), "b": [values(24), 2.0]},)),
    "a prefix": (
        ({"a": 0, "b": None}, [1, None]),
        lambda d, e: d["a"] @ d["b"]["c"] + e[0].T + e[1].sum(),
        lambda: ({"a": values(24, 3), "b": {"c": values(3, 3)}}, [values(3, 24), values(7)]),
    ),
    "keys": (0, lambda k: jax.vmap(jax.random.normal)(k), lambda: (jax.random.split(jax.random.key(0), 24),)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("devices", [3, 8])
@pytest.mark.parametrize("name", TREES)
def test_parallel_splits_arguments_by_their_axes(name: str, devices: int) -> None:
    axes, body, make = TREES[name]
    args = make()
    got = px.Parallel(body, batch_axis=axes, mesh=mesh_of(devices))(*args)
    assert_close(host(got), host(jnp.asarray(body(*args))))


class Total(nnx.Variable[Any]):
    pass


class Store(nnx.Module):
    """Variables by name."""

    v: nnx.Variable[Any]

    def __init__(self, **variables: nnx.Variable[Any]) -> None:
        for name, variable in variables.items():
            setattr(self, name, variable)

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)[...]


def add_index(store: Store) -> None:
    """Each device adds its number to every variable."""
    for v in px.variables(store):
        v.set_value((v[...] + px.axis_index("device")).astype(v[...].dtype))


def rewrite(store: Store) -> None:
    """Each device writes what was there."""
    for v in px.variables(store):
        v.set_value(v[...] * 1)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", ["float32", "int32", "uint32", "int8", "bool"])
@pytest.mark.parametrize(
    ("devices", "kind"), [*((n, AxisType.Auto) for n in (1, 2, 3, 8)), (8, AxisType.Explicit)], ids=str
)
def test_parallel_keeps_the_dtype_under_each_rule(devices: int, kind: AxisType, dtype: str) -> None:
    start = np.array([0, 1, 1], dtype)
    stacked = (start.astype("int64") + np.arange(devices)[:, None]).astype(dtype).astype("float64")
    own = Store(**{rule: Total(jnp.asarray(start), sync=rule) for rule in RULES})
    px.Parallel(add_index, own, mesh=mesh_of(devices, kind=kind))()
    for rule, oracle in RULES.items():
        expected, got = oracle(stacked), np.asarray(own[rule])
        assert got.dtype == dtype, rule
        assert_close(got, (expected if dtype == "float32" else np.round(expected)).astype(dtype))
    median = Store(v=Total(jnp.asarray(start), sync=lambda x: jnp.median(x, axis=0)))
    typed = Store(v=Total(jnp.asarray(start)))
    px.Parallel(add_index, median, mesh=mesh_of(devices, kind=kind))()
    px.Parallel(add_index, typed, sync={nnx.Variable: "min", Total: "max"}, mesh=mesh_of(devices, kind=kind))()
    assert_close(np.asarray(median["v"]).astype("float64"), np.median(stacked, axis=0))
    assert_close(np.asarray(typed["v"]), stacked.max(0).astype(dtype))


def test_parallel_names_the_variable_that_has_no_rule() -> None:
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


@pytest.mark.parametrize("devices", SOME_DEVICES)
def test_parallel_averages_batch_statistics_of_each_device(devices: int) -> None:
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
def test_parallel_synchronises_batch_norm_as_on_one_device(devices: int) -> None:
    def step(net: Normed, x: jax.Array, y: jax.Array) -> Any:
        gradients, (_, out) = px.GradValues(loss, net)(x, y)
        return px.pmean(gradients, "device"), out

    x, y = values(24, 3) * 4 - 4, values(24, 4, seed=1)  # around zero, where NNX's variance is not rounded away
    net, alone = Normed(nnx.Rngs(0)), Normed(nnx.Rngs(0))
    synchronised = px.Parallel(step, net, sync_batch_norm=True, reduce=("same", "concat"), mesh=mesh_of(devices))
    on_one = nnx.jit(nnx.value_and_grad(loss, has_aux=True))
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


def is_refused(body: Callable[..., Any], *args: Any) -> bool:
    """Whether results that must be the same on all devices are refused, when traced; nothing runs."""
    try:
        jax.eval_shape(px.Parallel(body, reduce="same", axis_name="rows", batch_axis=(0, None)), *args)
    except px.StateError as error:
        return "is to be the same on all devices" in str(error)
    return False


@pytest.mark.floor
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (lambda x, w: x, True),
        (lambda x, w: w, False),
        (lambda x, w: w * 2 + jnp.sin(w), False),
        (lambda x, w: w + x * 0, True),
        (lambda x, w: jax.lax.psum(x, "rows"), False),
        (lambda x, w: jax.lax.pmean(x, "rows") + w, False),
        (lambda x, w: jax.lax.pmax(x, "rows"), False),
        (lambda x, w: jax.lax.pmin(x, "rows"), False),
        (lambda x, w: jax.lax.all_gather(x, "rows"), False),
        (lambda x, w: jax.lax.axis_index("rows"), True),
        (lambda x, w: jax.lax.ppermute(x, "rows", [(i, (i + 1) % 8) for i in range(8)]), True),
        (lambda x, w: jax.lax.scan(lambda c, _: (c + w, None), w, None, length=3)[0], False),
        (lambda x, w: jax.lax.scan(lambda c, _: (c + x, None), w, None, length=3)[0], True),
        (lambda x, w: jax.lax.cond(x[0] > 0, lambda: w, lambda: -w), True),
        (lambda x, w: jax.jit(lambda w: w + jax.lax.psum(x, "rows"))(w), False),
        (lambda x, w: jax.random.normal(jax.random.key(0), (3,)), False),
        (lambda x, w: 3.0, False),
    ],
)
def test_parallel_finds_what_may_differ_between_elements(body: Callable[..., Any], expected: bool) -> None:
    assert is_refused(body, jnp.ones(24), jnp.ones(3)) == expected
