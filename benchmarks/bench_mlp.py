"""Value and gradient of a mean of MLP losses, and one FedAvg round of a CNN, beside DrJAX and the same by hand.

MLP: 64 clients; thin layers are where copies cost most. CNN: two layers, 16 clients × 4 local steps of 16 digits.
"""

import math
from collections.abc import Callable
from typing import Any

import drjax
import harness
import jax
import numpy as np
from absl import logging
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from models import cnn_local_steps, cnn_params, cross_entropy

import paraxis as px

SHAPES = {"784-512-512-10": 32, "64-64-10": 8, "64-256-10": 64}  # widths of the layers → rows of a client


def run(devices: int, repeats: int) -> harness.Tables:
    logging.set_verbosity("error")
    mesh = jax.make_mesh((devices,), ("clients",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        gradients = {
            f"MLP {shape}, {rows} rows, value and gradient": _gradients(mesh, shape, rows, repeats)
            for shape, rows in SHAPES.items()
        }
        rounds = _rounds(mesh, max(3, repeats // 2))
    with jax.set_mesh(jax.make_mesh((1,), ("clients",), (AxisType.Auto,), devices=jax.devices()[:1])):
        args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), _digits(mesh))
        alone = harness.compile_all({"one device": _round("vmap")}, args)["one device"]
    rounds["FLOPs per device / an equal share"] = {"GF/dev": rounds["paraxis"]["GF/dev"] / alone.gigaflops * devices}
    return {"CNN, one FedAvg round": rounds} | gradients


def loss(params: list[jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    for weights in params[:-1]:
        x = jax.nn.relu(x @ weights)
    return cross_entropy(x @ params[-1], y)


def _gradients(mesh: Mesh, shape: str, rows: int, repeats: int) -> dict[str, dict[str, Any]]:
    widths = [int(width) for width in shape.split("-")]

    def made_params(key: jax.Array) -> list[jax.Array]:
        shapes = zip(jax.random.split(key, len(widths) - 1), widths[:-1], widths[1:], strict=True)
        return [jax.random.normal(key, (m, n)) / math.sqrt(m) for key, m, n in shapes]

    args = _placed(mesh, made_params, (64, rows), widths[0])

    @px.program(clients=64)
    def ours(params, x, y):
        return px.reduce_mean(px.map_fn(loss, (px.broadcast(params), x, y)))

    @px.program(clients=64)
    def ours_inside(params, x, y):
        return px.reduce_mean(px.map_fn(jax.value_and_grad(loss), (px.broadcast(params), x, y)))

    @drjax.program(placements={"clients": 64})
    def theirs(params, x, y):
        return drjax.reduce_mean(drjax.map_fn(loss, (drjax.broadcast(params), x, y)))

    def by_hand(params, x, y):
        def shard(params, x, y):
            mean = jax.value_and_grad(lambda params: jax.vmap(loss, (None, 0, 0))(params, x, y).mean())
            return jax.lax.pmean(mean(params), "clients")

        specs = (P(), P("clients"), P("clients"))
        return jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)(params, x, y)

    rivals = {
        "paraxis, jax.grad(program)": jax.value_and_grad(ours),
        "paraxis, jax.grad in the map": ours_inside,
        "by hand: shard_map of vmap": by_hand,
        "DrJAX": jax.value_and_grad(theirs),
        "one flat batch (bound)": jax.value_and_grad(lambda p, x, y: loss(p, x.reshape(-1, widths[0]), y.reshape(-1))),
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
