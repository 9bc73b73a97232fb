"""Value and gradient of a mean of MLP losses over shapes: 64 clients, each with some rows, against programs by hand."""

import functools
import math
from typing import Any

import harness
import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from models import cross_entropy

import paraxis as px

CLIENTS = 64
SHAPES = {(64, 64, 10): 8, (64, 256, 10): 64, (784, 512, 512, 10): 32}
"""Widths of the layers → rows of a client."""


def loss(params, x, y):
    for weights in params[:-1]:
        x = jax.nn.relu(x @ weights)
    return cross_entropy(x @ params[-1], y)


def run(devices: int, repeats: int) -> harness.Tables:
    return {
        f"{'-'.join(map(str, widths))}, {rows} rows": one_shape(devices, repeats, widths, rows)
        for widths, rows in SHAPES.items()
    }


def one_shape(devices: int, repeats: int, widths: tuple[int, ...], rows: int) -> dict[str, dict[str, Any]]:
    mesh = jax.make_mesh((devices,), ("clients",), axis_types=(AxisType.Auto,))
    split, whole = NamedSharding(mesh, P("clients")), NamedSharding(mesh, P())
    keys = jax.random.split(jax.random.key(0), len(widths) + 1)
    shapes = list(zip(keys, widths[:-1], widths[1:], strict=False))
    params = jax.device_put([jax.random.normal(k, (m, n)) / math.sqrt(m) for k, m, n in shapes], whole)
    x = jax.device_put(jax.random.normal(keys[-2], (CLIENTS, rows, widths[0])), split)
    y = jax.device_put(jax.random.randint(keys[-1], (CLIENTS, rows), 0, widths[-1]), split)

    @px.program(clients=CLIENTS)
    def ours(params, x, y):
        return px.reduce_mean(px.map_fn(loss, (px.broadcast(params), x, y)))

    @px.program(clients=CLIENTS)
    def ours_inside(params, x, y):
        return px.reduce_mean(px.map_fn(jax.value_and_grad(loss), (px.broadcast(params), x, y)))

    def by_hand(shard):
        def everywhere(params, x, y):
            return jax.tree.map(functools.partial(jax.lax.pmean, axis_name="clients"), shard(params, x, y))

        specs = (P(), P("clients"), P("clients"))
        return jax.shard_map(everywhere, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)

    def mean(params, x, y):
        return jax.vmap(loss, (None, 0, 0))(params, x, y).mean()

    def plain_sums(params, x, y):
        found = jax.vmap(jax.value_and_grad(loss), (None, 0, 0))(params, x, y)
        return jax.tree.map(lambda rows: rows.mean(0), found)

    def flat(params, x, y):
        return loss(params, x.reshape(-1, widths[0]), y.reshape(-1))

    rivals = {
        "paraxis, jax.grad(program)": jax.value_and_grad(ours),
        "paraxis, jax.grad in the map": ours_inside,
        "shard_map by hand, grad of vmap": by_hand(jax.value_and_grad(mean)),
        "shard_map by hand, plain sums of grads": by_hand(plain_sums),
        "jit(vmap)": jax.value_and_grad(mean),
        "one flat batch": jax.value_and_grad(flat),
    }
    with jax.set_mesh(mesh):
        made = harness.compile_all(rivals, (params, x, y))
        harness.take_turns(made, (params, x, y), repeats)
        results = [jax.tree.leaves(rival.compiled(params, x, y)) for rival in made.values()]
    for other in results:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), results[0], other)
    return harness.rows(made, "paraxis, jax.grad(program)")


if __name__ == "__main__":
    harness.main(run, __doc__)
