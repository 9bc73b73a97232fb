"""px.train_step beside the same step by hand, px.fit beside a bare loop, and what checkpoints cost.

A step by hand is ``jax.jit`` of ``value_and_grad`` and Adam, its state donated, its batch laid over the devices. Ours
computes the norm of the gradient besides, and changes nothing if that is not finite: ``guard=False`` leaves this out,
and one step by hand does the same. The bare loop waits at its end only; ``fit`` does so too, and fetches each loss.
"""

import functools
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from models import cnn_loss, cnn_params, mlp_loss, mlp_params

import paraxis as px
from paraxis.testing import communication

ADAM, STEPS = optax.adam(1e-3), 100


def run(devices: int, repeats: int) -> harness.Tables:
    key, draw = jax.random.key(0), np.random.default_rng(0)
    images, y = draw.standard_normal((128, 28, 28, 1)).astype(np.float32), draw.integers(0, 10, 128).astype(np.int32)
    mlp = mlp_loss, mlp_params(key), {"x": images.reshape(128, 784), "y": y}
    cnn = cnn_loss, cnn_params(key), {"x": images[:32], "y": y[:32]}
    tables = {"MLP, Adam": step_by_hand(*mlp, repeats), "CNN, Adam": step_by_hand(*cnn, repeats)}
    if devices == 1:
        tables["the loop, a step"] = loop_by_hand(*mlp, repeats)
    return tables


def rows(times: dict[str, float], base: str) -> dict[str, dict[str, Any]]:
    return {name: {"ms": 1e3 * s, f"it / {base}": s / times[base]} for name, s in times.items()}


def step_by_hand(loss: Callable[..., Any], params: Any, batch: Any, repeats: int) -> dict[str, dict[str, Any]]:
    mesh = Mesh(np.array(jax.devices()), ("batch",))
    whole, axis = NamedSharding(mesh, P()), px.Axis("batch", 1, mesh=mesh)
    batch = jax.device_put(batch, NamedSharding(mesh, P("batch")))

    def ours(model: Any, batch: Any) -> jax.Array:
        return loss(model, batch["x"], batch["y"])

    def by_hand(guard: bool, carry: Any, batch: Any) -> Any:
        value, gradient = jax.value_and_grad(ours)(carry[0], batch)

        def update(carry: Any) -> Any:
            updates, opt_state = ADAM.update(gradient, carry[1], carry[0])
            return optax.apply_updates(carry[0], updates), opt_state

        if not guard:
            return update(carry), value
        norm = optax.global_norm(gradient)
        return jax.lax.cond(jnp.isfinite(value + norm), update, lambda carry: carry, carry), (value, norm)

    def jitted(guard: bool) -> Any:
        return jax.jit(functools.partial(by_hand, guard), donate_argnums=0, out_shardings=whole)

    def carry() -> Any:
        return jax.device_put(jax.tree.map(jnp.copy, (params, ADAM.init(params))), whole)

    rivals = {
        "px.train_step": [px.train_step(ours, axis=axis), px.TrainState.create(params, ADAM)],
        "px.train_step, guard=False": [px.train_step(ours, axis=axis, guard=False), px.TrainState.create(params, ADAM)],
        "by hand": [jitted(False), carry()],
        "by hand, with norm and guard": [jitted(True), carry()],
    }
    sent = {name: communication(step, state, batch) for name, (step, state) in rivals.items()}

    def call(pair: list[Any]) -> Any:
        pair[1], found = pair[0](pair[1], batch)
        return pair[1], found

    calls = {name: functools.partial(call, pair) for name, pair in rivals.items()}
    found = rows(harness.in_turn(calls, 10 * repeats, calls=5), "by hand")
    return {k: row | {"AR": sent[k].count["all_reduce"], "bytes sent": sent[k].total_bytes} for k, row in found.items()}


def loop_by_hand(loss: Callable[..., Any], params: Any, batch: Any, repeats: int) -> dict[str, dict[str, Any]]:
    step, data = px.train_step(lambda model, batch: loss(model, batch["x"], batch["y"])), [jax.device_put(batch)]

    def bare() -> Any:
        state = px.TrainState.create(params, ADAM)
        for _ in range(STEPS):
            state, _ = step(state, data[0])
        return state

    with tempfile.TemporaryDirectory() as folder:
        numbers = itertools.count()

        def fit(checkpoint: bool = False, **options: Any) -> Any:
            if checkpoint:
                options["checkpoint"] = px.Checkpoints(Path(folder, str(next(numbers))), every=50, keep=1)
            return px.fit(px.TrainState.create(params, ADAM), step, data, steps=STEPS, progress=False, **options).state

        rivals: dict[str, Callable[[], Any]] = {
            "bare loop": bare,
            "px.fit": fit,
            "px.fit, log": functools.partial(fit, log=f"{folder}/log.jsonl"),
            "px.fit, a checkpoint every 50 steps": functools.partial(fit, checkpoint=True),
        }
        times = harness.in_turn(rivals, repeats)
    return rows({name: seconds / STEPS for name, seconds in times.items()}, "bare loop")


if __name__ == "__main__":
    harness.main(run, __doc__, devices=(1, 8))
