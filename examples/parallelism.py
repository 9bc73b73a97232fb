"""Parallelism: ``px.Parallel`` on a module, a function and a train step; results, variables and BatchNorm.

Typical output, on eight simulated devices::

    difference, module:   0.0
    difference, function: 0.0
    loss: 1.735, after 100 steps on 8 devices 0.08953
    stack:  (8, 12, 4)
    first:  (12, 4)
    concat: (96, 4)
    mean:   (12, 4)
    before: [0 1 2 3 4] int32
    mean:   [0 1 2 3 4] int32
    first:  [0 1 2 3 4] int32
    sum:    [ 0  8 16 24 32] int32
    stack:  (8, 5) int32
    running variance, one device:   [1.19  1.065 1.138]
    running variance, per device:   [1.179 1.04  1.117]
    running variance, synchronised: [1.19  1.065 1.138]
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from compilation import difference, loss, network, quadrants
from flax import nnx

import paraxis as px
from paraxis.testing import simulate_devices


def split_batches() -> dict[str, Any]:
    """A batch of 96 rows on eight devices, twelve on each. Nothing is replicated by hand."""
    rngs = nnx.Rngs(0)
    net = nnx.Sequential(nnx.Linear(3, 4, rngs=rngs), jax.nn.relu)
    para_net = px.Parallel(net)
    para_func = px.Parallel(lambda net, x: net(x) + 1, net)

    x = jax.random.normal(jax.random.key(0), (96, 3))
    y, z = para_net(x), para_func(x)
    found = {"module": difference(net(x), y), "function": difference(net(x), z - 1)}
    print(f"difference, module:   {found['module']}")
    print(f"difference, function: {found['function']}")
    return found | {"devices of y": len(y.sharding.device_set)}


def train(gradient_loss: Any, opt: px.Optimizer, x: jax.Array, labels: jax.Array, lr: Any) -> jax.Array:
    """One step on every device, with gradients averaged over all of them; the average loss before it."""
    gradients, value = gradient_loss(x, labels)
    opt(lr, px.pmean(gradients, "device"))
    return px.pmean(value, "device")


def train_step(num_steps: int = 100) -> dict[str, Any]:
    """The train step of ``compilation.py`` with two means added, on 96 rows: the same losses, the same variables."""
    net = network(1)
    opt = px.Optimizer(net, optax.sgd, momentum=0.9)
    gradient_loss = px.GradValues(loss, net)
    train_para = px.Parallel(train, gradient_loss, opt, reduce="first")

    x, labels = (a[:96] for a in quadrants())
    losses = [float(train_para(x, labels, 0.2 if i < num_steps // 2 else 0.1)) for i in range(num_steps)]
    print(f"loss: {losses[0]:.4g}, after {num_steps} steps on {jax.device_count()} devices {losses[-1]:.4g}")
    return {"losses": losses, "trained": [np.asarray(v[...]) for v in px.variables(net)]}


def output_aggregation() -> dict[str, Any]:
    """What becomes of eight results ``(12, 4)``."""
    rngs = nnx.Rngs(0)
    net = nnx.Sequential(nnx.Linear(3, 4, rngs=rngs), jax.nn.relu)
    x = jax.random.normal(jax.random.key(0), (96, 3))
    results = {kind: px.Parallel(net, reduce=kind)(x) for kind in ("stack", "first", "concat", "mean")}
    for kind, y in results.items():
        print(f"{kind + ':':7} {y.shape}")
    return {"results": results, "plain": net(x)}


def write(cells: nnx.List) -> None:
    """Every device writes the same five numbers."""
    for cell in cells:
        cell[...] = jnp.arange(5)


def variable_rules() -> dict[str, Any]:
    """What becomes of a variable that eight devices have written: its own rule says. Integers stay integers."""
    rules = ("mean", "first", "sum", "stack")
    cells = nnx.List([nnx.Param(jnp.arange(5), sync=rule) for rule in rules])
    print(f"before: {cells[0][...]} {cells[0].dtype}")
    px.Parallel(write, cells)()
    found = {rule: np.asarray(cell[...]) for rule, cell in zip(rules, cells, strict=True)}
    for rule, x in found.items():
        print(f"{rule + ':':7} {x if x.ndim == 1 else x.shape} {x.dtype}")
    return {"rules": found}


def batch_norm() -> dict[str, Any]:
    """Statistics of each device's share, averaged afterwards; or those of the whole batch, as on one device."""
    x = 1.5 * jax.random.normal(jax.random.key(4), (96, 3))
    alone, shares, whole = (nnx.BatchNorm(3, momentum=0.9, rngs=nnx.Rngs(0)) for _ in range(3))
    alone(x)
    px.Parallel(shares)(x)
    px.Parallel(whole, sync_batch_norm=True)(x)
    found = {"one device": alone, "per device": shares, "synchronised": whole}
    for name, norm in found.items():
        print(f"running variance, {name + ':':13} {np.round(np.asarray(norm.var[...]), 3)}")
    return {"x": x, "statistics": {k: (np.asarray(n.mean[...]), np.asarray(n.var[...])) for k, n in found.items()}}


def main() -> dict[str, Any]:
    simulate_devices(8)
    return split_batches() | train_step() | output_aggregation() | variable_rules() | batch_norm()


if __name__ == "__main__":
    main()
