"""Value and gradient of a mean of MLP losses: 64 clients × 32 rows, 784-512-512-10."""

import logging

import drjax
import harness
import jax
import numpy as np
from absl import logging as absl_logging
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from models import mlp_loss, mlp_params

import paraxis as px

CLIENTS, ROWS = 64, 32


def run(devices: int, repeats: int) -> harness.Tables:
    absl_logging.set_verbosity(logging.ERROR)
    mesh = jax.make_mesh((devices,), ("clients",), axis_types=(AxisType.Auto,))
    split, whole = NamedSharding(mesh, P("clients")), NamedSharding(mesh, P())
    keys = jax.random.split(jax.random.key(0), 3)
    params = jax.device_put(mlp_params(keys[0]), whole)
    x = jax.device_put(jax.random.normal(keys[1], (CLIENTS, ROWS, 784)), split)
    y = jax.device_put(jax.random.randint(keys[2], (CLIENTS, ROWS), 0, 10), split)

    @px.program(clients=CLIENTS)
    def ours(params, x, y):
        return px.reduce_mean(px.map_fn(mlp_loss, (px.broadcast(params), x, y)))

    @px.program(clients=CLIENTS)
    def ours_inside(params, x, y):
        return px.reduce_mean(px.map_fn(jax.value_and_grad(mlp_loss), (px.broadcast(params), x, y)))

    @drjax.program(placements={"clients": CLIENTS})
    def theirs(params, x, y):
        return drjax.reduce_mean(drjax.map_fn(mlp_loss, (drjax.broadcast(params), x, y)))

    def by_hand(params, x, y):
        def shard(params, x, y):
            def mean(params):
                return jax.vmap(mlp_loss, (None, 0, 0))(params, x, y).mean()

            return jax.lax.pmean(jax.value_and_grad(mean)(params), "clients")

        specs = (P(), P("clients"), P("clients"))
        return jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)(params, x, y)

    def flat(params, x, y):
        return mlp_loss(params, x.reshape(-1, 784), y.reshape(-1))

    rivals = {
        "paraxis, jax.grad(program)": jax.value_and_grad(ours),
        "paraxis, jax.grad in the map": ours_inside,
        "by hand: shard_map of vmap": by_hand,
        "DrJAX": jax.value_and_grad(theirs),
        "one flat batch (bound)": jax.value_and_grad(flat),
    }
    with jax.set_mesh(mesh):
        made = harness.compile_all(rivals, (params, x, y))
        harness.take_turns(made, (params, x, y), repeats)
        results = [jax.tree.leaves(rival.compiled(params, x, y)) for rival in made.values()]
    for other in results:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), results[0], other)
    return {"MLP, value and gradient": harness.rows(made, "paraxis, jax.grad(program)")}


if __name__ == "__main__":
    harness.main(run, __doc__)
