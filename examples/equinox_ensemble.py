"""An ensemble of Equinox models made by ``eqx.filter_vmap``, trained on all devices by ``px.map_fn``.

The stacked models are those of Equinox's documentation; any number of them, each with its own batches. The same step
under ``eqx.filter_vmap`` on one device gives the same models.
"""

from collections.abc import Sequence
from typing import Any

import _setting
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import paraxis as px

optimizer = optax.adam(1e-2)


@eqx.filter_vmap
def make(key: jax.Array) -> tuple[eqx.nn.MLP, Any]:
    net = eqx.nn.MLP(1, "scalar", 32, 2, key=key)
    return net, optimizer.init(eqx.filter(net, eqx.is_inexact_array))


def train(net: eqx.nn.MLP, moments: Any, key: jax.Array, x: Any, y: Any, steps: int) -> Any:
    """One model after so many steps of Adam, each on 32 rows of its own choice."""
    x, y = jnp.asarray(x), jnp.asarray(y)
    arrays, static = eqx.partition((net, moments), eqx.is_array)

    def step(arrays: Any, key: jax.Array) -> Any:
        net, moments = eqx.combine(arrays, static)
        rows = jax.random.randint(key, (32,), 0, len(x))
        value, slope = eqx.filter_value_and_grad(lambda net: jnp.mean((jax.vmap(net)(x[rows]) - y[rows]) ** 2))(net)
        updates, moments = optimizer.update(slope, moments)
        return eqx.filter((eqx.apply_updates(net, updates), moments), eqx.is_array), value

    arrays, losses = jax.lax.scan(step, arrays, jax.random.split(key, steps))
    return eqx.combine(arrays, static)[0], losses


def main(argv: Sequence[str] | None = None) -> None:
    chosen = _setting.options(__doc__, argv, members=(20, "number of models"))
    steps = 20 if chosen.quick else 1000
    axis = px.Axis("members", chosen.members)
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, (200, 1)).astype("float32")
    y = (np.sin(3 * x[:, 0]) + 0.1 * rng.normal(size=200)).astype("float32")
    keys = px.keys(jax.random.key(0), axis)
    nets, moments = make(keys)

    @eqx.filter_jit
    def on_all(nets: Any, moments: Any) -> Any:
        return px.map_fn(lambda net, own, key: train(net, own, key, x, y, steps), (nets, moments, keys), axis)

    @eqx.filter_jit
    def on_one(nets: Any, moments: Any) -> Any:
        return eqx.filter_vmap(lambda net, own, key: train(net, own, key, x, y, steps))(nets, moments, keys)

    trained, losses = on_all(nets, moments)
    other = on_one(nets, moments)[0]
    pair = (jax.tree.leaves(eqx.filter(nets, eqx.is_array)) for nets in (trained, other))
    apart = max(float(jnp.abs(a - b).max()) for a, b in zip(*pair, strict=True))
    grid = jnp.linspace(-4, 4, 9)[:, None]
    answers = px.map_fn(lambda net: jax.vmap(net)(grid), trained, axis)
    print(f"{chosen.members} models on {jax.device_count()} devices; from filter_vmap's they differ by {apart:.1g}")
    columns = zip(grid[:, 0].tolist(), answers.mean(0).tolist(), answers.std(0).tolist(), strict=True)
    _setting.table(["x (data: -2 to 2)", "mean", "spread of the models"], list(columns))
    curve = dict(enumerate(np.asarray(losses).mean(0).tolist()))
    _setting.plot(chosen.plot, {"mean loss of the members": curve}, "step", "loss", log=True)


if __name__ == "__main__":
    main()
