"""The loader: how busy the device is while batches are read, when reading takes half as long as computing.

The loss of each step is awaited before the next batch is asked for, so that nothing hides the reading but the reading
ahead. Busy is the share of the time in which there is a batch to compute with. ``waits`` reads as from a disk or a
network: for half of a step's time, nothing is done. ``computes`` works on the rows in NumPy for as long; on a CPU that
takes cores from the device, whose steps are then longer, which no reading ahead gives back.
"""

import statistics
import time
import timeit
from collections.abc import Callable, Iterator
from typing import Any, cast

import grain
import harness
import jax
import jax.numpy as jnp
import numpy as np

import paraxis as px

ROWS, WIDTH, BATCH, STEPS = 4096, 512, 256, 21


@jax.jit
def step(weights: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    def loss(weights: jax.Array) -> jax.Array:
        hidden = rows
        for w in weights:
            hidden = jnp.tanh(hidden @ w)
        return jnp.mean(hidden**2)

    value, gradient = jax.value_and_grad(loss)(weights)
    return weights - 0.1 * gradient, value


def run(devices: int, repeats: int) -> harness.Tables:
    rows = np.random.default_rng(0).integers(0, 256, (ROWS, WIDTH), np.uint8)
    batch = next(px.loader(rows, BATCH, transform=scaled).batches())
    seconds = min(steps([batch] * STEPS)[0] for _ in range(repeats + 1)) / (STEPS - 1)

    def waits(rows: np.ndarray) -> np.ndarray:
        time.sleep(seconds / 2)
        return scaled(rows)

    one = min(timeit.repeat(lambda: np.tanh(scaled(rows[:BATCH])), number=1, repeat=20))

    def computes(rows: np.ndarray) -> np.ndarray:
        for _ in range(max(1, round(seconds / 2 / one)) - 1):
            np.tanh(scaled(rows))
        return scaled(rows)

    return {
        f"a transform that {transform.__name__} half as long as a step": measure(rows, transform, batch, repeats)
        for transform in (waits, computes)
    }


def scaled(rows: np.ndarray) -> np.ndarray:
    return rows.astype(np.float32) / 255


def measure(rows: np.ndarray, transform: Any, ready: Any, repeats: int) -> dict[str, dict[str, float]]:
    """Rivals take turns; the first turn is not counted."""

    def by_hand() -> Iterator[Any]:
        order = np.random.default_rng(0).permutation(ROWS)
        for k in range(STEPS):
            at = k % (ROWS // BATCH) * BATCH
            yield jax.device_put(transform(rows[order[at : at + BATCH]]), ready.sharding)

    def by_grain() -> Iterator[Any]:
        source = grain.MapDataset.source(cast(Any, rows)).seed(0).shuffle().repeat().batch(BATCH).map(transform)
        found = iter(source.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)))
        for _ in range(STEPS):
            yield jax.device_put(next(found), ready.sharding)

    def loaded(read_ahead: int) -> Iterator[Any]:
        found = px.loader(rows, BATCH, transform=transform, read_ahead=read_ahead).batches()
        for _ in range(STEPS):
            yield next(found)
        found.close()

    rivals: dict[str, Callable[[], Any]] = {
        "on the devices already": lambda: [ready] * STEPS,
        "px.loader": lambda: loaded(2),
        "px.loader, read_ahead=0": lambda: loaded(0),
        "by hand, no thread": by_hand,
        "Grain, one thread": by_grain,
    }
    times: dict[str, list[tuple[float, float]]] = {rival: [] for rival in rivals}
    for turn in range(repeats + 1):
        for rival, batches in rivals.items():
            found = steps(batches())
            times[rival] += [found] if turn else []
    return {
        rival: {
            "ms / step": statistics.median(whole for whole, _ in found) / (STEPS - 1) * 1e3,
            "busy, %": 100 * statistics.median(computing / whole for whole, computing in found),
        }
        for rival, found in times.items()
    }


def steps(batches: Any) -> tuple[float, float]:
    """Return the seconds from the second batch on, and those of them with a batch at hand."""
    weights = jnp.eye(WIDTH)[None].repeat(3, axis=0)
    start, computing = 0.0, 0.0
    for k, rows in enumerate(batches):
        asked = time.perf_counter()
        weights, loss = step(weights, rows)
        loss.block_until_ready()
        done = time.perf_counter()
        start, computing = (start, computing + done - asked) if k else (done, 0.0)
    return time.perf_counter() - start, computing


if __name__ == "__main__":
    harness.main(run, __doc__, devices=(1, 2))
