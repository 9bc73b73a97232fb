"""Differentially private training: a gradient per example, clipped, summed, with noise.

No single digit can move the model by more than a fixed amount: the gradient of each example in a batch is clipped to a
norm, and Gaussian noise in proportion to that norm is added to their sum (Abadi et al. 2016, arXiv 1607.00133). What
privacy that buys in total is for an accountant to say, and not computed here. ``px.Vectorize`` gives the gradients of
single examples, ``px.Jit`` compiles the step, and ``px.Parallel`` splits the batch over the devices: the sum then needs
one ``psum``, and every device adds the same noise, since it comes from one key.

Typical output, ``--devices 8``::

    noise  held-out accuracy  largest norm  largest clipped norm
        0             0.9667          27.3                     1
        1             0.9639         32.66                     1
        4             0.8528         64.24                     1
    largest difference between one device and all: 6.0e-08 after 10 steps on 8 devices
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import _setting
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import paraxis as px

BATCH = 240
CLIP = 1.0
RATE = 0.5


def classifier(seed: int = 0) -> nnx.Sequential:
    """A network with one hidden layer."""
    rngs = nnx.Rngs(seed)
    return nnx.Sequential(nnx.Linear(64, 32, rngs=rngs), jax.nn.relu, nnx.Linear(32, 10, rngs=rngs))


def loss(net: nnx.Sequential, x: jax.Array, label: jax.Array) -> jax.Array:
    """One digit's loss."""
    return optax.softmax_cross_entropy_with_integer_labels(net(x), label)


def length(gradient: Any) -> jax.Array:
    """The Euclidean norm of all numbers of a gradient together."""
    return jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradient)))


def clipped_gradient(net: nnx.Sequential, x: jax.Array, label: jax.Array) -> tuple[Any, jax.Array, jax.Array]:
    """One digit's gradient, scaled down to the norm ``CLIP`` if it is longer; its norm before and after."""
    gradient = nnx.grad(loss)(net, x, label)
    norm = length(gradient)
    gradient = jax.tree.map(lambda g: g * jnp.minimum(1.0, CLIP / norm), gradient)
    return gradient, norm, length(gradient)


def with_noise(key: jax.Array, tree: Any, deviation: Any) -> Any:
    """A tree with independent Gaussian noise added to every number."""
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(key, len(leaves))
    noisy = [leaf + deviation * jax.random.normal(k, leaf.shape) for k, leaf in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, noisy)


def step(
    per_example: Any, opt: px.Optimizer, x: jax.Array, labels: jax.Array, key: jax.Array, noise: Any, over: str = ""
) -> tuple[jax.Array, jax.Array]:
    """One step on a batch, or on one device's share of it (``over``); every example's norm before and after."""
    gradients, norms, clipped = per_example(x, labels)
    total = jax.tree.map(lambda g: g.sum(0), gradients)
    if over:
        total = px.psum(total, over)
    opt(RATE, jax.tree.map(lambda g: g / BATCH, with_noise(key, total, noise * CLIP)))
    return norms, clipped


def train(
    num_steps: int,
    noise: float,
    x: np.ndarray,
    labels: np.ndarray,
    *,
    parallel: bool = False,
    watch: Callable[[int, nnx.Sequential], None] = lambda num_steps, net: None,
) -> tuple[nnx.Sequential, float, float]:
    """A model after so many steps on random batches, and the largest norms before and after clipping.

    ``watch`` is called after every tenth step.
    """
    net = classifier()
    opt = px.Optimizer(net, optax.sgd, momentum=0.9)
    per_example = px.Vectorize(clipped_gradient, net)
    take = px.Jit(step, per_example, opt)
    if parallel:
        in_parallel = functools.partial(step, over="device")
        take = px.Parallel(in_parallel, per_example, opt, batch_axis=(0, 0, None, None))  # one key: one noise for all
    batches, key = np.random.default_rng(0), jax.random.key(1)
    largest = np.zeros(2)
    for i in range(num_steps):
        rows = batches.choice(len(x), BATCH, replace=False)
        norms = take(x[rows], labels[rows], jax.random.fold_in(key, i), noise)
        largest = np.maximum(largest, np.max(np.stack([*map(np.asarray, norms)]), axis=1))
        if (i + 1) % 10 == 0:
            watch(i + 1, net)
    return net, float(largest[0]), float(largest[1])


def difference(num_steps: int, x: np.ndarray, labels: np.ndarray) -> float:
    """How far one device and all of them are apart after so many steps with noise."""
    alone, together = (train(num_steps, 1.0, x, labels, parallel=p)[0] for p in (False, True))
    pairs = zip(px.variables(alone), px.variables(together), strict=True)
    return max(float(np.abs(np.asarray(a[...]) - np.asarray(b[...])).max()) for a, b in pairs)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    chosen = _setting.options(__doc__, argv)
    num_steps = 40 if chosen.quick else 300
    data = _setting.digits(1, by_label=False)
    x, labels = data.x[0], data.y[0]
    rows: list[tuple[float, float, float, float]] = []
    curves: dict[str, dict[int, float]] = {}
    for noise in (0.0, 1.0, 4.0):
        curve = curves[f"noise {noise:g} times the norm"] = {}

        def note(num_steps: int, net: nnx.Sequential, curve: dict[int, float] = curve) -> None:
            curve[num_steps] = float(np.mean(np.argmax(np.asarray(net(data.test_x)), -1) == data.test_y))

        _, before, after = train(num_steps, noise, x, labels, parallel=True, watch=note)
        rows.append((noise, curve[num_steps], before, after))
    _setting.table(["noise", "held-out accuracy", "largest norm", "largest clipped norm"], rows)
    apart = difference(10, x, labels)
    print(f"largest difference between one device and all: {apart:.1e} after 10 steps on {jax.device_count()} devices")
    _setting.plot(chosen.plot, curves, "step", "held-out accuracy")
    return {"rows": rows, "difference": apart}


if __name__ == "__main__":
    main()
