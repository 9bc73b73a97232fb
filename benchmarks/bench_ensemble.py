"""Ensembles: a train step of all members beside every way to write it by hand, and whole epochs in one program.

The CNN is that of Flax's HOWTO on ensembling (batch 32, momentum SGD); members share the batch, which is on the devices
already. ``async loop`` is one compiled step called for each member on its device without waiting: the best there is by
hand for convolutions on CPU. The columns AR and AG count all-reduces and all-gathers of the compiled step; ``first``
is the first call, compiling included.
"""

import functools
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
from paraxis.testing import communication

TX = optax.sgd(0.1, momentum=0.9)


def run(devices: int, repeats: int) -> harness.Tables:
    x, y = np.random.default_rng(0).uniform(size=(32, 28, 28, 1)).astype(np.float32), np.arange(32) % 10
    cnn, mlp = _functions(ensemble_cnn_params, ensemble_cnn), _functions(ensemble_mlp_params, ensemble_mlp)
    sizes = (devices, 2 * devices, 4 * devices, 7 if devices == 2 else 5)
    tables = {f"CNN, {size} members": _steps(*cnn, devices, size, (x, y), repeats) for size in sizes}
    x, y = np.resize(x, (1280, 64)), np.arange(1280) % 10
    for size in (devices, 4 * devices):
        steps = _steps(*mlp, devices, size, (x[:32], y[:32]), 20 * repeats)
        tables[f"MLP, 64 × 32 × 10, {size} members"] = steps | _epochs(*mlp, size, x, y, repeats)
    ens = px.ensemble(ensemble_mlp_params, 2 * devices, 0, apply=ensemble_mlp)
    return {**tables, "prediction": {"ens.predict": _sent(ens.predict, x[:32])}}


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


def _steps(make: Any, step: Any, devices: int, size: int, batch: Any, repeats: int) -> dict[str, dict[str, Any]]:
    """One step of all members, awaited: by an ensemble, by a call for each member, and by one program by hand."""
    mesh, local = Mesh(jax.devices(), ("members",)), -(-size // devices)
    rows, whole = NamedSharding(mesh, P("members")), NamedSharding(mesh, P())
    batch, ens = jax.device_put(batch, whole), px.ensemble(make, size, 0)
    states = jax.jit(jax.vmap(make), out_shardings=rows)(jax.random.split(jax.random.key(0), local * devices))
    one: Any = lambda state, x, y: step(*state, x, y)  # noqa: E731

    def unrolled(states: Any, x: Any, y: Any) -> Any:
        results = [one(jax.tree.map(lambda a, i=i: a[i], states), x, y) for i in range(local)]
        return jax.tree.map(lambda *a: jnp.stack(a), *results)

    together, member_axes = jax.vmap(one, (0, None, None), spmd_axis_name="members"), (0, None, None)
    specs = {"in_specs": (P("members"), P(), P()), "out_specs": P("members"), "check_vma": False}
    programs: dict[str, Any] = {
        "unrolled in the shard": jax.jit(jax.shard_map(unrolled, mesh=mesh, **specs)),
        "vmap in the shard": jax.jit(jax.shard_map(jax.vmap(one, member_axes), mesh=mesh, **specs)),
        "sharded jit(vmap)": jax.jit(together, out_shardings=(rows, rows)),
    }
    if size == devices and hasattr(jax, "pmap"):
        programs = {"jax.pmap": jax.pmap(one, in_axes=(0, None, None))} | programs
    calls = {"px.ensemble": functools.partial(ens.train, step, *batch), "async loop": _loop(one, make, size, batch)}
    calls |= {name: functools.partial(program, states, *batch) for name, program in programs.items()}
    cells = {"px.ensemble": _sent(ens.train, step, *batch)}
    cells |= {name: _sent(program, states, *batch) for name, program in programs.items() if name != "jax.pmap"}
    found: dict[str, dict[str, Any]] = {name: {} for name in calls}
    for name, call in calls.items():
        start = time.perf_counter()
        jax.block_until_ready(call())
        found[name]["first, s"] = time.perf_counter() - start
    seconds = harness.in_turn(calls, repeats)
    for name in calls:
        times = {"ms / step": seconds[name] * 1e3, "time / ours": seconds[name] / seconds["px.ensemble"]}
        found[name] = times | found[name] | cells.get(name, {})
    return found


def _loop(one: Any, make: Any, size: int, batch: Any) -> Callable[[], Any]:
    """One compiled step, called for each member on its device without waiting."""
    there, fn = jax.devices(), jax.jit(one)
    batches = [jax.device_put(batch, device) for device in there]
    states = [jax.device_put(make(jax.random.key(i)), there[i % len(there)]) for i in range(size)]
    return lambda: [fn(state, *batches[i % len(there)]) for i, state in enumerate(states)]


def _epochs(make: Any, step: Any, size: int, x: Any, y: Any, repeats: int) -> dict[str, dict[str, Any]]:
    """Ten epochs of 40 steps: scanned, as ``fit`` chooses here; and by calls."""
    ens, batches = px.ensemble(make, size, 0), [(x[i : i + 32], y[i : i + 32]) for i in range(0, 1280, 32)]
    rivals = {
        "fit, scanned": lambda: ens.fit(step, (x, y), batch_size=32, epochs=10, progress=False) and ens.state,
        "train, step by step": lambda: [ens.train(step, *batch) for _ in range(10) for batch in batches],
    }
    found = harness.in_turn(rivals, repeats)
    return {name: {"ms / step": s / 400 * 1e3, "time / ours": s / found["fit, scanned"]} for name, s in found.items()}


def _sent(fn: Any, *args: Any) -> dict[str, Any]:
    count = communication(fn, *args).count
    return {"AR": count["all_reduce"], "AG": count["all_gather"]}


if __name__ == "__main__":
    harness.main(run, __doc__)
