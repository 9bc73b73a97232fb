"""Temporary memory with at_once=8: 64, 128 and 1,024 clients. Compiled, not run.

On 8 devices, 64 clients are run in a single turn, which needs no accumulator for the gradient: one parameters' size
less than any number of turns. From two turns on nothing grows.
"""

from typing import Any

import harness
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from models import mlp_loss, mlp_params

import paraxis as px

ROWS = 32


def run(devices: int, repeats: int) -> harness.Tables:
    mesh = Mesh(np.array(jax.devices()), ("clients",))
    params = jax.eval_shape(mlp_params, jax.random.key(0))
    rows: dict[str, dict[str, float]] = {}
    for name, program in (("mean of losses", _losses), ("FedAvg round", _round)):
        for suffix, derive in (("forward", lambda f: f), ("gradient", jax.value_and_grad)):
            few, more, many = (_megabytes(derive(program), params, size, mesh) for size in (64, 128, 1024))
            rows[f"{name}, {suffix}"] = {"64 clients": few, "128": more, "1024": many, "1024 / 64": many / few}
    unbounded = _megabytes(jax.value_and_grad(_round), params, 64, mesh, at_once=None)
    rows["FedAvg round, gradient, without at_once"] = {"64 clients": unbounded}
    return {"temporary memory, MB per device": rows}


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
    x = jax.ShapeDtypeStruct((size, ROWS, 784), np.float32, sharding=split)
    y = jax.ShapeDtypeStruct((size, ROWS), np.int32, sharding=split)
    jitted: Any = jax.jit(lambda p, x, y: fn(p, x, y, clients))
    return jitted.lower(params, x, y).compile().memory_analysis().temp_size_in_bytes / 1e6


if __name__ == "__main__":
    harness.main(run, __doc__)
