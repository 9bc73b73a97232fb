"""DiLoCo of workers that are split over devices themselves: a mesh of ``replica × fsdp``, whole and streaming.

Two workers, each on four devices, over which its parameters and the moments of its AdamW stay split. After ``H`` steps
alone, the average of their moves is a step of SGD with Nesterov momentum. The streaming variant (arXiv 2501.18512)
exchanges one half of the weights after ``H / 2`` steps and the other half after ``H``: as many bytes, in two parts of
half the size. The table has what a device sends along each axis of the mesh in one round, on Auto and Explicit axes.
"""

import functools
from collections.abc import Sequence
from typing import Any

import _setting
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import paraxis as px

WORKERS, BATCH, WIDTH = 2, 32, 64
inner, outer = optax.adamw(3e-3), optax.sgd(0.7, momentum=0.9, nesterov=True)


def loss(model: Any, x: Any, y: Any) -> jax.Array:
    """Fully sharded: rows lie over ``fsdp``, and each weight is gathered where it is used."""
    explicit = (
        not jax.sharding.get_abstract_mesh().empty and AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types
    )
    dot = functools.partial(jnp.dot, out_sharding=P("fsdp", None)) if explicit else jnp.dot
    for w in model[:-1]:
        x = jax.nn.relu(dot(x, w))
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(dot(x, model[-1])) * jax.nn.one_hot(y, 10), axis=-1))


def alone(model: Any, moments: Any, x: jax.Array, y: jax.Array) -> Any:
    """One worker's steps, one for each of the batches ``x (steps, rows, 64)``."""
    for i in range(x.shape[0]):
        updates, moments = inner.update(jax.grad(loss)(model, x[i], y[i]), moments, model)
        model = optax.apply_updates(model, updates)
    return model, moments


@functools.partial(jax.jit, static_argnames="parts")
def round_of(state: Any, x: jax.Array, y: jax.Array, parts: int) -> Any:
    """Steps alone, after each share of which one part of the weights is exchanged: ``x (workers, H, rows, 64)``."""
    axis = px.Axis("replica", WORKERS)
    model, momentum, own, moments = state
    model, momentum, own = list(model), list(momentum), list(own)
    for part, (xs, ys) in enumerate(zip(jnp.split(x, parts, 1), jnp.split(y, parts, 1), strict=True)):
        own, moments = px.map_fn(alone, (own, moments, xs, ys), axis)
        for i in range(part, len(model), parts):
            gradient = model[i] - px.reduce_mean(own[i], axis)
            update, momentum[i] = outer.update(gradient, momentum[i], model[i])
            model[i] = optax.apply_updates(model[i], update)
            own[i] = px.broadcast(model[i], axis)
    return model, momentum, own, moments


def start(width: int = WIDTH) -> Any:
    keys = jax.random.split(jax.random.key(0), 4)
    sizes = [(width, width)] * 3 + [(width, 10)]
    model = [jax.random.normal(k, s) / width**0.5 for k, s in zip(keys, sizes, strict=True)]
    each = jax.tree.map(lambda x: jnp.stack([x] * WORKERS), (model, inner.init(model)))
    return model, [outer.init(w) for w in model], *each


def split(state: Any, mesh: Mesh) -> Any:
    """Where each array of a state lies: weights and moments over ``fsdp``, a worker's own over ``replica`` as well."""
    lies = lambda x, *leading: NamedSharding(mesh, P(*leading, *("fsdp",) * (x.ndim - len(leading) > 0)))  # noqa: E731
    whole, each = state[:2], state[2:]
    return *jax.tree.map(lies, whole), *jax.tree.map(lambda x: lies(x, "replica"), each)


def pod() -> Any:
    """Arguments of a round on a pod, of shapes: ``paraxis explain … --arguments pod --on v5e:16x16``."""
    mesh = jax.make_mesh((WORKERS, jax.device_count() // WORKERS), ("replica", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    jax.set_mesh(mesh)
    state = jax.eval_shape(functools.partial(start, 8192))
    struct = lambda x, side: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=side)  # noqa: E731
    rows = NamedSharding(mesh, P("replica", None, "fsdp"))
    x = jax.ShapeDtypeStruct((WORKERS, 4, 4096, 8192), jnp.float32, sharding=rows)
    y = jax.ShapeDtypeStruct((WORKERS, 4, 4096), jnp.int32, sharding=rows)
    return jax.tree.map(struct, state, split(state, mesh)), x, y, 1


def main(argv: Sequence[str] | None = None) -> None:
    chosen = _setting.options(__doc__, argv, rounds=(40, "number of rounds"))
    rounds, every = (2, 4) if chosen.quick else (chosen.rounds, 10)
    data = _setting.digits(WORKERS, by_label=False)
    print(f"DiLoCo with {WORKERS} workers on {jax.device_count()} devices, {rounds} rounds of {every} steps")
    rows, curves = [], {}
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((WORKERS, jax.device_count() // WORKERS), ("replica", "fsdp"), axis_types=(kind,) * 2)
        for name, parts in (("DiLoCo", 1), ("streaming", 2)):
            with jax.set_mesh(mesh):
                state, losses, rng = start(), {}, np.random.default_rng(0)
                state = jax.device_put(state, split(state, mesh))
                report: Any = None
                for i in range(rounds):
                    taken = rng.integers(data.x.shape[1], size=(WORKERS, every, BATCH))
                    worker = np.arange(WORKERS)[:, None, None]
                    lying = NamedSharding(mesh, P("replica", None, "fsdp"))
                    x, y = jax.device_put((data.x[worker, taken], data.y[worker, taken]), lying)
                    report = report or px.explain(round_of)(state, x, y, parts)
                    state = round_of(state, x, y, parts)
                    losses[i] = float(loss(jax.device_get(state[0]), data.test_x, data.test_y))
            sent = [sum(c.total_bytes for c in report.collectives if along in c.axes) for along in mesh.axis_names]
            rows.append((f"{name}, {kind.name}", losses[rounds - 1], *sent))
            curves[rows[-1][0]] = losses
    _setting.table(["method", "held-out loss", "bytes along replica", "along fsdp"], rows)
    _setting.plot(chosen.plot, curves, "rounds", "held-out loss")


if __name__ == "__main__":
    main()
