"""Ensembles: a train step of all members beside every way to write it by hand, and whole epochs in one program.

The CNN is that of Flax's HOWTO on ensembling (batch 32, momentum SGD); members share the batch, which is on the devices
already. ``async loop`` is one compiled step called for each member on its device without waiting: the best there is by
hand for convolutions on CPU. The columns AR and AG count all-reduces and all-gathers of the compiled step; ``first``
is the first call, compiling included, where the rival was not compiled before.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from models import ensemble_cnn, ensemble_cnn_params, ensemble_mlp, ensemble_mlp_params

import paraxis as px
from paraxis.reports import of_program

TX = optax.sgd(0.1, momentum=0.9)
Step = Callable[[], Any]


def run(devices: int, repeats: int) -> harness.Tables:
    x, y = _batch((32, 28, 28, 1))
    tables = {
        f"CNN, {size} members": _train(ensemble_cnn_params, ensemble_cnn, devices, size, x, y, repeats)
        for size in (devices, 2 * devices, 4 * devices, 7 if devices == 2 else 5)
    }
    x, y = _batch((32, 64))
    for size in (devices, 4 * devices):
        steps = _train(ensemble_mlp_params, ensemble_mlp, devices, size, x, y, 20 * repeats)
        tables[f"MLP, 64 × 32 × 10, {size} members"] = steps | _epochs(devices, size, repeats)
    return {**tables, "prediction": _prediction(devices)}


def _batch(shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    return draw.uniform(size=shape).astype(np.float32), draw.integers(0, 10, shape[0]).astype(np.int32)


@functools.cache
def _functions(params: Callable[..., Any], logits: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def make(key: jax.Array) -> Any:
        made = params(key)
        return made, TX.init(made)

    def step(params: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y).mean()

        value, gradient = jax.value_and_grad(loss)(params)
        updates, opt_state = TX.update(gradient, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return make, step


def _train(
    params: Any, logits: Any, devices: int, size: int, x: np.ndarray, y: np.ndarray, repeats: int
) -> dict[str, dict[str, Any]]:
    """One step of all members, awaited."""
    make, step = _functions(params, logits)
    rivals = _rivals(make, step, devices, size, x, y)
    setup, counts = {}, {}
    for rival, (call, text) in rivals.items():
        start = time.perf_counter()
        jax.block_until_ready(call())
        setup[rival] = time.perf_counter() - start
        counts[rival] = of_program(text()).count
    times: dict[str, list[float]] = {rival: [] for rival in rivals}
    for turn in range(repeats):  # each follows each: what one leaves in the caches must not favour another
        for rival in np.random.default_rng(turn).permutation(list(rivals)):
            start = time.perf_counter()
            jax.block_until_ready(rivals[rival][0]())
            times[rival].append(time.perf_counter() - start)
    ours = statistics.median(times["px.ensemble"])
    return {
        rival: {
            "ms / step": statistics.median(found) * 1e3,
            "first, s": setup[rival],
            "AR": counts[rival]["all_reduce"],
            "AG": counts[rival]["all_gather"],
            "time / ours": statistics.median(found) / ours,
        }
        for rival, found in times.items()
    }


def _rivals(make: Any, step: Any, devices: int, size: int, x: Any, y: Any) -> dict[str, tuple[Step, Callable[[], str]]]:
    """Each rival: a call that does one step of all members, and the text of its compiled program."""
    there = jax.devices()
    mesh = Mesh(np.array(there), ("members",))
    rows, whole = NamedSharding(mesh, P("members")), NamedSharding(mesh, P())
    batch = jax.device_put((x, y), whole)
    local = -(-size // devices)
    padded = local * devices
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), jnp.arange(padded))
    states = jax.jit(jax.vmap(make))(keys)
    one: Any = lambda state, x, y: step(*state, x, y)  # noqa: E731

    def loop(fn: Any, state: Any, args: Any) -> tuple[Step, Callable[[], str]]:
        box = [jax.tree.map(jnp.copy, state)]  # it is given away, and on one device others have the same arrays
        text = fn.lower(state, *args).compile().as_text

        def call() -> Any:
            box[0], out = fn(box[0], *args)
            return out

        return call, text

    ens = px.ensemble(make, size, 0)

    found: dict[str, Any] = {
        "px.ensemble": (lambda: ens.train(step, *batch), lambda: ens.lower(step, *batch).compile().as_text())
    }
    found["async loop"] = _async_loop(one, states, size, local, x, y)
    if size == devices and hasattr(jax, "pmap"):
        parallel = jax.pmap(one, donate_argnums=0)
        copies = jax.pmap(lambda _, x, y: (x, y), in_axes=(0, None, None))(jnp.arange(devices), x, y)
        found["jax.pmap"] = loop(parallel, jax.pmap(make)(keys), copies)
    shards = functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P("members"), P(), P()), out_specs=P("members"), check_vma=False
    )

    def unrolled(states: Any, x: Any, y: Any) -> Any:
        each = jax.jit(one)
        results = [each(jax.tree.map(lambda a, i=i: a[i], states), x, y) for i in range(local)]
        return jax.tree.map(lambda *a: jnp.stack(a), *results)

    bodies = {"unrolled in the shard": unrolled, "vmap in the shard": jax.vmap(one, (0, None, None))}
    for name, body in bodies.items():
        fn: Any = jax.jit(shards(body), donate_argnums=0)
        found[name] = loop(fn, jax.device_put(states, rows), batch)
    sharded: Any = jax.jit(
        jax.vmap(one, (0, None, None), spmd_axis_name="members"), out_shardings=(rows, rows), donate_argnums=0
    )
    found["sharded jit(vmap)"] = loop(sharded, jax.device_put(states, rows), batch)
    return found


def _async_loop(one: Any, states: Any, size: int, local: int, x: Any, y: Any) -> tuple[Step, Callable[[], str]]:
    there = jax.devices()
    fn: Any = jax.jit(one, donate_argnums=0)
    box = [jax.device_put(jax.tree.map(lambda a, i=i: a[i], states), there[i // local]) for i in range(size)]
    batches = [jax.device_put((x, y), device) for device in there]
    order = [d * local + turn for turn in range(local) for d in range(len(there)) if d * local + turn < size]

    def call() -> Any:
        outs = []
        for i in order:
            box[i], out = fn(box[i], *batches[i // local])
            outs.append(out)
        return outs

    return call, lambda: fn.lower(box[0], *batches[0]).compile().as_text()


def _epochs(devices: int, size: int, repeats: int) -> dict[str, dict[str, Any]]:
    """Ten epochs of 40 steps: scanned, as ``fit`` chooses here; and by calls, awaited once per epoch."""
    make, step = _functions(ensemble_mlp_params, ensemble_mlp)
    x, y = _batch((1280, 64))
    scanned, stepped = px.ensemble(make, size, 0), px.ensemble(make, size, 0)
    local = -(-size // devices)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), jnp.arange(local * devices))
    one: Any = lambda state, x, y: step(*state, x, y)  # noqa: E731
    call_all, _ = _async_loop(one, jax.jit(jax.vmap(make))(keys), size, local, x[:32], y[:32])
    batches = [(x[i : i + 32], y[i : i + 32]) for i in range(0, 1280, 32)]

    def fit() -> None:
        scanned.fit(step, (x, y), batch_size=32, epochs=10, key=0)

    def by_step() -> None:
        for _ in range(10):
            jax.block_until_ready([stepped.train(step, *batch) for batch in batches])

    def async_loop() -> None:
        for _ in range(10):
            jax.block_until_ready([call_all() for _ in range(40)])

    rivals = {"fit, scanned": fit, "train, step by step": by_step, "async loop, one batch": async_loop}
    found = harness.in_turn(rivals, repeats)
    return {
        name: {"ms / step": seconds / 400 * 1e3, "time / ours": seconds / found["fit, scanned"]}
        for name, seconds in found.items()
    }


def _prediction(devices: int) -> dict[str, dict[str, Any]]:
    """What an averaged prediction communicates."""
    ens = px.ensemble(ensemble_mlp_params, 2 * devices, 0, apply=ensemble_mlp)
    count = px.explain(ens.predict)(jnp.ones((32, 64))).communication.count
    return {"ens.predict": {"AR": count["all_reduce"], "AG": count["all_gather"]}}


if __name__ == "__main__":
    harness.main(run, __doc__)
