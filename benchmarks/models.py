"""The models that the benchmarks train, as plain functions."""

import math
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


def ensemble_cnn_params(key: jax.Array) -> dict[str, jax.Array]:
    """The CNN of Flax's HOWTO on ensembling: two convolutions, a hidden layer of 256."""
    shapes = {"first": (3, 3, 1, 32), "second": (3, 3, 32, 64), "hidden": (7 * 7 * 64, 256), "out": (256, 10)}
    return _scaled(key, shapes)


def ensemble_cnn(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    for layer in ("first", "second"):
        x = jax.lax.conv_general_dilated(x, params[layer], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = _mean_pool(jax.nn.relu(x + params[f"{layer}_bias"]))
    return _two_layers(params, x.reshape(x.shape[0], -1))


def ensemble_mlp_params(key: jax.Array) -> dict[str, jax.Array]:
    """A member so small that calling it costs more than running it."""
    return _scaled(key, {"hidden": (64, 32), "out": (32, 10)})


def ensemble_mlp(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return _two_layers(params, x)


def _scaled(key: jax.Array, shapes: dict[str, tuple[int, ...]]) -> dict[str, jax.Array]:
    keys = jax.random.split(key, len(shapes))
    weights = {
        name: jax.random.normal(k, shape) / math.prod(shape[:-1]) ** 0.5
        for (name, shape), k in zip(shapes.items(), keys, strict=True)
    }
    return weights | {f"{name}_bias": jnp.zeros(shape[-1]) for name, shape in shapes.items()}


def _two_layers(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(x @ params["hidden"] + params["hidden_bias"])
    return hidden @ params["out"] + params["out_bias"]
