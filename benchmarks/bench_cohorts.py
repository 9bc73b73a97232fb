"""A round of federated averaging on ragged clients: 100 of 400, against FedJAX; at least 1.5 times as fast is wanted.

Clients have log-normal numbers of rows, median 33. A round trains an MLP, 784-128-10, for one epoch of batches of 20 on
each client of the cohort, and takes the mean weighted by rows; the clients' data is on the host, and bringing it to the
devices counts. Both rivals have the same cohorts and take turns; rounds in which a program was compiled are left out.
`px.Stream` lays clients of like length together; the mesh pads all of a cohort to the longest.

FedJAX's last release (0.0.17) is of 2023 and needs names that JAX has dropped: they are put back here. It is left out
where it is not installed: `pip install --no-deps fedjax==0.0.17 dm-haiku jmp`.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np

import paraxis as px

CLIENTS, COHORT, BATCH, RATE = 400, 100, 20, 0.1
Round = Callable[[Any, px.Groups], Any]


def run(devices: int, repeats: int) -> harness.Tables:
    del devices
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(3.5, 0.8, CLIENTS).astype(int), 4, 400)
    clients = [
        {"x": rng.normal(size=(n, 784)).astype(np.float32), "y": rng.integers(0, 10, n).astype(np.int32)}
        for n in lengths
    ]
    first, second = rng.normal(size=(784, 128)) / 28, rng.normal(size=(128, 10)) / 11
    params = {"first": jnp.asarray(first, jnp.float32), "second": jnp.asarray(second, jnp.float32)}
    groups = px.Groups(clients, lengths=lengths)
    rivals: dict[str, Round] = {
        "px.Stream(at_once=2)": by_stream(2),
        "px.Stream(at_once=5)": by_stream(5),
        "px.Stream(at_once=10)": by_stream(10),
        "mesh, all as long as the longest": by_mesh(),
        **by_fedjax(clients),
    }
    cohort = groups.sample(COHORT, seed=(0, 0))
    for leaf, theirs in zip(
        *map(jax.tree.leaves, (by_stream(10)(params, cohort), by_loop(params, cohort))), strict=True
    ):
        np.testing.assert_allclose(leaf, theirs, atol=1e-5)
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for number in range(repeats + WARM):
        cohort = groups.sample(COHORT, seed=(0, number))
        for name, one in rivals.items():
            start = time.perf_counter()
            jax.block_until_ready(one(params, cohort))
            times[name] += [time.perf_counter() - start] if number >= WARM else []
    best = min((statistics.median(t) for name, t in times.items() if name.startswith("FedJAX")), default=None)
    medians = {name: statistics.median(found) for name, found in times.items()}
    ratios = {} if best is None else {name: {"FedJAX / it": best / median} for name, median in medians.items()}
    return {"a round": {name: {"ms": 1e3 * median, **ratios.get(name, {})} for name, median in medians.items()}}


WARM = 8
"""Rounds in which the cohorts' shapes are compiled."""


def loss(params: Any, x: Any, y: Any, mask: Any) -> Any:
    scores = jax.nn.log_softmax(jnp.maximum(x @ params["first"], 0) @ params["second"])
    each = -jnp.take_along_axis(scores, y[:, None], 1)[:, 0]
    return jnp.sum(jnp.where(mask, each, 0.0)) / jnp.maximum(mask.sum(), 1)


@px.program({"clients": px.Axis("clients", COHORT, at_once=1)})
def round_of(params: Any, data: Any) -> Any:
    """The clients' models after an epoch each, their mean weighted by rows.

    A device takes its clients one by one, so the loop of each ends with its own rows and no padding is computed.
    """

    def local(params: Any, data: Any) -> Any:
        short = max(BATCH - data["x"].shape[0], 0)
        rows = jax.tree.map(
            lambda x: jnp.pad(x, [(0, short), *[(0, 0)] * (x.ndim - 1)]), (data["x"], data["y"], data.mask)
        )
        last = rows[0].shape[0] - BATCH

        def step(number: Any, params: Any) -> Any:
            start = jnp.minimum(number * BATCH, last)  # the last batch overlaps the one before, whose rows are masked
            x, y, mask = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, BATCH), rows)
            mask &= start + jnp.arange(BATCH) >= number * BATCH
            return jax.tree.map(lambda p, g: p - RATE * g, params, jax.grad(loss)(params, x, y, mask))

        return jax.lax.fori_loop(0, (data.count + BATCH - 1) // BATCH, step, params)

    return px.reduce_weighted_mean(px.map_fn(local, (px.broadcast(params), data)), data.count)


def by_stream(at_once: int) -> Round:
    return px.Stream(at_once=at_once).jit(round_of)


def by_mesh() -> Round:
    compiled = jax.jit(round_of)
    return lambda params, cohort: compiled(params, cohort.arrays())


def by_loop(params: Any, cohort: px.Groups) -> Any:
    """The same, client by client and batch by batch, without padding."""
    gradient = jax.jit(lambda p, x, y: jax.grad(loss)(p, x, y, jnp.ones(len(y), bool)))
    total, count = jax.tree.map(jnp.zeros_like, params), 0
    for client in cohort:
        local, number = params, len(client["y"])
        for start in range(0, number, BATCH):
            x, y = client["x"][start : start + BATCH], client["y"][start : start + BATCH]
            local = jax.tree.map(lambda p, g: p - RATE * g, local, gradient(local, x, y))
        total, count = jax.tree.map(lambda t, p, n=number: t + n * p, total, local), count + number
    return jax.tree.map(lambda t: t / count, total)


def by_fedjax(clients: Sequence[Any]) -> dict[str, Round]:
    """FedJAX's rounds, by its backends; none if it is not installed."""
    for name in ("tree_map", "tree_leaves"):
        if not hasattr(jax, name):
            setattr(jax, name, getattr(jax.tree_util, name))
    try:
        import fedjax  # pyright: ignore[reportMissingImports]
        from fedjax.algorithms import fed_avg  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        print(f"\nwithout FedJAX: {error}")
        return {}

    def gradient(params: Any, batch: Any, key: Any) -> Any:
        del key
        return jax.grad(loss)(params, batch["x"], batch["y"], jnp.ones(len(batch["y"]), bool))

    data = fedjax.InMemoryFederatedData({str(number): client for number, client in enumerate(clients)})
    hyper = fedjax.ShuffleRepeatBatchHParams(batch_size=BATCH, num_epochs=1, drop_remainder=False, seed=0)

    def made(backend: str) -> Round:
        fedjax.set_for_each_client_backend(backend)
        sgd = fedjax.optimizers.sgd
        algorithm = fed_avg.federated_averaging(gradient, sgd(RATE), sgd(1.0), hyper)

        def one(params: Any, cohort: px.Groups) -> Any:
            fedjax.set_for_each_client_backend(backend)
            keys = map(jax.random.PRNGKey, range(COHORT))
            given = [(str(i), data.get_client(str(i)), key) for i, key in zip(cohort.numbers, keys, strict=True)]
            return algorithm.apply(algorithm.init(params), given)[0].params

        return one

    return {"FedJAX, jit": made("jit")}  # its other backend, pmap, calls what JAX has removed


if __name__ == "__main__":
    harness.main(run, __doc__, devices=(2,))
