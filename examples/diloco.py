"""DiLoCo (arXiv 2311.08105): many AdamW steps alone, then one step together.

Eight workers train one classifier of handwritten digits. Each takes ``H`` steps of AdamW on batches of its own; then
the average of what the workers have moved is taken for a gradient, on which the shared model takes a step of SGD with
Nesterov momentum. Compared with synchronous data parallel AdamW over the same number of steps, which averages
gradients at every step, it communicates ``H`` times less.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import _setting
import jax
import numpy as np
import optax

import paraxis as px
from paraxis.testing import communication

WORKERS, BATCH = 8, 32
inner = optax.adamw(3e-3, weight_decay=1e-2)
outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
Model = Any  # the weights: dict[str, jax.Array]


class State(NamedTuple):
    """``model`` and ``outer`` are shared; ``inner``, AdamW's moments, has one entry per worker and stays there."""

    model: Model
    outer: Any
    inner: Any


def start(model: Model, outer: optax.GradientTransformation = outer) -> State:
    copies = px.broadcast(inner.init(model), px.Axis("workers", WORKERS))
    return State(model, outer.init(model), copies)


def train_alone(model: Model, moments: Any, x: jax.Array, y: jax.Array) -> tuple[Model, Any]:
    """One worker: a step of AdamW for each of the batches ``x (H, rows, 64)``, ``y (H, rows)``."""

    def step(carry: Any, batch: Any) -> Any:
        model, moments = carry
        updates, moments = inner.update(jax.grad(_setting.cross_entropy)(model, *batch), moments, model)
        return (optax.apply_updates(model, updates), moments), None

    return jax.lax.scan(step, (model, moments), (x, y))[0]


@functools.partial(jax.jit, static_argnames="outer")
def diloco_round(state: State, x: Any, y: Any, outer: optax.GradientTransformation = outer) -> State:
    """``H`` steps apart and one together: ``x (workers, H, rows, 64)``."""

    @px.program(workers=WORKERS)
    def move(model: Model, moments: Any, x: Any, y: Any) -> tuple[Model, Any]:
        trained, moments = px.map_fn(train_alone, (px.broadcast(model), moments, x, y))
        return jax.tree.map(lambda old, new: old - new, model, px.reduce_mean(trained)), moments

    pseudo_gradient, moments = move(state.model, state.inner, x, y)
    updates, outer_state = outer.update(pseudo_gradient, state.outer, state.model)
    return State(optax.apply_updates(state.model, updates), outer_state, moments)


@px.program(workers=WORKERS)
def mean_loss(model: Model, x: Any, y: Any) -> jax.Array:
    return px.reduce_mean(px.map_fn(_setting.cross_entropy, (px.broadcast(model), x, y)))


@jax.jit
def synchronous_step(model: Model, moments: Any, x: Any, y: Any) -> tuple[Model, Any]:
    """Data parallel AdamW on ``x (workers, rows, 64)``."""
    updates, moments = inner.update(jax.grad(mean_loss)(model, x, y), moments, model)
    return optax.apply_updates(model, updates), moments


def batches(data: _setting.Digits, num_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """For each worker so many random batches of its own digits: ``x (workers, steps, rows, 64)``."""
    rows = np.random.default_rng(0).integers(data.x.shape[1], size=(WORKERS, num_steps, BATCH))
    worker = np.arange(WORKERS)[:, None, None]
    return data.x[worker, rows], data.y[worker, rows]


def run_synchronously(model: Model, x: Any, y: Any, data: _setting.Digits) -> tuple[Model, dict[int, float]]:
    """The model after all batches, and the training loss every ten steps."""
    moments, losses = inner.init(model), {}
    for i in range(x.shape[1]):
        model, moments = synchronous_step(model, moments, x[:, i], y[:, i])
        if (i + 1) % 10 == 0:
            losses[i + 1] = float(mean_loss(model, data.x, data.y))
    return model, losses


def run_diloco(model: Model, x: Any, y: Any, data: _setting.Digits, every: int) -> tuple[Model, dict[int, float]]:
    """The model after all batches, and the training loss after each round."""
    state, losses = start(model), {}
    for i in range(0, x.shape[1], every):
        state = diloco_round(state, x[:, i : i + every], y[:, i : i + every])
        losses[i + every] = float(mean_loss(state.model, data.x, data.y))
    return state.model, losses


def main(argv: Sequence[str] | None = None) -> None:
    chosen = _setting.options(__doc__, argv)
    num_steps = 20 if chosen.quick else 500
    data = _setting.digits(WORKERS, by_label=False)
    x, y = batches(data, num_steps)
    first = _setting.classifier(jax.random.key(0))

    curves, rows = {}, []

    def note(
        label: str, run: tuple[Model, dict[int, float]], num_rounds: int, fn: Callable[..., Any], *args: Any
    ) -> None:
        model, curves[label] = run
        held_out = float(_setting.cross_entropy(model, data.test_x, data.test_y))
        sent = communication(fn, *args).total_bytes * num_rounds
        rows.append((label, curves[label][num_steps], held_out, _setting.accuracy(model, data), sent))

    synchronous = run_synchronously(first, x, y, data)
    note("synchronous", synchronous, num_steps, synchronous_step, first, inner.init(first), x[:, 0], y[:, 0])
    for every in (5, 10) if chosen.quick else (10, 50, 100):
        run = run_diloco(first, x, y, data, every)
        note(f"DiLoCo, H = {every}", run, num_steps // every, diloco_round, start(first), x[:, :every], y[:, :every])
    print(f"{mean_loss}, {num_steps} steps each")
    _setting.table(["method", "loss", "held-out loss", "accuracy", "bytes sent per device"], rows)
    _setting.plot(chosen.plot, curves, "inner steps", "mean training loss", log=True)


if __name__ == "__main__":
    main()
