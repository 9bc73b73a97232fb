"""What an eager call costs that traces its function anew and finds what was compiled: over tracing it, and a jit call.

MLP 64-64-10, 8 clients × 8 rows; each function has been compiled before. ``jax.jit`` around it is the last column but
one.
"""

from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp

import paraxis as px

CLIENTS, ROWS, SIZES = 8, 8, (64, 64, 10)


def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    *hidden, (w, b) = params
    for inner, bias in hidden:
        x = jnp.maximum(x @ inner + bias, 0)
    logits = x @ w + b
    chosen = jnp.take_along_axis(logits, y[:, None], 1)[:, 0]
    return jnp.mean(jax.scipy.special.logsumexp(logits, -1) - chosen)


def run(devices: int, repeats: int) -> harness.Tables:
    keys = jax.random.split(jax.random.key(0), len(SIZES))
    params = [
        (jax.random.normal(key, (a, b)) / a**0.5, jnp.zeros(b))
        for key, a, b in zip(keys, SIZES[:-1], SIZES[1:], strict=False)
    ]
    x = jax.random.normal(keys[-1], (CLIENTS, ROWS, SIZES[0]))
    y = jax.random.randint(keys[-1], (CLIENTS, ROWS), 0, SIZES[-1])
    clients = px.Axis("clients", CLIENTS)

    @px.program(clients=CLIENTS)
    def value(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return px.reduce_mean(px.map_fn(loss, (px.broadcast(params), x, y)))

    @px.program(clients=CLIENTS)
    def inside(params: Any, x: jax.Array, y: jax.Array) -> Any:
        return px.reduce_mean(px.map_fn(jax.value_and_grad(loss), (px.broadcast(params), x, y)))

    def mapped(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return px.map_fn(lambda x, y: loss(params, x, y), (x, y), clients)

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
    return {"eager calls": rows}


if __name__ == "__main__":
    harness.main(run, __doc__)
