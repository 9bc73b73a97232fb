"""A small convolutional network: two convolutions, one dense layer; parameters are a dict of arrays."""

import math

import jax
import jax.numpy as jnp

Params = dict[str, jax.Array]

_SHAPES = {"conv1": (5, 5, 1, 8), "conv2": (5, 5, 8, 16), "dense": (7 * 7 * 16, 10)}


def init(key: jax.Array) -> Params:
    """Weights scaled for rectifiers (He et al., 2015), biases zero."""
    params: Params = {}
    for (name, shape), layer_key in zip(_SHAPES.items(), jax.random.split(key, len(_SHAPES)), strict=True):
        params[name] = jax.random.normal(layer_key, shape) * math.sqrt(2 / math.prod(shape[:-1]))
        params[f"{name}_bias"] = jnp.zeros(shape[-1])
    return params


def logits(params: Params, images: jax.Array) -> jax.Array:
    """``(batch, 28, 28, 1)`` → ``(batch, 10)``."""
    hidden = images
    for name in ("conv1", "conv2"):
        # A smooth activation keeps rounding errors small over many rounds; behind the kinks of relu they grow.
        hidden = jax.nn.gelu(_halving_conv(hidden, params[name]) + params[f"{name}_bias"])
    return hidden.reshape(hidden.shape[0], -1) @ params["dense"] + params["dense_bias"]


def mean_loss(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross-entropy of a batch."""
    log_probabilities = jax.nn.log_softmax(logits(params, images))
    return -jnp.mean(jnp.take_along_axis(log_probabilities, labels[:, None], axis=1))


def _halving_conv(images: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(images, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
