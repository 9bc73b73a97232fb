"""With ``sync_batch_norm=True``: statistics that layers other than Flax's take of a device's share are told of."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import paraxis as px
from tests.transforms._models import Normed

_Function = Callable[[jax.Array], jax.Array]


class Layer(nnx.Module):
    """A weight, and a function of rows that is written by hand."""

    def __init__(self, function: _Function) -> None:
        self.scale = nnx.Param(jnp.ones(4))
        self.function = nnx.static(function)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.function(x * self.scale[...])


def white(x: jax.Array) -> jax.Array:
    x = x.reshape(-1, 4)
    return x @ jnp.linalg.inv(jnp.eye(4) + x.T @ x)


def recurrent(x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda c, _: (jnp.tanh(c - c.mean(0)), None), x, None, 3)[0]


def by_turns(x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, 3, lambda _, c: (c[0] - c[1], c[0].max(0)), (x, jnp.zeros(4)))[0]


def chosen(x: jax.Array) -> jax.Array:
    return jax.lax.cond(jnp.array(True), lambda x: x / x.std(0), lambda x: x, x)


def spread_out(x: jax.Array) -> jax.Array:
    return jnp.broadcast_to(x.sum(0), x.shape)


MIXING: list[_Function] = [
    lambda x: x - x.mean(0),
    lambda x: x / jnp.sqrt(x.var(0) + 1e-5),
    lambda x: x * jnp.max(jnp.abs(x)),
    jax.checkpoint(lambda x: x - x.mean(0)),
    jax.jit(lambda x: x - x.mean(0)),
    lambda x: jnp.where(x.mean(0) > 0, x, 0),
    white,
    recurrent,
    by_turns,
    chosen,
    spread_out,
]


def synchronised(x: jax.Array) -> jax.Array:
    mean = px.pmean(x.mean(0), "device")
    return (x - mean) / jnp.sqrt(jax.lax.pmean(((x - mean) ** 2).mean(0), "device"))


def gathered(x: jax.Array) -> jax.Array:
    return x - jax.lax.all_gather(x, "device").mean((0, 1))


def attention(x: jax.Array) -> jax.Array:
    x = x.reshape(len(x), 2, 2)
    return (jax.nn.softmax(x @ x.mT) @ x).reshape(len(x), 4)


def of_each_row(x: jax.Array) -> jax.Array:
    return jax.vmap(lambda row: (row - row.mean()) / row.std())(x)


def along_rows(x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda c, row: (c, jax.nn.softmax(row)), 0, x)[1]


ROW_WISE: list[_Function] = [
    lambda x: x - x.mean(1, keepdims=True),
    lambda x: jax.nn.softmax(x) * jnp.arange(len(x))[:, None],
    lambda x: jnp.take_along_axis(x, jnp.argsort(x), 1),
    synchronised,
    gathered,
    attention,
    of_each_row,
    along_rows,
]


def cross_entropy(y: jax.Array, weight: jax.Array) -> jax.Array:
    return (jax.nn.logsumexp(y, 1) * weight).sum() / weight.sum()


def contrastive(y: jax.Array, weight: jax.Array) -> jax.Array:
    return -jnp.mean(jax.nn.log_softmax(y @ y.T, 1) * jnp.eye(len(y))) + y.std()


def clipped_step(net: Any, x: jax.Array, weight: jax.Array) -> Any:
    """Return a second gradient, after a step by the first, which is clipped, of one share alone."""
    graph, params = nnx.split(net)
    gradient = jax.grad(lambda params: cross_entropy(nnx.merge(graph, params)(x), weight))
    first = gradient(params)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(first)))
    params = jax.tree.map(lambda p, g: p - g / norm, params, first)
    return px.pmean(jax.tree.leaves(gradient(params)), "device")


def called(net: Any, x: jax.Array) -> Any:
    return net(x)


def traced(f: Any, net: Any, *args: jax.Array, **options: Any) -> list[str]:
    """Return what is told while a function is traced; nothing is compiled if it writes no variable."""
    run = jax.eval_shape if not jax.tree.leaves(nnx.state(net, nnx.BatchStat)) else lambda f, *args: f(*args)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run(px.Parallel(f, net, sync_batch_norm=True, **options), *args)
    return [str(one.message) for one in told]


@pytest.mark.parametrize("rows", [32, 8])  # four on each device, and one
def test_statistics_of_a_share_are_told_of_by_the_name_of_the_function(rows: int) -> None:
    x, weight = jnp.ones((rows, 4)), jnp.ones(rows)
    for function in MIXING:
        net = Layer(function)
        for f, args in ((called, (x,)), (clipped_step, (x, weight))):
            (told,) = traced(f, net, *args, reduce="concat" if len(args) == 1 else "same")
            name = getattr(function, "__wrapped__", function).__qualname__
            assert re.search(rf"taken at .*test_statistics\.py:\d+ \({re.escape(name)}", told), told
            assert "px.pmean(x.mean(0), 'device')" in told


def test_layers_that_keep_rows_apart_and_losses_are_not_complained_of() -> None:
    x, weight = jnp.ones((32, 4)), jnp.ones(32)
    for function in ROW_WISE:
        net = Layer(function)
        assert traced(called, net, x) == []
        assert traced(clipped_step, net, x, weight, reduce="same") == []
    for loss in (cross_entropy, contrastive):
        for net in (Layer(lambda x: x), nnx.BatchNorm(4, rngs=nnx.Rngs(0)), nnx.GroupNorm(4, 2, rngs=nnx.Rngs(0))):

            def step(net: Any, x: jax.Array, weight: jax.Array, loss: Any = loss) -> Any:
                return px.pmean(nnx.value_and_grad(lambda net: loss(net(x), weight))(net), "device")

            assert traced(step, net, x, weight, reduce="same") == []
    assert traced(called, Normed(nnx.Rngs(0)), jnp.ones((32, 3))) == []


def test_who_means_statistics_of_a_share_says_so() -> None:
    net, x = Layer(lambda x: x - x.mean(0)), jnp.ones((32, 4))
    assert traced(called, net, x, check=False) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(px.Parallel(net), x)  # nobody asked for statistics of the whole batch
