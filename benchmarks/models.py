"""The two models that the benchmarks train, as plain functions."""

from typing import Any

import jax
import jax.numpy as jnp


def mlp_params(key: jax.Array, hidden: int = 512) -> dict[str, jax.Array]:
    first, second, third = jax.random.split(key, 3)
    return {
        "first": jax.random.normal(first, (784, hidden)) * 0.03,
        "second": jax.random.normal(second, (hidden, hidden)) * 0.03,
        "third": jax.random.normal(third, (hidden, 10)) * 0.03,
    }


def mlp_loss(params: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(jax.nn.relu(x @ params["first"]) @ params["second"])
    return cross_entropy(hidden @ params["third"], y)


def cnn_params(key: jax.Array) -> dict[str, jax.Array]:
    first, second, dense = jax.random.split(key, 3)
    return {
        "first": jax.random.normal(first, (3, 3, 1, 16)) * 0.3,
        "first_bias": jnp.zeros(16),
        "second": jax.random.normal(second, (3, 3, 16, 32)) * 0.08,
        "second_bias": jnp.zeros(32),
        "dense": jax.random.normal(dense, (7 * 7 * 32, 10)) * 0.02,
        "dense_bias": jnp.zeros(10),
    }


def cnn_loss(params: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    for layer in ("first", "second"):
        x = jax.lax.conv_general_dilated(x, params[layer], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = _mean_pool(jax.nn.relu(x + params[f"{layer}_bias"]))
    return cross_entropy(x.reshape(x.shape[0], -1) @ params["dense"] + params["dense_bias"], y)


def cnn_local_steps(params: Any, x: jax.Array, y: jax.Array) -> Any:
    """One SGD step per leading index of the data."""
    for step in range(x.shape[0]):
        gradient = jax.grad(cnn_loss)(params, x[step], y[step])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)
    return params


def cross_entropy(logits: jax.Array, y: jax.Array) -> jax.Array:
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1))


def _mean_pool(x: jax.Array) -> jax.Array:
    return jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4
