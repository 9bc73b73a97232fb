"""What the examples of the transforms compute, against NumPy and plain JAX."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests._support import assert_close

pytestmark = pytest.mark.slow

Example = Callable[[str], ModuleType]


def weights(module: Any) -> list[jax.Array]:
    """Bias and kernel of the first and the last layer, in the order of the variables' names."""
    return [p[...] for layer in (module.layers[0], module.layers[2]) for p in (layer.bias, layer.kernel)]


def logits(w: list[jax.Array], x: jax.Array) -> jax.Array:
    return jnp.maximum(x @ w[1] + w[0], 0) @ w[3] + w[2]


def cross_entropy(w: list[jax.Array], x: jax.Array, labels: jax.Array) -> jax.Array:
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits(w, x)), labels[..., None], -1))


# --- private gradients -----------------------------------------------------------------------------------------------


def private_step(module: ModuleType, x: Any, labels: Any, noise: float) -> tuple[list[jax.Array], np.ndarray]:
    """The first step of training by plain JAX, and the norms of the examples' gradients."""
    w = weights(module.classifier())
    rows = np.random.default_rng(0).choice(len(x), module.BATCH, replace=False)
    each = jax.vmap(jax.grad(cross_entropy), in_axes=(None, 0, 0))(w, x[rows], labels[rows])
    norms = np.sqrt(sum(np.sum(np.asarray(g).reshape(len(g), -1) ** 2, axis=1) for g in each))
    scale = np.minimum(1, 1 / norms)
    keys = jax.random.split(jax.random.fold_in(jax.random.key(1), 0), 4)
    total = [jnp.tensordot(scale, g, 1) for g in each]
    total = [g + noise * jax.random.normal(k, g.shape) for k, g in zip(keys, total, strict=True)]
    return [p - 0.5 * g / module.BATCH for p, g in zip(w, total, strict=True)], norms


@pytest.mark.parametrize("parallel", [False, True])
def test_a_private_step_is_a_noisy_mean_of_clipped_gradients(example: Example, parallel: bool) -> None:
    module, data = example("private_gradients"), example("_setting").digits(1, by_label=False)
    expected, norms = private_step(module, data.x[0], data.y[0], 2.0)
    net, before, after = module.train(1, 2.0, data.x[0], data.y[0], parallel=parallel)
    assert_close(weights(net), expected, rtol=1e-4)
    assert before == pytest.approx(norms.max(), rel=1e-4)
    assert after == pytest.approx(1.0, rel=1e-5)
