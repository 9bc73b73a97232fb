"""Estimates of `px.explain(fn, on=machine)` beside a clock: at most 1.3 times as much, or as little, is wanted.

The machine is this one's first device, measured by `px.reports.Machine.here()` with two programs, a layer's products
and a sum of vectors, and with the price of new memory. Four others are estimated and timed, each the fastest of many
calls, by two clocks: the seconds that this process computes, shared by its cores, which others on the machine change
little, and those on the wall. If these are far apart, the machine is busy; "apart" is told by the first.
"""

import math
import os
import time
from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp

import paraxis as px


def run(devices: int, repeats: int) -> None:
    del devices
    machine = px.reports.Machine.here()
    speeds = f"{machine.flops['f32'] / 1e9:.0f} GFLOP/s, {machine.bandwidth / 1e9:.1f} GB/s"
    print(f"\none device: {speeds}, {machine.allocation / 1e9:.1f} GB/s of new memory")
    print(f"  {'':34}{'estimate, ms':>14}{'computed, ms':>14}{'wall, ms':>10}{'apart':>8}")
    for name, (fn, args) in PROGRAMS.items():
        estimate = px.explain(fn, on=machine)(*args).estimate
        assert estimate is not None
        computed, wall = fastest(jax.jit(fn), args, repeats)
        apart = max(estimate.seconds / computed, computed / estimate.seconds)
        times = f"{estimate.seconds * 1e3:14.2f}{computed * 1e3:14.2f}{wall * 1e3:10.2f}"
        print(f"  {name:34}{times}{apart:8.2f}", flush=True)


def fastest(fn: Callable[..., Any], args: Any, repeats: int) -> tuple[float, float]:
    jax.block_until_ready(fn(*args))
    computed = wall = math.inf
    for _ in range(repeats):
        start = time.process_time(), time.perf_counter()
        jax.block_until_ready(fn(*args))
        computed = min(computed, (time.process_time() - start[0]) / len(os.sched_getaffinity(0)))
        wall = min(wall, time.perf_counter() - start[1])
    return computed, wall


def mlp(params: Any, x: Any) -> Any:
    def loss(params: Any) -> Any:
        out = x
        for w in params:
            out = jnp.tanh(out @ w)
        return jnp.mean(out**2)

    return jax.grad(loss)(params)


def transformer(params: Any, x: Any) -> Any:
    def loss(params: Any) -> Any:
        out = x
        for p in params:
            scores = jax.nn.softmax((out @ p["query"]) @ (out @ p["key"]).swapaxes(-1, -2))
            out = out + scores @ (out @ p["value"])
            out = out + jax.nn.relu(out @ p["up"]) @ p["down"]
        return jnp.mean(out**2)

    return jax.grad(loss)(params)


def adam(params: Any, first: Any, second: Any, gradient: Any) -> Any:
    first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
    return params - 1e-3 * first / (jnp.sqrt(second) + 1e-8), first, second


def logistic(w: Any, x: Any) -> Any:
    return jax.grad(lambda w: jnp.mean(jax.nn.softplus(x @ w)))(w)


def full(*shape: int) -> jax.Array:
    return jnp.full(shape, 0.01, jnp.float32)


BLOCK = {name: full(256, 256) for name in ("query", "key", "value")} | {"up": full(256, 1024), "down": full(1024, 256)}
PROGRAMS: dict[str, Any] = {
    "MLP, 3 layers, gradient": (mlp, ([full(1024, 1024)] * 3, full(512, 1024))),
    "transformer, 2 blocks, gradient": (transformer, ([BLOCK] * 2, full(16, 128, 256))),
    "Adam's update, 16 M numbers": (adam, (full(2**24),) * 4),
    "logistic regression, gradient": (logistic, (full(512), full(2**15, 512))),
}

if __name__ == "__main__":
    harness.main(run, __doc__, devices=(1,))
