"""Weak scaling, compiled but not run: clients and devices grow together; what does a device send?

AR, AG: all-reduces and all-gathers in the compiled program; bytes and 10⁹ operations per device.
"""

import logging
from typing import Any

import drjax
import harness
import jax
import numpy as np
from absl import logging as absl_logging
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
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
    return {f"{clients} clients": found}


if __name__ == "__main__":
    harness.main(run, __doc__, devices=(8, 64, 512))
