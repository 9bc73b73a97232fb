"""px.train_step beside the same step written by hand, px.fit beside a bare loop, and what checkpoints cost.

A step by hand is ``jax.jit`` of ``value_and_grad`` and the optimiser, its state donated, its batch laid over the
devices beforehand. Ours computes the norm of the gradient besides, and changes nothing if that is not finite; what this
costs is seen without it, and in a step by hand that does the same. The bare loop runs a ready step of about a
millisecond over batches that are there already, and waits at its end only; ``fit`` does the same and fetches each loss.
A checkpoint is saved in the background after every 50 steps of the CNN, and the last one is waited for. Times are those
of the fastest quarter of the turns.
"""

import collections
import functools
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from models import cnn_loss, cnn_params, cross_entropy, mlp_loss, mlp_params

import paraxis as px
from paraxis.reports import of_program

Loss = Callable[[Any, jax.Array, jax.Array], jax.Array]


def run(devices: int, repeats: int) -> harness.Tables:
    tables = {f"{name}, Adam": step_by_hand(*work, devices=devices, repeats=repeats) for name, work in works().items()}
    if devices == 1:
        tables["the loop, a step"] = loop_by_hand(repeats)
        tables["checkpoints, 64 rows, a step"] = checkpoints(64, repeats)
        tables["checkpoints, 256 rows, a step"] = checkpoints(256, max(1, repeats // 3))
    return tables


def works() -> dict[str, tuple[Loss, Any, jax.Array, jax.Array]]:
    """Name → loss, parameters and a batch."""
    key, draw = jax.random.key(0), np.random.default_rng(0)
    y = jnp.asarray(draw.integers(0, 10, 128), jnp.int32)
    images = jnp.asarray(draw.standard_normal((128, 28, 28, 1)), jnp.float32)
    tokens = jnp.asarray(draw.integers(0, 64, (16, 65)), jnp.int32)
    return {
        "MLP": (mlp_loss, mlp_params(key), images.reshape(128, 784), y),
        "CNN": (cnn_loss, cnn_params(key), images[:32], y[:32]),
        "transformer": (transformer_loss, transformer_params(key), tokens[:, :-1], tokens[:, 1:]),
    }


def transformer_params(key: jax.Array, width: int = 64, layers: int = 2) -> dict[str, jax.Array]:
    shapes = {"embedding": (64, width), "out": (width, 64)}
    for k in range(layers):
        shapes |= {f"qkv{k}": (width, 3 * width), f"proj{k}": (width, width)}
        shapes |= {f"up{k}": (width, 4 * width), f"down{k}": (4 * width, width)}
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(k, shape) / math.sqrt(shape[0])
        for (name, shape), k in zip(shapes.items(), keys, strict=True)
    }


def transformer_loss(params: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    """Causal, four heads, no biases."""
    h = params["embedding"][x]
    mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    for k in range(sum(name.startswith("qkv") for name in params)):
        q, key, value = (z.reshape(*z.shape[:2], 4, -1) for z in jnp.split(_normed(h) @ params[f"qkv{k}"], 3, -1))
        scores = jnp.einsum("bihd,bjhd->bhij", q, key) / math.sqrt(q.shape[-1])
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), -1)
        h = h + jnp.einsum("bhij,bjhd->bihd", weights, value).reshape(h.shape) @ params[f"proj{k}"]
        h = h + jax.nn.gelu(_normed(h) @ params[f"up{k}"]) @ params[f"down{k}"]
    return cross_entropy((h @ params["out"]).reshape(-1, 64), y.reshape(-1))


def _normed(h: jax.Array) -> jax.Array:
    return h * jax.lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6)


def step_by_hand(
    loss: Loss, params: Any, x: jax.Array, y: jax.Array, *, devices: int, repeats: int
) -> dict[str, dict[str, Any]]:
    mesh = Mesh(np.array(jax.devices()), ("batch",))
    rows, whole = NamedSharding(mesh, P("batch")), NamedSharding(mesh, P())
    traces: list[str] = []

    def ours(model: Any, batch: Any) -> jax.Array:
        traces.append("ours")
        return loss(model, batch["x"], batch["y"])

    tx = optax.adam(1e-3)
    place = px.Axis("batch", 1, mesh=mesh)
    batch = jax.device_put({"x": x, "y": y}, rows)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=whole)
    def by_hand(carry: Any, batch: Any) -> Any:
        params, opt_state = carry
        value, gradient = jax.value_and_grad(loss)(params, batch["x"], batch["y"])
        updates, opt_state = tx.update(gradient, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=whole)
    def guarded_by_hand(carry: Any, batch: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(carry[0], batch["x"], batch["y"])
        norm = optax.global_norm(gradient)

        def update(carry: Any) -> Any:
            updates, opt_state = tx.update(gradient, carry[1], carry[0])
            return optax.apply_updates(carry[0], updates), opt_state

        return jax.lax.cond(jnp.isfinite(value + norm), update, lambda carry: carry, carry), (value, norm)

    def state() -> Any:
        return px.TrainState.create(params, tx)

    def carry() -> Any:
        return jax.device_put(jax.tree.map(jnp.copy, (params, tx.init(params))), whole)

    rivals = {
        "px.train_step": [px.train_step(ours, axis=place), state()],
        "px.train_step, guard=False": [px.train_step(ours, axis=place, guard=False), state()],
        "by hand": [by_hand, carry()],
        "by hand, with norm and guard": [guarded_by_hand, carry()],
    }
    counts = {rival: _counted(fn.lower(first, batch).compile()) for rival, (fn, first) in rivals.items()}
    traces.clear()
    calls = _calls(lambda: _steps(rivals["by hand"], batch, 5) / 5)
    takers = {rival: functools.partial(_steps, pair, batch, calls) for rival, pair in rivals.items()}
    times = _in_turn(takers, 10 * repeats)
    assert not traces
    return {rival: {**row, **counts[rival]} for rival, row in _rows(times, calls).items()}


def _counted(compiled: Any) -> dict[str, Any]:
    cost = compiled.cost_analysis()
    sent = of_program(compiled.as_text())
    return {
        "MFLOP": cost["flops"] / 1e6,
        "MB moved": cost["bytes accessed"] / 1e6,
        "AR": sent.count["all_reduce"],
        "bytes sent": sent.total_bytes,
    }


def _steps(pair: list[Any], batch: Any, number: int) -> float:
    """Seconds of so many steps; the state is kept for the next turn."""
    step, carry = pair
    start = time.perf_counter()
    for _ in range(number):
        carry, _ = step(carry, batch)
    jax.block_until_ready(carry)
    pair[1] = carry
    return time.perf_counter() - start


def loop_by_hand(repeats: int) -> dict[str, dict[str, Any]]:
    """A step of about a millisecond."""
    key, draw = jax.random.key(0), np.random.default_rng(0)
    batches = [
        {"x": jnp.asarray(draw.standard_normal((64, 784)), jnp.float32), "y": jnp.asarray(draw.integers(0, 10, 64))}
        for _ in range(20)
    ]
    step = px.train_step(lambda model, batch: mlp_loss(model, batch["x"], batch["y"]))
    calls = 200

    def create() -> Any:
        return px.TrainState.create(mlp_params(key, hidden=256), _SGD)

    def bare() -> float:
        state, start = create(), time.perf_counter()
        for k in range(calls):
            state, _ = step(state, batches[k % 20])
        jax.block_until_ready(state)
        return time.perf_counter() - start

    def fetching() -> float:
        state, start, pending = create(), time.perf_counter(), collections.deque[Any]()
        for k in range(calls):
            state, metrics = step(state, batches[k % 20])
            pending.append(metrics["loss"].value)
            if len(pending) > 4:
                float(pending.popleft())
        jax.block_until_ready(state)
        return time.perf_counter() - start

    def fitted(**options: Any) -> float:
        chosen: Any = {"progress": False} | options
        state, start = create(), time.perf_counter()
        px.fit(state, step, batches, steps=calls, **chosen)
        return time.perf_counter() - start

    with tempfile.TemporaryDirectory() as place:
        rivals: dict[str, Callable[[], float]] = {
            "bare loop": bare,
            "bare loop, each loss fetched": fetching,
            "px.fit": fitted,
            "px.fit, progress shown": lambda: fitted(progress=True),
            "px.fit, log": lambda: fitted(log=f"{place}/log.jsonl"),
            "px.fit, log and TensorBoard": lambda: fitted(log=f"{place}/log.jsonl", tensorboard=f"{place}/board"),
        }
        return _rows(_in_turn(rivals, 6 * repeats), calls)


_SGD = optax.sgd(0.01)


def checkpoints(rows: int, repeats: int) -> dict[str, dict[str, Any]]:
    loss, params, _, _ = works()["CNN"]
    draw = np.random.default_rng(0)
    batch = {
        "x": jnp.asarray(draw.standard_normal((rows, 28, 28, 1)), jnp.float32),
        "y": jnp.asarray(draw.integers(0, 10, rows)),
    }
    step = px.train_step(lambda model, batch: loss(model, batch["x"], batch["y"]))
    calls = 100

    def fitted(every: int | None) -> float:
        with tempfile.TemporaryDirectory() as place:
            where = None if every is None else px.Checkpoints(Path(place) / "run", every=every)
            state, start = px.TrainState.create(params, _ADAM), time.perf_counter()
            px.fit(state, step, [batch], steps=calls, checkpoint=where, progress=False)
            return time.perf_counter() - start

    rivals: dict[str, Callable[[], float]] = {
        "px.fit, no checkpoint": lambda: fitted(None),
        "px.fit, one every 50 steps": lambda: fitted(50),
    }
    return _rows(_in_turn(rivals, 2 * repeats), calls)


_ADAM = optax.adam(1e-3)


def _calls(seconds: Callable[[], float]) -> int:
    """So many that they take a thirtieth of a second: turns are short, so that what else the machine does hits all."""
    seconds()
    return max(2, min(30, round(0.03 / seconds())))


def _in_turn(rivals: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Rivals take turns; the first round is not counted."""
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for turn in range(repeats + 1):
        order = list(rivals) if turn % 2 else list(rivals)[::-1]
        for name in order:
            found = rivals[name]()
            times[name] += [found] if turn else []
    return times


def _rows(times: dict[str, list[float]], calls: int) -> dict[str, dict[str, Any]]:
    """Of the fastest quarter of the turns: in the others, the machine did something else as well."""
    base = "by hand" if "by hand" in times else next(iter(times))
    means = {name: statistics.mean(sorted(found)[: max(1, len(found) // 4)]) for name, found in times.items()}
    return {name: {"ms": mean / calls * 1e3, f"it / {base}": mean / means[base]} for name, mean in means.items()}


if __name__ == "__main__":
    harness.main(run, __doc__, devices=(1, 8))
