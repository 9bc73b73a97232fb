"""`px.explain`: how much longer it takes than to trace, lower and compile alone; at most 1.15 times as long is wanted.

Rivals take turns, and the first turn, each time with a function that JAX has not seen. CPU time counts, since a
compiler's threads wait for each other on a shared machine. The report is printed as well.

And a step of Adam for a transformer of 110 million parameters, from shapes alone and in a process of its own: on 512
simulated devices, and, where libtpu is installed, on 256 chips of TPU v5e, by the TPUs' compiler: at most 180 seconds
are wanted.
"""

import functools
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
    for name, (loss, args) in PROGRAMS.items():
        times: dict[str, list[float]] = {"alone": [], "explained": []}
        for turn in range(repeats + 1):
            for rival, compile_ in RIVALS if turn % 2 else RIVALS[::-1]:
                fn, start = gradient(loss, ROWS), time.process_time()
                compile_(fn, args)
                times[rival] += [time.process_time() - start] if turn else []
        apart, together = (statistics.median(times[rival]) for rival in ("alone", "explained"))
        rows[name] = {"alone": apart, "explained": together, "it / alone": together / apart}

    found = {"transformer, Adam, 512 devices": in_child(None)}
    if importlib.util.find_spec("libtpu") is not None:
        found["the same, TPU v5e:16x16"] = in_child("v5e:16x16")
    return {"CPU seconds": rows, "from shapes alone": found}


def in_child(on: str | None) -> dict[str, float]:
    command = [sys.executable, "-c", f"import bench_explain; bench_explain.large({on!r})"]
    child = subprocess.run(command, cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(child.stdout)


def large(on: str | None) -> None:
    """Explain a large step, and print what that took."""
    if on is None:
        px.simulate_devices(512)
    params = {"words": struct(32_000, 768), "blocks": block(768, 12)}
    optimizer = optax.adam(1e-3)

    def loss(params: Any, row: Any) -> Any:
        x, _ = jax.lax.scan(lambda x, p: (layer(x, p), None), params["words"][row[:-1]], params["blocks"])
        return optax.softmax_cross_entropy_with_integer_labels(x @ params["words"].T, row[1:]).mean()

    def step(params: Any, state: Any, rows: Any) -> Any:
        updates, state = optimizer.update(gradient(loss, 1024)(params, rows), state, params)
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(optimizer.init, params)
    start = time.perf_counter()
    report = px.explain(step, on=on)(params, state, jax.ShapeDtypeStruct((1024, 513), jnp.int32))
    seconds = time.perf_counter() - start
    peak, sent = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, report.total_bytes / 2**20
    found = {"parameters": sum(x.size for x in jax.tree.leaves(params)), "s": seconds, "GiB": peak, "MiB sent": sent}
    print(json.dumps(found), flush=True)


RIVALS: list[tuple[str, Callable[..., Any]]] = [
    ("alone", lambda fn, args: jax.jit(fn).lower(*args).compile()),
    ("explained", lambda fn, args: str(px.explain(fn)(*args))),
]


def gradient(loss: Callable[..., Any], size: int) -> Callable[..., Any]:
    """A new gradient of the mean loss of rows."""
    rows = px.Axis("rows", size)
    mean = lambda p, x: px.reduce_mean(px.map_fn(loss, (px.broadcast(p, rows), x), rows), rows)  # noqa: E731
    return lambda p, x: jax.grad(mean)(p, x)


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def block(width: int, *stacked: int) -> dict[str, jax.ShapeDtypeStruct]:
    square = dict.fromkeys(("query", "key", "value", "out"), struct(*stacked, width, width))
    return square | {"up": struct(*stacked, width, 4 * width), "down": struct(*stacked, 4 * width, width)}


def layer(x: Any, p: Any) -> Any:
    scores = jax.nn.softmax((x @ p["query"]) @ (x @ p["key"]).T)
    x = x + (scores @ (x @ p["value"])) @ p["out"]
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


def stacked(layer: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda params, x: jnp.mean(functools.reduce(layer, params, x) ** 2)


X = struct(ROWS, TOKENS, WIDTH)
PROGRAMS: dict[str, Any] = {
    "MLP, 3 layers": (stacked(lambda x, w: jnp.tanh(x @ w)), ([struct(WIDTH, WIDTH)] * 3, X)),
    "transformer, 2 blocks": (stacked(layer), ([block(WIDTH)] * 2, X)),
}

if __name__ == "__main__":
    harness.main(run, __doc__, devices=(8,))
