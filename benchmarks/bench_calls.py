"""What calls cost: an eager call that finds what was compiled, over tracing it and a jit call; px.pmap over jax.pmap.

Eager calls: MLP 784-64-64-10, 8 clients × 8 rows; each function has been compiled before. ``px.pmap``, where the sizes
match: a train step of an MLP, and a call that computes nothing.
"""

import functools
from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp
from models import mlp_loss, mlp_params

import paraxis as px

CLIENTS, ROWS = 8, 8


def run(devices: int, repeats: int) -> harness.Tables:
    return {"eager calls": _eager(repeats), "pmap": _pmap(devices, repeats)}


def _eager(repeats: int) -> dict[str, dict[str, float]]:
    keys = jax.random.split(jax.random.key(0), 3)
    params = mlp_params(keys[0], 64)
    x, y = jax.random.normal(keys[1], (CLIENTS, ROWS, 784)), jax.random.randint(keys[2], (CLIENTS, ROWS), 0, 10)
    clients = px.Axis("clients", CLIENTS)

    @px.program(clients=CLIENTS)
    def value(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return px.reduce_mean(px.map_fn(mlp_loss, (px.broadcast(params), x, y)))

    @px.program(clients=CLIENTS)
    def inside(params: Any, x: jax.Array, y: jax.Array) -> Any:
        return px.reduce_mean(px.map_fn(jax.value_and_grad(mlp_loss), (px.broadcast(params), x, y)))

    def mapped(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return px.map_fn(lambda x, y: mlp_loss(params, x, y), (x, y), clients)

    functions: dict[str, Callable[..., Any]] = {
        "map_fn of a closure": mapped,
        "program, a mean of losses": value,
        "program, a mean of gradients": inside,
        "jax.value_and_grad(program)": jax.value_and_grad(value),
    }
    rows: dict[str, dict[str, float]] = {}
    for name, fn in functions.items():
        jitted = jax.jit(fn)
        rivals: dict[str, Callable[[], Any]] = {
            "eager": lambda fn=fn: fn(params, x, y),
            "traced": lambda fn=fn: jax.make_jaxpr(lambda *args: fn(*args))(params, x, y).consts,
            "jit": lambda jitted=jitted: jitted(params, x, y),
        }
        eager, traced, jit = (seconds * 1e3 for seconds in harness.in_turn(rivals, repeats).values())
        rows[name] = {"ms": eager, "traced": traced, "jit call": jit, "ms / (traced + jit)": eager / (traced + jit)}
    return rows


def _pmap(devices: int, repeats: int) -> dict[str, dict[str, float]]:
    keys = jax.random.split(jax.random.key(0), 3)
    params = jax.tree.map(lambda x: jnp.stack([x] * devices), mlp_params(keys[0]))
    x, y = jax.random.normal(keys[1], (devices, 128, 784)), jax.random.randint(keys[2], (devices, 128), 0, 10)

    def step(params: Any, x: jax.Array, y: jax.Array) -> Any:
        gradient = jax.lax.pmean(jax.grad(mlp_loss)(params, x, y), "batch")
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)

    def tiny(tree: Any) -> Any:
        return jax.tree.map(lambda x: x + 1, tree)

    leaves = [jnp.zeros((devices, 4)) for _ in range(40)]
    calls = {
        "train step, MLP, ms": (step, (params, x, y), repeats * 3, 1e3),
        "one call, 40 small leaves, µs": (tiny, (leaves,), repeats * 40, 1e6),
    }
    rows: dict[str, dict[str, float]] = {}
    for name, (fn, args, turns, unit) in calls.items():
        pair = {"px.pmap": px.pmap(fn, "batch"), "jax.pmap": jax.pmap(fn, "batch")}
        first = {rival: mapped(*args) for rival, mapped in pair.items()}  # as in a loop: a result is the next argument
        rivals = {rival: functools.partial(mapped, first[rival], *args[1:]) for rival, mapped in pair.items()}
        found = {rival: seconds * unit for rival, seconds in harness.in_turn(rivals, turns).items()}
        rows[name] = {**found, "ratio": found["px.pmap"] / found["jax.pmap"]}
    return rows


if __name__ == "__main__":
    harness.main(run, __doc__)
