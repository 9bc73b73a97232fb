"""px.Jit and px.Parallel beside nnx.jit_partial, nnx.jit and the same programs written by hand.

The calls: 20 and 200 layers of 4 × 4, batch 2: networks so small that what is measured is the cost of a call.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import harness
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from models import cnn_loss, cnn_params

import paraxis as px
from paraxis.testing import communication

Rivals = dict[str, Callable[[], Any]]


def run(devices: int, repeats: int) -> harness.Tables:
    if devices > 2:
        return parallel(devices, repeats)
    tables = {f"one call, {2 * n} leaves, µs": _rows(calls(n), repeats, 600 // n, 1e6) for n in (20, 200)}
    train = {"one train step with Adam, 40 leaves, µs": _rows(train_calls(), repeats, 20, 1e6)}
    return tables | train | parallel(devices, repeats)


def calls(layers: int) -> Rivals:
    """All of one module, so that what one of them leaves behind is a cost of the next."""
    net, x = _deep(layers), jnp.ones((2, 4))
    leaves, call = jax.tree.leaves(nnx.state(net)), lambda net, x: net(x)
    return {
        "px.Jit(net)(x)": partial(px.Jit(net), x),
        "jax.jit over the leaves": partial(jax.jit(_forward), leaves, x),
        "nnx.jit_partial": partial(nnx.jit_partial(call, net, graph=True, graph_updates=False), x),
        "nnx.jit": partial(nnx.jit(call), net, x),
    }


def train_calls() -> Rivals:
    x, y, tx = jnp.ones((2, 4)), jnp.zeros((2, 4)), optax.adam(1e-3)
    loss: Any = lambda net, x, y: ((net(x) - y) ** 2).mean()  # noqa: E731

    def train(net: nnx.Sequential, opt: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        value, gradients = nnx.value_and_grad(loss)(net, x, y)
        opt.update(net, gradients) if isinstance(opt, nnx.Optimizer) else opt(1e-3, gradients)
        return value

    nets = [_deep(20) for _ in range(3)]
    opts = [nnx.Optimizer(net, tx, wrt=nnx.Param) for net in nets[1:]]
    one = nnx.jit_partial(train, nets[1], opts[0], graph=True, graph_updates=False)
    return {
        "px.Jit(train, net, opt)(x, y)": partial(px.Jit(train, nets[0], px.Optimizer(nets[0], optax.adam)), x, y),
        "nnx.jit_partial": partial(one, x, y),
        "nnx.jit": partial(nnx.jit(train), nets[2], opts[1], x, y),
    }


def parallel(devices: int, repeats: int) -> harness.Tables:
    rows, tx, split, whole = 32 * devices, optax.sgd(0.1, momentum=0.9), P("device"), P()
    mesh, params = Mesh(jax.devices()[:devices], ("device",)), cnn_params(jax.random.key(0))
    x, y = jax.device_put((jnp.ones((rows, 28, 28, 1)), jnp.arange(rows) % 10), NamedSharding(mesh, split))

    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        value, gradients = jax.lax.pmean(jax.value_and_grad(cnn_loss)(params, x, y), "device")
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    def train(loss: Any, opt: px.Optimizer, x: jax.Array, y: jax.Array) -> Any:
        gradients, value = px.pmean(loss(x, y), "device")
        opt(0.1, gradients)
        return value

    specs = (whole, whole, split, split)
    by_hand = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=whole, check_vma=False))
    start = jax.device_put((params, tx.init(params)), NamedSharding(mesh, whole))
    net = nnx.Dict({name: nnx.Param(x) for name, x in params.items()})
    loss = px.GradValues(lambda net, x, y: cnn_loss({name: net[name][...] for name in params}, x, y), net)
    ours = px.Parallel(train, loss, px.Optimizer(net, optax.sgd, momentum=0.9), reduce="first", mesh=mesh)
    steps = {
        "px.Parallel(train, loss, opt)(x, y)": partial(ours, x, y),
        "jit(shard_map(train)) by hand": partial(by_hand, *start, x, y),
    }
    table = _rows(steps, repeats * 3, 1, 1e3)
    for cells, sent in zip(
        table.values(), (communication(ours, x, y), communication(by_hand, *start, x, y)), strict=True
    ):
        cells |= {"AR": sent.count["all_reduce"], "bytes": sent.total_bytes}
    return {"train step, CNN, 32 rows a device, ms": table}


def _deep(layers: int) -> nnx.Sequential:
    return nnx.Sequential(*[nnx.Linear(4, 4, rngs=nnx.Rngs(0)) for _ in range(layers)])


def _forward(leaves: Any, x: jax.Array) -> jax.Array:
    for bias, kernel in zip(leaves[::2], leaves[1::2], strict=True):
        x = x @ kernel + bias
    return x


def _rows(rivals: Rivals, repeats: int, calls: int, unit: float) -> dict[str, dict[str, Any]]:
    """Rivals take turns; a row each, with its time over the first one's."""
    found = harness.in_turn(rivals, repeats, calls)
    ours = next(iter(found.values()))
    return {name: {"median": seconds * unit, "it / ours": seconds / ours} for name, seconds in found.items()}


if __name__ == "__main__":
    harness.main(run, __doc__)
