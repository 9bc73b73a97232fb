"""One FedAvg round of a two-layer CNN: 16 clients × 4 local steps of 16 digits.

Typical output, two shared CPU cores, jax 0.10.2 (setup s: CPU seconds to trace and compile; AR, AG: all-reduces and
all-gathers in the compiled program)::

    CNN, one FedAvg round, 2 devices
                                                  ms  setup s   GF/dev  temp MB  AR  AG  time / ours
      paraxis                                   86.7     3.23    2.885     19.8   1   0         1.00
      paraxis, lowering='vmap'                 152.7     2.27    2.886     29.3   1   0         1.76
      DrJAX                                    537.8     2.37    5.513     38.1   1  32         6.20
      FLOPs per device / (FLOPs on one device / 2): 1.000

    CNN, one FedAvg round, 8 devices
                                                  ms  setup s   GF/dev  temp MB  AR  AG  time / ours
      paraxis                                   98.8     1.51    0.721      6.3   1   0         1.00
      paraxis, lowering='vmap'                 130.8     2.20    0.721      7.3   1   0         1.32
      DrJAX                                   1836.9     2.17    5.318     31.1   1  32        18.59
      FLOPs per device / (FLOPs on one device / 8): 1.000
"""

import logging

import drjax
import harness
import jax
from absl import logging as absl_logging
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from models import cnn_local_steps, cnn_params

import paraxis as px

CLIENTS, STEPS, BATCH = 16, 4, 16


def run(devices: int, repeats: int) -> None:
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
    harness.report(f"CNN, one FedAvg round, {devices} devices", made, "paraxis")
    with jax.set_mesh(jax.make_mesh((1,), ("clients",), (AxisType.Auto,), devices=jax.devices()[:1])):
        alone = harness.compile_all({"one device": ours("vmap")}, jax.tree.map(_shape, (params, x, y)))["one device"]
    share = made["paraxis"].gigaflops / (alone.gigaflops / devices)
    print(f"  FLOPs per device / (FLOPs on one device / {devices}): {share:.3f}")


def _shape(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


if __name__ == "__main__":
    harness.main(run, __doc__)
