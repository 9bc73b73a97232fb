"""`px.explain`: how much longer it takes than to trace, lower and compile alone; at most 1.15 times as long is wanted.

Rivals take turns, and the first turn, each time with a function that JAX has not seen. CPU time counts, since a
compiler's threads wait for each other on a shared machine. The report is printed as well.

And a step of Adam for a transformer of 110 million parameters, from shapes alone and in a process of its own: on 512
simulated devices, and, where libtpu is installed, on 256 chips of TPU v5e, by the TPUs' compiler: at most 180 seconds
are wanted.
"""

import importlib.util
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import jax
import jax.numpy as jnp
import optax

import paraxis as px

ROWS, TOKENS, WIDTH = 16, 32, 128


def run(devices: int, repeats: int) -> harness.Tables:
    rows: dict[str, dict[str, float]] = {}
    for name, (make, args) in PROGRAMS.items():
        times: dict[str, list[float]] = {"alone": [], "explained": []}
        for turn in range(repeats + 1):
            for rival, compile_ in RIVALS if turn % 2 else RIVALS[::-1]:
                fn, start = make(), time.process_time()
                compile_(fn, args)
                times[rival] += [time.process_time() - start] if turn else []
        apart, together = (statistics.median(times[rival]) for rival in ("alone", "explained"))
        rows[name] = {"alone": apart, "explained": together, "it / alone": together / apart}

    found = {"transformer, Adam, 512 devices": in_child(None)}
    if importlib.util.find_spec("libtpu") is not None:
        found["the same, TPU v5e:16x16"] = in_child("v5e:16x16")
    return {"CPU seconds": rows, "from shapes alone": found}


def in_child(on: str | None) -> dict[str, float]:
    """Explain a large step, in a process that does nothing else; return what that took."""
    command = [sys.executable, "-c", f"import bench_explain; bench_explain.large({on!r})"]
    child = subprocess.run(command, cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(child.stdout)


def large(on: str | None) -> None:
    """Explain a large step, and print what that took."""
    if on is None:
        px.testing.simulate_devices(512)
    width, tokens, words = 768, 512, 32_000
    square = struct(width, width)
    block = dict.fromkeys(("query", "key", "value", "out"), square)
    block |= {"up": struct(width, 4 * width), "down": struct(4 * width, width)}
    params = {"words": struct(words, width), "blocks": {name: struct(12, *x.shape) for name, x in block.items()}}
    optimizer = optax.adam(1e-3)

    def loss(params: Any, row: Any) -> Any:
        def layer(x: Any, p: Any) -> Any:
            scores = jax.nn.softmax((x @ p["query"]) @ (x @ p["key"]).T)
            x = x + (scores @ (x @ p["value"])) @ p["out"]
            return x + jax.nn.gelu(x @ p["up"]) @ p["down"], None

        x, _ = jax.lax.scan(layer, params["words"][row[:-1]], params["blocks"])
        logits = x @ params["words"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, row[1:]).mean()

    def step(params: Any, state: Any, rows: Any) -> Any:
        axis = px.Axis("rows", 1024)
        gradient = jax.grad(
            lambda params: px.reduce_mean(px.map_fn(loss, (px.broadcast(params, axis), rows), axis), axis)
        )
        updates, state = optimizer.update(gradient(params), state, params)
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(optimizer.init, params)
    start = time.perf_counter()
    report = px.explain(step, on=on)(params, state, jax.ShapeDtypeStruct((1024, tokens + 1), jnp.int32))
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    number = sum(leaf.size for leaf in jax.tree.leaves(params))
    found = {"parameters": number, "s": seconds, "GiB": peak, "MiB sent": report.total_bytes / 2**20}
    print(json.dumps(found), flush=True)


def alone(fn: Callable[..., Any], args: Any) -> Any:
    return jax.jit(fn).lower(*args).compile()


def explained(fn: Callable[..., Any], args: Any) -> str:
    return str(px.explain(fn)(*args))


RIVALS: list[tuple[str, Callable[..., Any]]] = [("alone", alone), ("explained", explained)]


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def over_rows(loss: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
    """A function of nothing that makes a new gradient of the mean loss each time."""

    def make() -> Callable[..., Any]:
        rows = px.Axis("rows", ROWS)

        def mean(params: Any, x: Any) -> Any:
            return px.reduce_mean(px.map_fn(loss, (px.broadcast(params, rows), x), rows), rows)

        return lambda params, x: jax.grad(mean)(params, x)

    return make


def mlp(params: Any, x: Any) -> Any:
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def transformer(params: Any, x: Any) -> Any:
    for p in params:
        scores = jax.nn.softmax((x @ p["query"]) @ (x @ p["key"]).T)
        x = x + scores @ (x @ p["value"])
        x = x + jax.nn.gelu(x @ p["up"]) @ p["down"]
    return jnp.mean(x**2)


SQUARE = struct(WIDTH, WIDTH)
BLOCK = dict.fromkeys(("query", "key", "value"), SQUARE) | {"up": struct(WIDTH, 512), "down": struct(512, WIDTH)}
PROGRAMS: dict[str, Any] = {
    "MLP, 3 layers": (over_rows(mlp), ([SQUARE] * 3, struct(ROWS, TOKENS, WIDTH))),
    "transformer, 2 blocks": (over_rows(transformer), ([BLOCK] * 2, struct(ROWS, TOKENS, WIDTH))),
}

if __name__ == "__main__":
    harness.main(run, __doc__, devices=(8,))
