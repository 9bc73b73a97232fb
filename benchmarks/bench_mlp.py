"""Value and gradient of a mean of MLP losses, and one FedAvg round of a CNN, beside DrJAX and the same by hand.

MLP: 64 clients × 32 rows, 784-512-512-10. CNN: two layers, 16 clients × 4 local steps of 16 digits.
"""

import logging
from collections.abc import Callable
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
    mesh = jax.make_mesh((devices,), ("clients",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        gradients, rounds = _gradients(mesh, repeats), _rounds(mesh, max(3, repeats // 2))
    with jax.set_mesh(jax.make_mesh((1,), ("clients",), (AxisType.Auto,), devices=jax.devices()[:1])):
        args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), _digits(mesh))
        alone = harness.compile_all({"one device": _round("vmap")}, args)["one device"]
    share = rounds["paraxis"]["GF/dev"] / (alone.gigaflops / devices)
    rounds["FLOPs per device / an equal share"] = {"GF/dev": share}
    return {"MLP, value and gradient": gradients, "CNN, one FedAvg round": rounds}


def _gradients(mesh: Mesh, repeats: int) -> dict[str, dict[str, Any]]:
    args = _placed(mesh, mlp_params, (64, 32), 784)

    @px.program(clients=64)
    def ours(params, x, y):
        return px.reduce_mean(px.map_fn(mlp_loss, (px.broadcast(params), x, y)))

    @px.program(clients=64)
    def ours_inside(params, x, y):
        return px.reduce_mean(px.map_fn(jax.value_and_grad(mlp_loss), (px.broadcast(params), x, y)))

    @drjax.program(placements={"clients": 64})
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
    made = harness.compile_all(rivals, args)
    harness.take_turns(made, args, repeats)
    results = [jax.tree.leaves(rival.compiled(*args)) for rival in made.values()]
    for other in results:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), results[0], other)
    return harness.rows(made, "paraxis, jax.grad(program)")


def _rounds(mesh: Mesh, repeats: int) -> dict[str, dict[str, Any]]:
    @drjax.program(placements={"clients": 16})
    def theirs(params, x, y):
        return drjax.reduce_mean(drjax.map_fn(cnn_local_steps, (drjax.broadcast(params), x, y)))

    rivals = {"paraxis": _round("auto"), "paraxis, lowering='vmap'": _round("vmap"), "DrJAX": theirs}
    made = harness.compile_all(rivals, _digits(mesh))
    harness.take_turns(made, _digits(mesh), repeats)
    return harness.rows(made, "paraxis")


def _round(lowering: Any) -> Callable[..., Any]:
    @px.program(clients=16)
    def round_(params, x, y):
        return px.reduce_mean(px.map_fn(cnn_local_steps, (px.broadcast(params), x, y), lowering=lowering))

    return round_


def _digits(mesh: Mesh) -> Any:
    return _placed(mesh, cnn_params, (16, 4, 16), 28, 28, 1)


def _placed(mesh: Mesh, params: Callable[[jax.Array], Any], rows: tuple[int, ...], *row: int) -> Any:
    """Return parameters, whole, and rows of noise with labels, split over the clients."""
    split, keys = NamedSharding(mesh, P("clients")), jax.random.split(jax.random.key(0), 3)
    x, y = jax.random.normal(keys[1], (*rows, *row)), jax.random.randint(keys[2], rows, 0, 10)
    return jax.device_put((params(keys[0]), x, y), (NamedSharding(mesh, P()), split, split))


if __name__ == "__main__":
    harness.main(run, __doc__)
