"""Tiny models that the tests of training share, and loops on one device, written by hand, to compare with."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

import paraxis as px
from tests._support import axis_on

FEATURES = 4
Rows = dict[str, np.ndarray]


class Net(nnx.Module):
    """4 → 16 → 1 with ReLU; batch normalisation and dropout if asked for."""

    def __init__(self, *, norm: bool = True, dropout: float = 0.5, seed: int = 0) -> None:
        rngs = nnx.Rngs(seed)
        # A bias before batch normalisation has no gradient but rounding, which Adam would make steps of.
        self.first: Any = nnx.Linear(FEATURES, 16, use_bias=not norm, rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.9, rngs=rngs) if norm else None
        self.dropout = nnx.Dropout(dropout, rngs=rngs) if dropout else None
        self.last: Any = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.first(x)
        x = jax.nn.relu(x if self.norm is None else self.norm(x))
        return self.last(x if self.dropout is None else self.dropout(x))[:, 0]


class LinenNet(linen.Module):
    """The same, for Linen."""

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = linen.BatchNorm(use_running_average=not train, momentum=0.9)(linen.Dense(16, use_bias=False)(x))
        return linen.Dense(1)(linen.Dropout(0.5, deterministic=not train)(jax.nn.relu(x)))[:, 0]


def plain_params(seed: int = 0, width: int = 16) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    w, v = rng.normal(size=(FEATURES, width)).astype("float32"), rng.normal(size=width).astype("float32") / 4
    return {"w": w, "b": np.zeros(width, "float32"), "v": v}


def plain(params: Any, x: Any) -> jax.Array:
    return jnp.tanh(x @ params["w"] + params["b"]) @ params["v"]


def plain_loss(params: Any, batch: Any) -> jax.Array:
    """One value per row."""
    return (plain(params, batch["x"]) - batch["y"]) ** 2


def loss(model: Any, batch: Any) -> jax.Array:
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def rows(number: int, seed: int = 0) -> Rows:
    x = np.random.default_rng(seed).normal(size=(number, FEATURES)).astype("float32")
    return {"x": x, "y": np.sin(x.sum(1)).astype("float32")}


def axis(devices: int) -> px.Axis:
    """An axis over the first so many devices; its size does not matter."""
    return axis_on(devices, 1, "batch")


def trained(state: Any, step: Any, batches: list[Any]) -> tuple[Any, np.ndarray]:
    """The state after these batches, and the losses."""
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, np.array(losses, "float32")


def by_hand(params: Any, rest: Any, optimizer: Any, batches: list[Any], fn: Any) -> tuple[Any, Any, np.ndarray]:
    """Parameters, what else changes, and losses of a plain loop; ``fn(params, rest, batch)`` → loss, rest."""
    opt_state, losses = optimizer.init(params), []

    @jax.jit
    def update(params: Any, rest: Any, opt_state: Any, batch: Any) -> Any:
        (value, rest), gradient = jax.value_and_grad(fn, has_aux=True)(params, rest, batch)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), rest, opt_state, value

    for batch in batches:
        params, rest, opt_state, value = update(params, rest, opt_state, batch)
        losses.append(value)
    return params, rest, np.array(losses)


def nnx_by_hand(net: Net, optimizer: Any, batches: list[Rows]) -> tuple[Any, Any, np.ndarray]:
    graph, params, rest = nnx.split(net, nnx.Param, ...)

    def fn(params: Any, rest: Any, batch: Any) -> Any:
        model = nnx.merge(graph, params, rest, copy=True)
        model.train()
        return loss(model, batch), nnx.split(model, nnx.Param, ...)[2]

    params, rest, losses = by_hand(params, rest, optimizer, batches, fn)
    return nnx.to_pure_dict(params), nnx.to_pure_dict(rest), losses


def plain_by_hand(params: Any, optimizer: Any, batches: list[Any], fn: Any = plain_loss) -> tuple[Any, np.ndarray]:
    params = jax.tree.map(jnp.asarray, params)
    params, _, losses = by_hand(params, None, optimizer, batches, lambda p, rest, batch: (jnp.mean(fn(p, batch)), None))
    return params, losses


def assert_near(actual: Any, expected: Any, rtol: float = 1e-4, atol: float = 2e-5) -> None:
    jax.tree.map(lambda a, e: np.testing.assert_allclose(data(a), data(e), rtol=rtol, atol=atol), actual, expected)


def assert_same_bits(actual: Any, expected: Any) -> None:
    jax.tree.map(lambda a, e: np.testing.assert_array_equal(data(a), data(e)), actual, expected)


def data(x: Any) -> np.ndarray:
    """The numbers of an array, of random keys too."""
    is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)
