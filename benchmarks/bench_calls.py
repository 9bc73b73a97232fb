"""What an eager call costs that traces its function anew and finds what was compiled: over tracing it, and a jit call.

MLP 64-64-10, 8 clients × 8 rows; each function has been compiled before. ``jax.jit`` around it is the last column but
one.
"""

import statistics
import time
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


def run(devices: int, repeats: int) -> None:
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
    print(f"\neager calls, {devices} devices              ms   traced  jit call   ms / (traced + jit)")
    for name, fn in functions.items():
        jitted = jax.jit(fn)
        rivals = {
            "eager": lambda fn=fn: jax.block_until_ready(fn(params, x, y)),
            "traced": lambda fn=fn: jax.make_jaxpr(lambda *args: fn(*args))(params, x, y),
            "jit": lambda jitted=jitted: jax.block_until_ready(jitted(params, x, y)),
        }
        times: dict[str, list[float]] = {rival: [] for rival in rivals}
        for turn in range(repeats + 2):
            for rival, call in rivals.items():
                start = time.perf_counter()
                call()
                if turn > 1:  # compiled, and warm
                    times[rival].append((time.perf_counter() - start) * 1e3)
        eager, traced, jit = (statistics.median(times[rival]) for rival in rivals)
        print(f"  {name:32s} {eager:8.2f} {traced:8.2f} {jit:9.2f} {eager / (traced + jit):10.2f}")


if __name__ == "__main__":
    harness.main(run, __doc__)
