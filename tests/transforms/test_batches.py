"""How ``px.Parallel`` splits arguments over devices; rows that do not divide are padded, or refused with the reason."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

import paraxis as px
from tests._support import assert_close, values
from tests.transforms._models import MLP, Normed

DEVICES = [1, 2, 3, 8]


def mesh_of(devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]), ("device",))


def mlp() -> MLP:
    return MLP(nnx.Rngs(0))


def host(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), tree)


# --- arguments -------------------------------------------------------------------------------------------------------


def test_each_device_is_given_its_share() -> None:
    def body(x: jax.Array, y: jax.Array, a: Any, b: Any, *, k: jax.Array) -> jax.Array:
        shapes = (x.shape, y.shape, jnp.shape(a), jnp.shape(b), k.shape)
        assert shapes == ((3, 2), (3,), (), (), (5,)), shapes
        return jnp.stack([x.sum() * a, y.sum() * b, k.sum()])

    x, y, k = values(24, 2), values(24), values(5)
    got = px.Parallel(body, reduce="stack")(x, np.asarray(y), 2.0, jnp.asarray(3.0), k=k)
    sums = np.asarray(x).reshape(8, -1).sum(1) * 2, np.asarray(y).reshape(8, -1).sum(1) * 3
    assert_close(np.asarray(got), np.stack([*sums, np.full(8, np.asarray(k).sum())], 1).astype("float32"))


TREES: dict[str, tuple[Any, Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "one for all": (1, lambda x, y: x.T * y.T, lambda: (values(3, 24), values(3, 24, seed=1))),
    "from the end": (-1, lambda x: x.T * 2, lambda: (values(3, 24),)),
    "one of them whole": ((0, None), lambda x, w: x @ w, lambda: (values(24, 3), values(3, 3))),
    "none of them": ((None, None), lambda x, w: x @ w, lambda: (values(4, 3), values(3, 3))),
    "more than needed": ((0, 0, 1), lambda x: x + 1, lambda: (values(24, 3),)),
    "a dict": (0, lambda d: d["a"] * d["b"][0][:, None], lambda: ({"a": values(24, 3), "b": [values(24), 2.0]},)),
    "a prefix": (
        ({"a": 0, "b": None}, [1, None]),
        lambda d, e: d["a"] @ d["b"]["c"] + e[0].T + e[1].sum(),
        lambda: ({"a": values(24, 3), "b": {"c": values(3, 3)}}, [values(3, 24), values(7)]),
    ),
    "a missing one": (0, lambda x, y: x if y is None else y, lambda: (values(24, 3), None)),
    "integers and booleans": (0, lambda x, y: jnp.where(y, x, -x), lambda: (np.arange(24), np.arange(24) % 2 > 0)),
    "keys": (0, lambda k: jax.vmap(jax.random.normal)(k), lambda: (jax.random.split(jax.random.key(0), 24),)),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("devices", [3, 8])
@pytest.mark.parametrize("name", TREES)
def test_axes_of_arguments(name: str, devices: int) -> None:
    axes, body, make = TREES[name]
    args = make()
    kind = "same" if name == "none of them" else "concat"
    got = px.Parallel(body, batch_axis=axes, reduce=kind, mesh=mesh_of(devices))(*args)
    assert_close(host(got), host(jnp.asarray(body(*args))))


def test_static_arguments() -> None:
    traced = []

    def body(net: MLP, kind: str, x: jax.Array, power: int = 1, *, shift: Any = 0.0) -> jax.Array:
        assert isinstance(kind, str)
        assert isinstance(power, int)
        traced.append(kind)
        return net(x) ** power + shift if kind == "net" else x

    net, x = mlp(), values(16, 3)
    by_number = px.Parallel(body, net, static_argnums=(0, 2))
    for fast in (by_number, px.Parallel(body, net, static_argnames=("kind", "power"))):
        traced.clear()
        for _ in range(2):
            assert_close(host(fast("net", x, 2)), net(x) ** 2)
            assert_close(host(fast("net", x, power=2)), net(x) ** 2)
            assert_close(host(fast("net", x, shift=0.5)), net(x) + 0.5)
            assert_close(host(fast("as is", x, 1)), x)
        assert sorted(traced) == ["as is", "net", "net", "net"]
    axes = px.Parallel(body, net, static_argnums=(0, 2), batch_axis=(None, 1, None))
    with pytest.raises(TypeError, match="dot_general"):
        axes("net", x, 1)
    assert_close(host(px.Parallel(lambda x, flag: x.T if flag else x, static_argnums=1, batch_axis=1)(x.T, True)), x)


def test_a_body_without_arguments() -> None:
    def decay(net: MLP, rate: float) -> None:
        for v in px.variables(net).subset(nnx.Param):
            v.set_value(v[...] * rate)

    net, before = mlp(), mlp()
    assert px.Parallel(lambda net: decay(net, 0.5), net)() is None
    px.Parallel(decay, net)(0.5)
    px.Parallel(decay, net)(rate=jnp.asarray(2.0))
    for v, old in zip(px.variables(net), px.variables(before), strict=True):
        assert_close(np.asarray(v[...]), np.asarray(old[...]) / 2)


# --- rows that do not divide -----------------------------------------------------------------------------------------


class Convolution(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.conv = nnx.Conv(1, 2, (3,), rngs=rngs)
        self.last = nnx.Linear(6, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        pooled = nnx.avg_pool(jax.nn.relu(self.conv(x[..., None])), (2,), strides=(1,), padding="SAME")
        return jax.nn.softmax(self.last(pooled.reshape(len(x), -1)))


def _evaluated() -> Normed:
    net = Normed(nnx.Rngs(0))
    net.norm.mean[...] = values(8)
    net.eval()
    return net


ROW_WISE: dict[str, tuple[Callable[[], Any], Callable[..., Any]]] = {
    "a module": (mlp, lambda net, x: net(x)),
    "a convolution": (Convolution, lambda net, x: net(x)),
    "batch statistics that are fixed": (_evaluated, lambda net, x: net(x)),
    "one number per row": (mlp, lambda net, x: net(x).argmax(-1)),
    "several results": (mlp, lambda net, x: {"y": net(x), "norm": [(x**2).sum(-1), net(x) > 0]}),
    "a loop": (mlp, lambda net, x: jax.lax.fori_loop(0, 3, lambda _, x: jnp.sin(x), net(x))),
    "a map over rows": (mlp, lambda net, x: jax.vmap(lambda row: net(row) / net(row).sum())(x)),
    "per-row derivatives": (mlp, lambda net, x: jax.vmap(jax.grad(lambda row: net(row).sum()))(x)),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ROW_WISE)
def test_rows_are_padded_and_sliced(name: str) -> None:
    make, body = ROW_WISE[name]
    for devices, rows in ((3, 7), (8, 3)):
        net, x = make(), values(rows, 3)
        got = px.Parallel(body, net, mesh=mesh_of(devices))(x)
        assert_close(host(got), host(body(net, x)))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", DEVICES)
def test_any_number_of_rows(devices: int) -> None:
    fast, net = px.Parallel(mlp(), mesh=mesh_of(devices)), mlp()
    for rows in (1, 2, 7, 9, 16):
        assert_close(host(fast(values(rows, 3))), net(values(rows, 3)))
    x = values(3, 7)
    along_one = px.Parallel(lambda net, x: net(x.T), net, batch_axis=1, mesh=mesh_of(devices))
    assert_close(host(along_one(x)), net(x.T))


def test_padding_has_the_derivative_of_one_device() -> None:
    net, x = mlp(), values(10, 3)
    fast = px.Parallel(net)
    expected = jax.grad(lambda x: (net(x) ** 2).mean())(x)
    assert_close(host(jax.grad(lambda x: (fast(x) ** 2).mean())(x)), expected)


def test_what_does_not_depend_on_rows_is_not_in_the_way() -> None:
    net, x = mlp(), values(10, 3)

    def body(net: MLP, x: jax.Array, scale: float) -> Any:
        net.last.kernel[...] = net.last.kernel[...] + scale
        return net(x), net.last.kernel[...] * 2, jnp.asarray(scale) * 2

    rows, kernel, scale = px.Parallel(body, net, reduce=("concat", "same", "mean"))(x, 0.5)
    assert_close((host(rows), host(kernel), float(scale)), (net(x), host(net.last.kernel[...]) * 2, 1.0))
    assert_close(host(net.last.kernel[...]), mlp().last.kernel[...] + 0.5)


def _mean_loss(net: MLP, x: jax.Array) -> jax.Array:
    return (net(x) ** 2).mean()


def _step(net: MLP, x: jax.Array) -> None:
    gradients, _ = px.GradValues(_mean_loss, net)(x)
    px.Optimizer(net, optax.sgd)(0.1, px.pmean(gradients, "device"))


def _write_mean(net: MLP, x: jax.Array) -> None:
    net.last.kernel[...] = net.last.kernel[...] + px.pmean(net(x).mean(0), "device")


REFUSED: dict[str, tuple[Callable[[], Any], Callable[..., Any], str, str]] = {
    "a mean loss": (mlp, _mean_loss, "mean", r"result is not one value per row: reduce_sum over the rows"),
    "one of several": (
        mlp,
        lambda net, x: {"y": net(x), "z": x.max()},
        "concat",
        r"result\['z'\] is not one .*reduce_max",
    ),
    "BatchNorm": (lambda: Normed(nnx.Rngs(0)), lambda net, x: net(x), "concat", r"\(BatchNorm\)\.mean is written with"),
    "a step": (
        mlp,
        _step,
        "concat",
        r"variable \(MLP\)\.first\(Linear\)\.bias is written with what depends on the rows",
    ),
    "state": (mlp, _write_mean, "concat", r"variable \(MLP\)\.last\(Linear\)\.kernel is written with what depends"),
    "a collective": (
        mlp,
        lambda net, x: net(x) - px.pmean(x.sum(), "device"),
        "concat",
        r"result is not one .*reduce_sum",
    ),
    "rows of others": (
        mlp,
        lambda net, x: x - px.pmean(x, "device"),
        "concat",
        r"result is not one value per row: psum",
    ),
    "rows elsewhere": (mlp, lambda net, x: net(x).T, "concat", r"result does not have the rows along its first axis"),
    "a mean of rows": (mlp, lambda net, x: net(x), "mean", r"result is reduced by 'mean', and the devices have shares"),
    "rows stacked": (mlp, lambda net, x: net(x), "stack", r"result is reduced by 'stack', and the devices have shares"),
    "a sorted batch": (
        mlp,
        lambda net, x: jnp.sort(x, 0),
        "concat",
        r"result is not one value per row: sort over the rows",
    ),
    "a constant": (mlp, lambda net, x: jnp.ones(4), "concat", r"result does not have the rows along its first axis"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", REFUSED)
def test_padding_that_would_change_the_answer_is_refused(name: str) -> None:
    make, body, reduce, reason = REFUSED[name]
    net = make()
    before = [v[...] for v in px.variables(net)]
    message = rf"10 rows do not divide over 8 devices.*{reason}.*Give a multiple of 8 rows; or return one value per row"
    with pytest.raises(px.ShapeError, match=message):
        px.Parallel(body, net, reduce=reduce)(values(10, 3))
    assert all(v[...] is old for v, old in zip(px.variables(net), before, strict=True))
    px.Parallel(body, net, reduce=reduce)(values(16, 3))
    px.Parallel(body, make(), reduce=reduce, check=False)(values(10, 3))


def test_results_that_are_not_rows_are_not_cut() -> None:
    x = values(10, 3)
    got = px.Parallel(lambda x: (x, x.mean(0), x.sum()), check=False)(x)
    assert [y.shape for y in got] == [(10, 3), (24,), (8,)]
    assert_close(host(got[0]), x)
    assert_close(np.asarray(got[1])[:3], np.asarray(x[:2]).mean(0))


@pytest.mark.parametrize("name", ["columns by a number of each row", "a scan over rows that sees all rows beside"])
def test_rows_that_meet(name: str) -> None:
    def columns(x: jax.Array, i: jax.Array) -> jax.Array:
        return x[:, i].sum(1)

    def scanned(x: jax.Array, i: jax.Array) -> jax.Array:
        all_beside = jnp.broadcast_to(x.sum(1), (len(x), len(x)))
        return jax.lax.scan(lambda c, s: (c, (s[0].sum() * s[1]).sum()), 0.0, (x, all_beside))[1]

    with pytest.raises(px.ShapeError, match="is not one value per row"):
        px.Parallel(columns if name.startswith("columns") else scanned)(np.ones((5, 6), "f"), np.arange(5))


def test_rows_in_a_variable_are_refused() -> None:
    v = nnx.Variable(jnp.zeros(()), sync="stack")
    with pytest.raises(px.ShapeError, match=r"variable \(Variable\) is written with what depends on the rows"):
        px.Parallel(lambda v, x: v.set_value(x), v)(values(10))
