"""The same round of federated averaging in Flower's simulation: 100 of 400 ragged clients, an MLP, one epoch each.

Flower hands each client to one of Ray's processes, one per core, which here computes it with one compiled step of
JAX's, all batches of 20 rows. What it takes is said, not aimed at: Flower simulates networks of clients, which Paraxis
does not. Needs ``pip install "flwr[simulation]"``, best in an environment of its own, and takes some minutes.
"""

import functools
import statistics
import time
from typing import Any

import bench_cohorts
import harness
import jax
import jax.numpy as jnp
import numpy as np

import paraxis as px

CLIENTS, COHORT, BATCH, RATE = (getattr(bench_cohorts, name) for name in ("CLIENTS", "COHORT", "BATCH", "RATE"))
WARM = 4
"""Rounds in which processes start, compile and make their clients' data."""


def run(devices: int, repeats: int) -> None:
    del devices
    ours, params = bench_cohorts.by_stream(10), start()
    groups = px.Groups([client(number) for number in range(CLIENTS)], lengths=lengths())
    times = []
    for number in range(bench_cohorts.WARM + repeats):
        begin = time.perf_counter()
        jax.block_until_ready(ours(params, groups.sample(COHORT, seed=(0, number))))
        times.append(time.perf_counter() - begin)
    found = {"px.Stream(at_once=10)": statistics.median(times[bench_cohorts.WARM :])}
    try:
        theirs = by_flower(WARM + repeats)
    except ImportError as error:
        print(f"\nwithout Flower: {error}")
        return
    most = found["Flower's simulation"] = statistics.median(theirs[WARM:])
    print(f"\nA round\n  {'':34}{'ms':>10}{'Flower / it':>14}")
    for name, seconds in found.items():
        print(f"  {name:34}{seconds * 1e3:10.1f}{most / seconds:14.2f}", flush=True)


def start() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(784, 128)) / 28, rng.normal(size=(128, 10)) / 11
    return {"first": jnp.asarray(first, jnp.float32), "second": jnp.asarray(second, jnp.float32)}


@functools.cache
def lengths() -> np.ndarray:
    return np.clip(np.random.default_rng(0).lognormal(3.5, 0.8, CLIENTS).astype(int), 4, 400)


@functools.cache
def client(number: int) -> dict[str, np.ndarray]:
    rng, size = np.random.default_rng(number), int(lengths()[number])
    return {"x": rng.normal(size=(size, 784)).astype(np.float32), "y": rng.integers(0, 10, size).astype(np.int32)}


@functools.cache
def step() -> Any:
    def one(params: Any, x: Any, y: Any, mask: Any) -> Any:
        gradient = jax.grad(bench_cohorts.loss)(params, x, y, mask)
        return jax.tree.map(lambda p, g: p - RATE * g, params, gradient)

    return jax.jit(one)


def trained(params: Any, data: dict[str, np.ndarray]) -> Any:
    """Return a client's model after an epoch, its last batch filled up."""
    for begin in range(0, len(data["y"]), BATCH):
        x, y = data["x"][begin : begin + BATCH], data["y"][begin : begin + BATCH]
        short = BATCH - len(y)
        params = step()(params, np.pad(x, ((0, short), (0, 0))), np.pad(y, (0, short)), np.arange(BATCH) < len(y))
    return params


def by_flower(rounds: int) -> np.ndarray:
    """Return the seconds of rounds in Flower's simulation."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict  # pyright: ignore[reportMissingImports]
    from flwr.clientapp import ClientApp  # pyright: ignore[reportMissingImports]
    from flwr.serverapp import ServerApp  # pyright: ignore[reportMissingImports]
    from flwr.serverapp.strategy import FedAvg  # pyright: ignore[reportMissingImports]
    from flwr.simulation import run_simulation  # pyright: ignore[reportMissingImports]

    of_client, of_server, times = ClientApp(), ServerApp(), []

    @of_client.train()
    def train(message: Any, context: Any) -> Any:
        data = client(int(context.node_config["partition-id"]))
        names = ("first", "second")
        params = dict(zip(names, message.content["arrays"].to_numpy_ndarrays(), strict=True))
        new = trained(params, data)
        arrays = ArrayRecord([np.asarray(new[name]) for name in names])
        content = {"arrays": arrays, "metrics": MetricRecord({"num-examples": len(data["y"])})}
        return Message(content=RecordDict(content), reply_to=message)

    class Timed(FedAvg):
        def configure_train(self, *args: Any, **kwargs: Any) -> Any:
            times.append(time.perf_counter())
            return super().configure_train(*args, **kwargs)

    @of_server.main()
    def main(grid: Any, context: Any) -> None:
        arrays = ArrayRecord([np.asarray(x) for x in start().values()])
        strategy = Timed(fraction_train=COHORT / CLIENTS, fraction_evaluate=0.0, min_available_nodes=CLIENTS)
        strategy.start(grid, arrays, num_rounds=rounds)
        times.append(time.perf_counter())

    run_simulation(of_server, of_client, CLIENTS, backend_config={"client_resources": {"num_cpus": 1}})
    return np.diff(times)


if __name__ == "__main__":
    harness.main(run, __doc__, devices=(2,))
