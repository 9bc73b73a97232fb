"""`px.Stream` beside the mesh: time with data in memory, time and memory as clients grow, reading, ragged cohorts.

The mesh has its data on the devices already; the stream takes it from the host, chunk by chunk. Both are traced before.
"""

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np

import paraxis as px

ROWS, COLUMNS, HIDDEN, CLASSES = 32, 64, 256, 10
GROWING = (1_000, 10_000, 100_000)


def run(devices: int, repeats: int) -> harness.Tables:
    return {
        **_against_the_mesh(repeats),
        **_while_reading(repeats),
        **_ragged_rounds(devices, repeats),
        **_growing(devices),
    }


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


def _medians(rivals: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    return {name: 1e3 * seconds for name, seconds in harness.in_turn(rivals, repeats).items()}


def _against_the_mesh(repeats: int) -> harness.Tables:
    size, p = 2000, params()
    data = rows(size)
    whole, turns = px.Axis("clients", size), px.Axis("clients", size, at_once=64)
    placed, groups = px.scatter(data, whole), px.Groups.of_arrays(data)
    on_mesh, in_turns = jax.jit(value_and_grad(whole)), jax.jit(value_and_grad(turns))
    streams = {k: px.Stream(at_once=k).jit(value_and_grad(whole)) for k in (64, 250)}
    found = _medians(
        {
            "the mesh": lambda: on_mesh(p, placed),
            "the mesh, at_once=64": lambda: in_turns(p, placed),
            **{f"Stream(at_once={k})": lambda step=step: step(p, groups) for k, step in streams.items()},
        },
        repeats,
    )
    best = min(found["the mesh"], found["the mesh, at_once=64"])
    return {
        f"value and gradient, {size:,} clients of {ROWS} rows": {
            name: {"ms": ms, "over the better mesh": ms / best} for name, ms in found.items()
        }
    }


class Slow:
    """Elements that take some time to read."""

    def __init__(self, data: Any, seconds: float) -> None:
        self.data, self.seconds = data, seconds

    def __len__(self) -> int:
        return len(self.data["y"])

    def __getitem__(self, number: int) -> Any:
        return jax.tree.map(lambda x: x[number], self.data)

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        time.sleep(self.seconds * len(numbers))
        return [self[number] for number in numbers]


def _while_reading(repeats: int) -> harness.Tables:
    size, p = 10_000, params()  # of which reading the first chunk, when devices have nothing to do yet, is a small part
    data = rows(size)
    step = px.Stream(at_once=64).jit(value_and_grad(px.Axis("clients", size)))
    in_memory = px.Groups(Slow(data, 0.0))
    alone = _medians({"": lambda: step(p, in_memory)}, 3)[""]
    slow = px.Groups(Slow(data, alone / 1e3 / size / 2))
    found = _medians({"at once": lambda: step(p, in_memory), "slowly": lambda: step(p, slow)}, repeats)
    return {
        "reading takes half as long as computing": {
            f"elements are given {name}": {"ms": ms, "devices busy, %": 100 * found["at once"] / ms}
            for name, ms in found.items()
        }
    }


# --- a federated round over clients of different length --------------------------------------------------------------

BATCH, COHORT = 20, 100


def ragged() -> tuple[list[Any], np.ndarray]:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(3.5, 0.8, 400).astype(int), 4, 400)
    make = rng.normal, rng.integers
    return [{"x": make[0](size=(n, 784)).astype("float32"), "y": make[1](0, 10, n)} for n in lengths], lengths


def wide_params() -> Any:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(784, 128)) / 28, rng.normal(size=(128, 10)) / 11
    return {"a": jnp.asarray(a.astype("float32")), "b": jnp.asarray(b.astype("float32"))}


def batch_loss(p: Any, x: Any, y: Any, mask: Any) -> jax.Array:
    logits = jax.nn.log_softmax(jnp.maximum(x @ p["a"], 0) @ p["b"])
    losses = -jnp.take_along_axis(logits, y[:, None], 1)[:, 0]
    return jnp.sum(jnp.where(mask, losses, 0.0)) / jnp.maximum(mask.sum(), 1)


def local_epoch(p: Any, x: Any, y: Any, mask: Any) -> Any:
    """One epoch in batches of 20; an empty batch changes nothing."""
    count = -(-x.shape[0] // BATCH)
    extra = count * BATCH - x.shape[0]
    x, y, mask = (jnp.pad(v, [(0, extra)] + [(0, 0)] * (v.ndim - 1)) for v in (x, y, mask))

    def step(p: Any, batch: Any) -> Any:
        g = jax.grad(batch_loss)(p, *batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, g), None

    return jax.lax.scan(step, p, [v.reshape(count, BATCH, *v.shape[1:]) for v in (x, y, mask)])[0]


@px.program(clients=COHORT)
def round_of(p: Any, data: Any) -> Any:
    new = px.map_fn(lambda p, d: local_epoch(p, d["x"], d["y"], d.mask), (px.broadcast(p), data))
    return px.reduce_weighted_mean(new, data.count.astype(jnp.float32))


def _ragged_rounds(devices: int, repeats: int) -> harness.Tables:
    clients, lengths = ragged()
    groups = px.Groups(clients, lengths=lengths)
    p, cohorts = wide_params(), [groups.sample(COHORT, seed=(0, number)) for number in range(4)]
    engines = {count: px.Stream(at_once=-(-count // devices)) for count in (8, 24)}
    steps, on_mesh = {count: engine.jit(round_of) for count, engine in engines.items()}, jax.jit(round_of)

    def each(run: Callable[[Any], Any]) -> Callable[[], Any]:
        return lambda: [run(cohort) for cohort in cohorts]

    found = _medians(
        {
            **{
                f"Stream, chunks of {count}": each(lambda cohort, step=step: step(p, cohort))
                for count, step in steps.items()
            },
            "the mesh, padded to the longest": each(lambda cohort: on_mesh(p, cohort.arrays())),
        },
        max(2, repeats // 3),
    )
    whole = cohorts[0].arrays()
    schedules = [engine.passes(round_of, p, cohorts[0]).chunks for engine in engines.values()]
    padding = [sum(count * (length or 0) for count, (length,) in chunks) / whole.count.sum() for chunks in schedules]
    padding.append(float(COHORT * whole.mask.shape[1] / whole.count.sum()))
    best = min(found.values())
    return {
        f"a round of {COHORT} of 400 ragged clients": {
            name: {"ms": ms / len(cohorts), "over the fastest": ms / best, "padding": padded}
            for (name, ms), padded in zip(found.items(), padding, strict=True)
        }
    }


# --- as clients grow -------------------------------------------------------------------------------------------------

_CHUNK = 128  # elements that are computed at once, on all devices together


class Repeated:
    """As many clients as one likes, of which a thousand differ."""

    def __init__(self, size: int) -> None:
        self.size, self.data = size, rows(1000)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> Any:
        return jax.tree.map(lambda x: x[number % 1000], self.data)


def measure(size: int, devices: int) -> None:
    """Print seconds of a pass, and the peak of memory, of this many clients.

    Of the fewest, there are several chunks as well: fewer than are in flight at once take less memory.
    """
    step = px.Stream(at_once=_CHUNK // devices).jit(value_and_grad(px.Axis("clients", size)))
    groups = px.Groups(Repeated(size))
    p = params()
    times = []
    for _ in range(1 + max(1, 10_000 // size)):  # in the first, it is compiled
        begin = time.perf_counter()
        jax.block_until_ready(step(p, groups))
        times.append(time.perf_counter() - begin)
    seconds = float(np.median(times[1:]))
    status = Path("/proc/self/status").read_text()
    print(seconds, int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) / 1024)


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
