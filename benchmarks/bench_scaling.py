"""What a device sends where clients and devices grow together, and what it holds with at_once=8. Compiled, not run.

AR, AG: all-reduces and all-gathers in the compiled program; bytes and 10⁹ operations per device. On 8 devices, 64
clients are run in a single turn, which needs no accumulator for the gradient: one parameters' size less than any number
of turns. From two turns on nothing grows.
"""

import logging
from typing import Any

import drjax
import harness
import jax
import numpy as np
from absl import logging as absl_logging
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from models import cnn_local_steps, cnn_params, mlp_loss, mlp_params

import paraxis as px


def run(devices: int, repeats: int) -> harness.Tables:
    absl_logging.set_verbosity(logging.ERROR)
    clients = 2 * devices
    mesh = jax.make_mesh((devices,), ("clients",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, P("clients"))

    def rows(*shape: int, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((clients, *shape), dtype, sharding=split)

    @px.program(clients=clients)
    def loss(params, x, y):
        return px.reduce_mean(px.map_fn(mlp_loss, (px.broadcast(params), x, y)))

    @px.program(clients=clients)
    def round_(params, x, y):
        return px.reduce_mean(px.map_fn(cnn_local_steps, (px.broadcast(params), x, y)))

    @drjax.program(placements={"clients": clients})
    def their_round(params, x, y):
        return drjax.reduce_mean(drjax.map_fn(cnn_local_steps, (drjax.broadcast(params), x, y)))

    key = jax.random.key(0)
    mlp = (jax.eval_shape(mlp_params, key), rows(32, 784), rows(32, dtype=np.int32))
    cnn = (jax.eval_shape(cnn_params, key), rows(1, 16, 28, 28, 1), rows(1, 16, dtype=np.int32))
    with jax.set_mesh(mesh):
        rivals = {"MLP, value and gradient": (jax.value_and_grad(loss), mlp), "CNN, FedAvg round": (round_, cnn)}
        if devices <= 64:
            rivals["CNN, FedAvg round, DrJAX"] = (their_round, cnn)
        found: dict[str, dict[str, Any]] = {}
        for name, (fn, args) in rivals.items():
            made = harness.compile_all({name: fn}, args)[name]
            comm = made.communication
            sent = {"AR": comm.count["all_reduce"], "AG": comm.count["all_gather"], "bytes": comm.total_bytes}
            found[name] = {**sent, "GF/dev": made.gigaflops}
    return {f"{clients} clients": found} | ({"temporary memory, MB per device": _memory(mesh)} if devices == 8 else {})


def _memory(mesh: Mesh) -> dict[str, dict[str, float]]:
    params = jax.eval_shape(mlp_params, jax.random.key(0))
    rows: dict[str, dict[str, float]] = {}
    for name, program in (("mean of losses", _losses), ("FedAvg round", _round)):
        for suffix, derive in (("forward", lambda f: f), ("gradient", jax.value_and_grad)):
            few, more, many = (_megabytes(derive(program), params, size, mesh) for size in (64, 128, 1024))
            rows[f"{name}, {suffix}"] = {"64 clients": few, "128": more, "1024": many, "1024 / 64": many / few}
    unbounded = _megabytes(jax.value_and_grad(_round), params, 64, mesh, at_once=None)
    rows["FedAvg round, gradient, without at_once"] = {"64 clients": unbounded}
    return rows


def _losses(params: Any, x: Any, y: Any, clients: px.Axis) -> jax.Array:
    return px.reduce_mean(px.map_fn(mlp_loss, (px.broadcast(params, clients), x, y), clients), clients)


def _round(params: Any, x: Any, y: Any, clients: px.Axis) -> Any:
    def train(params: Any, x: Any, y: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(mlp_loss)(params, x, y))

    new = px.reduce_mean(px.map_fn(train, (px.broadcast(params, clients), x, y), clients), clients)
    return sum((leaf**2).sum() for leaf in jax.tree.leaves(new))


def _megabytes(fn: Any, params: Any, size: int, mesh: Mesh, at_once: int | None = 8) -> float:
    clients = px.Axis("clients", size, mesh=mesh, at_once=at_once)
    split = NamedSharding(mesh, P("clients"))
    x = jax.ShapeDtypeStruct((size, 32, 784), np.float32, sharding=split)
    y = jax.ShapeDtypeStruct((size, 32), np.int32, sharding=split)
    jitted: Any = jax.jit(lambda p, x, y: fn(p, x, y, clients))
    return jitted.lower(params, x, y).compile().memory_analysis().temp_size_in_bytes / 1e6


if __name__ == "__main__":
    harness.main(run, __doc__, devices=(8, 64, 512))
