"""Tiny models that the tests of training share, and a loop by hand to compare with."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

import paraxis as px
from tests._support import axis_on, data

FEATURES, DECAY = 4, 0.9
KEY = jax.random.key(3)


class Net(nnx.Module):
    """4 → 16 → 1 with ReLU; batch normalisation and dropout if asked for."""

    def __init__(self, *, norm: bool = True, dropout: float = 0.5) -> None:
        rngs = nnx.Rngs(0)
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


def plain_params(width: int = 16) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    w, v = rng.normal(size=(FEATURES, width)).astype("float32"), rng.normal(size=width).astype("float32") / 4
    return {"w": w, "b": np.zeros(width, "float32"), "v": v}


def plain(params: Any, x: Any) -> jax.Array:
    return jnp.tanh(x @ params["w"] + params["b"]) @ params["v"]


def plain_loss(params: Any, batch: Any) -> jax.Array:
    """One value per row."""
    return (plain(params, batch["x"]) - batch["y"]) ** 2


def loss(model: Any, batch: Any) -> jax.Array:
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def rows(number: int, seed: int = 0) -> dict[str, np.ndarray]:
    x = np.random.default_rng(seed).normal(size=(number, FEATURES)).astype("float32")
    return {"x": x, "y": np.sin(x.sum(1)).astype("float32")}


def axis(devices: int) -> px.Axis:
    """An axis over the first so many devices; its size does not matter."""
    return axis_on(devices, 1, "batch")


class Model(NamedTuple):
    """A model with its loss for a step; and parameters, what else changes, and a function of both for a loop by hand.

    ``fn(params, rest, batch, number)`` gives a loss and the rest after it.
    """

    model: Any
    loss: Any
    params: Any
    rest: Any
    fn: Callable[..., tuple[jax.Array, Any]]
    options: dict[str, Any] = {}  # noqa: RUF012  of the state


def of_nnx() -> Model:
    graph, params, rest = nnx.split(Net(), nnx.Param, ...)

    def fn(params: Any, rest: Any, batch: Any, number: Any) -> Any:
        model = nnx.merge(graph, params, rest, copy=True)
        model.train()
        return loss(model, batch), nnx.split(model, nnx.Param, ...)[2]

    return Model(Net(), loss, params, rest, fn)


def of_linen() -> Model:
    net, sample = LinenNet(), rows(1)["x"]
    variables = net.init(KEY, sample)

    def fn(params: Any, rest: Any, batch: Any, number: Any) -> Any:
        rngs = {"params": jax.random.fold_in(KEY, number)}
        bound = net.bind({"params": params, **rest}, rngs=rngs, mutable=["batch_stats"])
        value = jnp.mean((bound(jnp.asarray(batch["x"]), train=True) - batch["y"]) ** 2)
        return value, {"batch_stats": bound.variables["batch_stats"]}

    params, rest = variables["params"], {"batch_stats": variables["batch_stats"]}
    of_model = lambda model, batch: jnp.mean((model(batch["x"], train=True) - batch["y"]) ** 2)  # noqa: E731
    return Model(net, of_model, params, rest, fn, {"key": KEY, "sample": sample})


def of_params(step_loss: Any = plain_loss, loss: Any = plain_loss) -> Model:
    """Parameters wide enough to be divided; their mean loss by hand is that of ``loss``."""
    params = plain_params(1536)  # which 3 and 8 divide
    return Model(params, step_loss, params, None, lambda p, rest, batch, number: (jnp.mean(loss(p, batch)), None))


def by_hand(model: Model, optimizer: Any, batches: list[Any]) -> Iterator[tuple[Any, Any, Any, Any, float]]:
    """Parameters, their average, what else changes, the optimiser's state and the loss after each batch of a loop."""
    params: Any = jax.tree.map(jnp.asarray, model.params)
    average, rest, state = params, model.rest, optimizer.init(params)

    @jax.jit
    def update(params: Any, rest: Any, state: Any, batch: Any, number: Any) -> Any:
        (value, rest), gradient = jax.value_and_grad(model.fn, has_aux=True)(params, rest, batch, number)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), rest, state, value

    for number, batch in enumerate(batches):
        params, rest, state, value = update(params, rest, state, batch, jnp.int32(number))
        average = jax.tree.map(lambda a, p: DECAY * a + (1 - DECAY) * p, average, params)
        p, a, r = (nnx.to_pure_dict(x) if isinstance(x, nnx.State) else x for x in (params, average, rest))
        yield p, a, r, state, float(value)


def trained(state: Any, step: Any, batches: list[Any]) -> tuple[Any, np.ndarray]:
    """The state after these batches, and the losses."""
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, np.array(losses, "float32")


def assert_near(actual: Any, expected: Any, rtol: float = 1e-4, atol: float = 2e-5) -> None:
    jax.tree.map(lambda a, e: np.testing.assert_allclose(data(a), data(e), rtol=rtol, atol=atol), actual, expected)


def assert_same_bits(actual: Any, expected: Any) -> None:
    jax.tree.map(lambda a, e: np.testing.assert_array_equal(data(a), data(e)), actual, expected)
