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
WARM = 8  # rounds in which the cohorts' shapes are compiled
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
    groups, on_mesh = px.Groups(clients, lengths=lengths), jax.jit(round_of)
    rivals: dict[str, Round] = {f"px.Stream(at_once={k})": px.Stream(at_once=k).jit(round_of) for k in (2, 5, 10)}
    rivals["mesh, all as long as the longest"] = lambda params, cohort: on_mesh(params, cohort.arrays())
    rivals |= by_fedjax(clients)
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for number in range(repeats + WARM):
        cohort, results = groups.sample(COHORT, seed=(0, number)), list[Any]()
        for name, one in rivals.items():
            start = time.perf_counter()
            results.append(jax.block_until_ready(one(params, cohort)))
            times[name] += [time.perf_counter() - start] if number >= WARM else []
        jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=1e-5), results[0], results[3])
    medians = {name: statistics.median(found) for name, found in times.items()}
    best = min((median for name, median in medians.items() if name.startswith("FedJAX")), default=None)
    ratios = {} if best is None else {name: {"FedJAX / it": best / median} for name, median in medians.items()}
    return {"a round": {name: {"ms": 1e3 * median, **ratios.get(name, {})} for name, median in medians.items()}}


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


def by_fedjax(clients: Sequence[Any]) -> dict[str, Round]:
    """FedJAX's rounds; none if it is not installed. Its other backend, pmap, calls what JAX has removed."""
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
    fedjax.set_for_each_client_backend("jit")
    sgd = fedjax.optimizers.sgd
    algorithm = fed_avg.federated_averaging(gradient, sgd(RATE), sgd(1.0), hyper)

    def one(params: Any, cohort: px.Groups) -> Any:
        keys = map(jax.random.PRNGKey, range(COHORT))
        given = [(str(i), data.get_client(str(i)), key) for i, key in zip(cohort.numbers, keys, strict=True)]
        return algorithm.apply(algorithm.init(params), given)[0].params

    return {"FedJAX, jit": one}


if __name__ == "__main__":
    harness.main(run, __doc__, devices=(2,))
