"""`px.Stream` beside the mesh: time with data in memory; time and memory as clients grow.

The mesh has its data on the devices already; the stream takes it from the host, chunk by chunk. Both are traced before.
"""

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np

import paraxis as px

ROWS, COLUMNS, HIDDEN, CLASSES = 32, 64, 256, 10
GROWING = (1_000, 10_000, 100_000)
_CHUNK = 128  # elements that are computed at once, on all devices together, as clients grow


def run(devices: int, repeats: int) -> harness.Tables:
    return {**_against_the_mesh(repeats), **_growing(devices)}


def params() -> Any:
    rng = np.random.default_rng(0)
    shapes = {"a": (COLUMNS, HIDDEN), "b": (HIDDEN, CLASSES)}
    return {name: jnp.asarray(rng.normal(size=s).astype("float32") / s[0] ** 0.5) for name, s in shapes.items()}


def client_loss(p: Any, data: Any) -> jax.Array:
    logits = jax.nn.log_softmax(jnp.tanh(data["x"] @ p["a"]) @ p["b"])
    return -jnp.mean(jnp.take_along_axis(logits, data["y"][:, None], 1))


def value_and_grad(clients: px.Axis) -> Any:
    def loss(p: Any, data: Any) -> jax.Array:
        return px.reduce_mean(px.map_fn(client_loss, (px.broadcast(p, clients), data), clients), clients)

    return jax.value_and_grad(loss)


def rows(size: int) -> Any:
    rng = np.random.default_rng(1)
    return {
        "x": rng.normal(size=(size, ROWS, COLUMNS)).astype("float32"),
        "y": rng.integers(0, CLASSES, (size, ROWS)).astype("int32"),
    }


def _against_the_mesh(repeats: int) -> harness.Tables:
    size, p = 2000, params()
    data = rows(size)
    whole, turns = px.Axis("clients", size), px.Axis("clients", size, at_once=64)
    placed, groups = px.scatter(data, whole), px.Groups.of_arrays(data)
    on_mesh, in_turns = jax.jit(value_and_grad(whole)), jax.jit(value_and_grad(turns))
    streams = {k: px.Stream(at_once=k).jit(value_and_grad(whole)) for k in (64, 250)}
    rivals = {
        "the mesh": lambda: on_mesh(p, placed),
        "the mesh, at_once=64": lambda: in_turns(p, placed),
        **{f"Stream(at_once={k})": lambda step=step: step(p, groups) for k, step in streams.items()},
    }
    found = {name: 1e3 * seconds for name, seconds in harness.in_turn(rivals, repeats).items()}
    best = min(found["the mesh"], found["the mesh, at_once=64"])
    return {
        f"value and gradient, {size:,} clients of {ROWS} rows": {
            name: {"ms": ms, "over the better mesh": ms / best} for name, ms in found.items()
        }
    }


class Repeated:
    """As many clients as one likes, of which a thousand differ."""

    def __init__(self, size: int) -> None:
        self.size, self.data = size, rows(1000)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> Any:
        return jax.tree.map(lambda x: x[number % 1000], self.data)


def measure(size: int, devices: int) -> None:
    """Print seconds of a pass, and the peak of memory, of this many clients."""
    step = px.Stream(at_once=_CHUNK // devices).jit(value_and_grad(px.Axis("clients", size)))
    groups, p, times = px.Groups(Repeated(size)), params(), []
    for _ in range(1 + max(1, 10_000 // size)):  # in the first, it is compiled
        begin = time.perf_counter()
        jax.block_until_ready(step(p, groups))
        times.append(time.perf_counter() - begin)
    peak = re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[0]
    print(float(np.median(times[1:])), int(peak) / 1024)


def _growing(devices: int) -> harness.Tables:
    rows: dict[str, dict[str, float]] = {}
    for size in GROWING:
        command = [sys.executable, __file__, "--measure", str(size), "--devices", str(devices)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        seconds, peak = (float(word) for word in output.split())
        rows[f"{size:,} clients"] = {"s": seconds, "ms a client": 1e3 * seconds / size, "peak memory, MB": peak}
    return {f"as clients grow, {_CHUNK} at once": rows}


if __name__ == "__main__":
    if "--measure" in sys.argv:
        from paraxis.testing import simulate_devices

        simulate_devices(int(sys.argv[-1]))
        measure(int(sys.argv[2]), int(sys.argv[-1]))
    else:
        harness.main(run, __doc__)
