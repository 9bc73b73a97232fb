"""One FedAvg round of a two-layer CNN: 16 clients × 4 local steps of 16 digits."""

import logging

import drjax
import harness
import jax
from absl import logging as absl_logging
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from models import cnn_local_steps, cnn_params

import paraxis as px

CLIENTS, STEPS, BATCH = 16, 4, 16


def run(devices: int, repeats: int) -> harness.Tables:
    absl_logging.set_verbosity(logging.ERROR)
    mesh = jax.make_mesh((devices,), ("clients",), axis_types=(AxisType.Auto,))
    split, whole = NamedSharding(mesh, P("clients")), NamedSharding(mesh, P())
    keys = jax.random.split(jax.random.key(0), 3)
    params = jax.device_put(cnn_params(keys[0]), whole)
    x = jax.device_put(jax.random.normal(keys[1], (CLIENTS, STEPS, BATCH, 28, 28, 1)), split)
    y = jax.device_put(jax.random.randint(keys[2], (CLIENTS, STEPS, BATCH), 0, 10), split)

    def ours(lowering):
        @px.program(clients=CLIENTS)
        def round_(params, x, y):
            trained = px.map_fn(cnn_local_steps, (px.broadcast(params), x, y), lowering=lowering)
            return px.reduce_mean(trained)

        return round_

    @drjax.program(placements={"clients": CLIENTS})
    def theirs(params, x, y):
        return drjax.reduce_mean(drjax.map_fn(cnn_local_steps, (drjax.broadcast(params), x, y)))

    rivals = {"paraxis": ours("auto"), "paraxis, lowering='vmap'": ours("vmap"), "DrJAX": theirs}
    with jax.set_mesh(mesh):
        made = harness.compile_all(rivals, (params, x, y))
        harness.take_turns(made, (params, x, y), max(3, repeats // 2))
    with jax.set_mesh(jax.make_mesh((1,), ("clients",), (AxisType.Auto,), devices=jax.devices()[:1])):
        alone = harness.compile_all({"one device": ours("vmap")}, jax.tree.map(_shape, (params, x, y)))["one device"]
    share = made["paraxis"].gigaflops / (alone.gigaflops / devices)
    rows = harness.rows(made, "paraxis")
    return {"CNN, one FedAvg round": {**rows, "FLOPs per device / an equal share": {"GF/dev": share}}}


def _shape(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


if __name__ == "__main__":
    harness.main(run, __doc__)
