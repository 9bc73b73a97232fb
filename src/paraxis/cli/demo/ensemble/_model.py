"""A network with one hidden layer, and a step of its training; parameters are a dict of arrays."""

from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, jax.Array]

HIDDEN, LEARNING_RATE, MOMENTUM = 64, 0.05, 0.9


def make(key: jax.Array) -> tuple[Params, Params]:
    """Weights scaled for rectifiers (He et al., 2015), biases zero; and the momentum, zero."""
    first, second = jax.random.split(key)
    params = {
        "hidden": jax.random.normal(first, (784, HIDDEN)) * (2 / 784) ** 0.5,
        "hidden_bias": jnp.zeros(HIDDEN),
        "dense": jax.random.normal(second, (HIDDEN, 10)) * (2 / HIDDEN) ** 0.5,
        "dense_bias": jnp.zeros(10),
    }
    return params, jax.tree.map(jnp.zeros_like, params)


def logits(params: Params, images: jax.Array) -> jax.Array:
    """``(batch, 28, 28, 1)`` → ``(batch, 10)``."""
    # A smooth activation keeps rounding errors small over many steps; behind the kinks of relu they grow.
    hidden = jax.nn.gelu(images.reshape(len(images), -1) @ params["hidden"] + params["hidden_bias"])
    return hidden @ params["dense"] + params["dense_bias"]


def mean_loss(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross-entropy of a batch."""
    log_probabilities = jax.nn.log_softmax(logits(params, images))
    return -jnp.mean(jnp.take_along_axis(log_probabilities, labels[:, None], axis=1))


def step(params: Params, velocity: Params, images: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
    """Make a step of gradient descent with momentum; return the new parameters and momentum, and the loss before."""
    loss, gradient = jax.value_and_grad(mean_loss)(params, images, labels)
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, gradient)
    return (jax.tree.map(lambda p, v: p - LEARNING_RATE * v, params, velocity), velocity), loss
