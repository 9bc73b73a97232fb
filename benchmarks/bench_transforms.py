"""px.Jit, px.Parallel and px.Vectorize beside nnx.jit_partial, nnx.jit and the same programs written by hand.

The calls: 20 and 200 layers of 4 × 4, batch 2: networks so small that what is measured is the cost of a call.
Per-example gradients compile to the same program as by hand, operation for operation; what differs is noise.
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
from models import cnn_loss, cnn_params, mlp_loss, mlp_params

import paraxis as px
from paraxis.reports import of_program


class Deep(nnx.Module):
    """Small layers, of two leaves each."""

    def __init__(self, layers: int) -> None:
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(layers)])

    def __call__(self, x: jax.Array) -> jax.Array:
        """One layer after the other."""
        for layer in self.layers:
            x = layer(x)
        return x


class Holder(nnx.Module):
    """A module around parameters that plain functions take as a dict, so that rivals run the same operations."""

    def __init__(self, params: dict[str, jax.Array], loss: Callable[..., jax.Array]) -> None:
        self.params = nnx.Dict({name: nnx.Param(x) for name, x in params.items()})
        self.loss = loss

    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """The loss of a batch."""
        return self.loss({name: self.params[name][...] for name in self.params}, x, y)


def run(devices: int, repeats: int) -> harness.Tables:
    tables = calls(20, repeats) | calls(200, repeats) | train_calls(repeats) | per_example(repeats)
    return (tables if devices <= 2 else {}) | parallel(devices, repeats)


def calls(layers: int, repeats: int) -> harness.Tables:
    """All of one module, so that what one of them leaves behind is a cost of the next."""
    net, x = Deep(layers), jnp.ones((2, 4))
    leaves = jax.tree.leaves(nnx.state(net))
    forward = nnx.jit(lambda net, x: net(x))
    rivals: dict[str, Callable[[], Any]] = {
        "px.Jit(net)(x)": partial(px.Jit(net), x),
        "jax.jit over the leaves": partial(jax.jit(_forward), leaves, x),
        "nnx.jit_partial": partial(nnx.jit_partial(lambda net, x: net(x), net, graph=True, graph_updates=False), x),
        "nnx.jit": partial(forward, net, x),
    }
    return {f"one call, {2 * layers} leaves, µs": _rows(rivals, repeats, calls=600 // layers, unit=1e6)}


def train_calls(repeats: int) -> harness.Tables:
    x, y, tx = jnp.ones((2, 4)), jnp.zeros((2, 4)), optax.adam(1e-3)

    def loss(net: Deep, x: jax.Array, y: jax.Array) -> jax.Array:
        return ((net(x) - y) ** 2).mean()

    def ours(net: Deep, opt: px.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
        value, gradients = nnx.value_and_grad(loss)(net, x, y)
        opt(1e-3, gradients)
        return value

    def theirs(net: Deep, opt: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
        value, gradients = nnx.value_and_grad(loss)(net, x, y)
        opt.update(net, gradients)
        return value

    @jax.jit
    def by_hand(leaves: Any, state: Any) -> Any:
        value, gradients = jax.value_and_grad(lambda leaves: ((_forward(leaves, x) - y) ** 2).mean())(leaves)
        updates, state = tx.update(gradients, state, leaves)
        return optax.apply_updates(leaves, updates), state, value

    nets = [Deep(20) for _ in range(4)]
    held: dict[str, Any] = {"leaves": jax.tree.leaves(nnx.state(nets[0]))}
    held["state"] = tx.init(held["leaves"])

    def step_by_hand() -> jax.Array:
        held["leaves"], held["state"], value = by_hand(held["leaves"], held["state"])
        return value

    opts = [nnx.Optimizer(net, tx, wrt=nnx.Param) for net in nets[1:3]]
    step = nnx.jit(theirs)
    rivals: dict[str, Callable[[], Any]] = {
        "px.Jit(train, net, opt)(x, y)": partial(px.Jit(ours, nets[3], px.Optimizer(nets[3], optax.adam)), x, y),
        "jax.jit over the leaves": step_by_hand,
        "nnx.jit_partial": partial(nnx.jit_partial(theirs, nets[1], opts[0], graph=True, graph_updates=False), x, y),
        "nnx.jit": partial(step, nets[2], opts[1], x, y),
    }
    return {"one train step with Adam, 40 leaves, µs": _rows(rivals, repeats, calls=20, unit=1e6)}


def per_example(repeats: int) -> harness.Tables:
    keys = jax.random.split(jax.random.key(0), 3)
    params = mlp_params(keys[0], hidden=128)
    net = Holder(params, mlp_loss)
    x, y = jax.random.normal(keys[1], (256, 784)), jax.random.randint(keys[2], (256,), 0, 10)

    def one(net: Holder, x: jax.Array, y: jax.Array) -> Any:
        return nnx.grad(lambda net: net(x[None], y[None]))(net)

    def one_by_hand(params: Any, x: jax.Array, y: jax.Array) -> Any:
        return jax.grad(mlp_loss)(params, x[None], y[None])

    by_hand = jax.jit(jax.vmap(one_by_hand, in_axes=(None, 0, 0)))
    rivals: dict[str, Callable[[], Any]] = {
        "px.Jit(px.Vectorize(nnx.grad(loss), net))": partial(px.Jit(px.Vectorize(one, net)), x, y),
        "jax.jit(jax.vmap(jax.grad(loss)))": partial(by_hand, params, x, y),
    }
    return {"per-example gradients, MLP, 256 rows, ms": _rows(rivals, repeats, calls=3, unit=1e3)}


def parallel(devices: int, repeats: int) -> harness.Tables:
    keys = jax.random.split(jax.random.key(0), 3)
    params, tx = cnn_params(keys[0]), optax.sgd(0.1, momentum=0.9)
    x, y = jax.random.normal(keys[1], (32 * devices, 28, 28, 1)), jax.random.randint(keys[2], (32 * devices,), 0, 10)
    mesh = Mesh(jax.devices()[:devices], ("device",))
    x, y = jax.device_put((x, y), NamedSharding(mesh, P("device")))

    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        value, gradients = jax.lax.pmean(jax.value_and_grad(cnn_loss)(params, x, y), "device")
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    split, all_of_it = P("device"), P()
    specs = {"in_specs": (all_of_it, all_of_it, split, split), "out_specs": (all_of_it, all_of_it, all_of_it)}
    by_hand = jax.jit(jax.shard_map(step, mesh=mesh, check_vma=False, **specs))
    start = jax.device_put((params, tx.init(params)), NamedSharding(mesh, all_of_it))
    held = {"params": start[0], "state": start[1]}

    def step_by_hand() -> jax.Array:
        held["params"], held["state"], value = by_hand(held["params"], held["state"], x, y)
        return value

    net = Holder(params, cnn_loss)
    opt = px.Optimizer(net, optax.sgd, momentum=0.9)
    loss = px.GradValues(lambda net, x, y: net(x, y), net)

    def train(loss: Any, opt: px.Optimizer, x: jax.Array, y: jax.Array) -> Any:
        gradients, value = px.pmean(loss(x, y), "device")
        opt(0.1, gradients)
        return value

    ours = px.Parallel(train, loss, opt, reduce="first", mesh=mesh)
    rivals: dict[str, Callable[[], Any]] = {
        "px.Parallel(train, loss, opt)(x, y)": partial(ours, x, y),
        "jit(shard_map(train)) by hand": step_by_hand,
    }
    rows = _rows(rivals, repeats * 3, calls=1, unit=1e3)
    lowered = [ours.lower(x, y), by_hand.lower(held["params"], held["state"], x, y)]
    for cells, compiled in zip(rows.values(), (program.compile() for program in lowered), strict=True):
        sent = of_program(compiled.as_text())
        memory = compiled.memory_analysis().temp_size_in_bytes / 1e6
        cells |= {"AR": sent.count["all_reduce"], "bytes": sent.total_bytes, "temp MB": memory}
    return {"train step, CNN, 32 rows a device, ms": rows}


def _forward(leaves: Any, x: jax.Array) -> jax.Array:
    for bias, kernel in zip(leaves[::2], leaves[1::2], strict=True):
        x = x @ kernel + bias
    return x


def _rows(rivals: dict[str, Callable[[], Any]], repeats: int, *, calls: int, unit: float) -> dict[str, dict[str, Any]]:
    """Rivals take turns; a row each, with its time over the first one's."""
    found = harness.in_turn(rivals, repeats, calls)
    ours = next(iter(found.values()))
    return {name: {"median": seconds * unit, "it / ours": seconds / ours} for name, seconds in found.items()}


if __name__ == "__main__":
    harness.main(run, __doc__)
