"""px.pmap beside jax.pmap, where the sizes match: a train step of an MLP, and the bare cost of a call."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp
from models import mlp_loss, mlp_params

import paraxis as px


def run(devices: int, repeats: int) -> harness.Tables:
    keys = jax.random.split(jax.random.key(0), 3)
    params = jax.tree.map(lambda x: jnp.stack([x] * devices), mlp_params(keys[0]))
    x = jax.random.normal(keys[1], (devices, 128, 784))
    y = jax.random.randint(keys[2], (devices, 128), 0, 10)

    def step(params: Any, x: jax.Array, y: jax.Array) -> Any:
        gradient = jax.lax.pmean(jax.grad(mlp_loss)(params, x, y), "batch")
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)

    def tiny(tree: Any) -> Any:
        return jax.tree.map(lambda x: x + 1, tree)

    leaves = [jnp.zeros((devices, 4)) for _ in range(40)]
    return {
        "pmap": {
            "train step, MLP, ms": _row(step, (params, x, y), repeats * 3, 1e3),
            "one call, 40 small leaves, µs": _row(tiny, (leaves,), repeats * 40, 1e6),
        }
    }


def _row(fn: Callable[..., Any], args: Any, repeats: int, unit: float) -> dict[str, float]:
    pair = (px.pmap(fn, "batch"), jax.pmap(fn, "batch"))
    placed = [jax.block_until_ready(fn(*args)) for fn in pair]
    args = [(placed[i], *args[1:]) for i in range(2)]  # as in a loop: the result is the next argument
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(repeats + 2):
        for i, fn in enumerate(pair):
            start = time.perf_counter()
            jax.block_until_ready(fn(*args[i]))
            if turn > 1:
                times[i].append(time.perf_counter() - start)
    mine, other = (statistics.median(t) * unit for t in times)
    return {"px.pmap": mine, "jax.pmap": other, "ratio": mine / other}


if __name__ == "__main__":
    harness.main(run, __doc__)
