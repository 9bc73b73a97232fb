"""Kinds of members that the tests of ensembles share, and the same members made and trained by hand, one by one."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState

from tests import _modules
from tests._support import data, values

KEY = jax.random.key(3)
mesh_of = functools.partial(_modules.mesh_of, name="members")
X, Y = values(6, 3), jnp.array([0, 1, 2, 3, 1, 0])


def batch(number: int) -> tuple[jax.Array, jax.Array]:
    return values(6, 3, seed=number), (Y + number) % 4


def loss_of(logits: Any, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def make_dict(key: jax.Array) -> dict[str, jax.Array]:
    numbers = jax.random.uniform(key, (56,), minval=-1.0)
    return {"first": numbers[:24].reshape(3, 8), "last": numbers[24:].reshape(8, 4)}


def apply_dict(params: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["first"]) @ params["last"]


def step_dict(params: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
    loss, gradient = jax.value_and_grad(lambda p: loss_of(apply_dict(p, x), y))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), loss


UNIFORM = jax.nn.initializers.uniform(0.5)  # normal numbers take long to compile


class LinenMLP(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(4, kernel_init=UNIFORM)(nn.relu(nn.Dense(8, kernel_init=UNIFORM)(x)))


LINEN = LinenMLP()
ADAM = optax.adam(1e-2)


def make_linen(key: jax.Array) -> TrainState:
    return TrainState.create(apply_fn=LINEN.apply, params=LINEN.init(key, X)["params"], tx=ADAM)


def step_linen(state: TrainState, x: jax.Array, y: jax.Array) -> tuple[TrainState, jax.Array]:
    loss, gradient = jax.value_and_grad(lambda p: loss_of(state.apply_fn({"params": p}, x), y))(state.params)
    return state.apply_gradients(grads=gradient), loss


SGD = optax.sgd(0.1, momentum=0.9)  # one object, or nnx.jit would compile for each member


class Regular(nnx.Module):
    """Two layers, 3 → 8 → 4, batch normalisation and dropout between them."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first: Any = nnx.Linear(3, 8, kernel_init=UNIFORM, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last: Any = nnx.Linear(8, 4, kernel_init=UNIFORM, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.dropout(jax.nn.relu(self.norm(self.first(x)))))


def make_nnx(key: jax.Array) -> tuple[Regular, nnx.Optimizer[Any]]:
    net = Regular(nnx.Rngs(key))
    return net, nnx.Optimizer(net, SGD, wrt=nnx.Param)


def step_nnx(net: Regular, opt: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    loss, gradient = nnx.value_and_grad(lambda net: loss_of(net(x), y))(net)
    opt.update(net, gradient)
    return loss


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of member."""

    make: Callable[..., Any]
    step: Callable[..., Any]
    apply: Callable[..., Any] | None


DICT = Kind(make_dict, step_dict, apply_dict)
LINEN_STATE = Kind(make_linen, step_linen, None)
NNX = Kind(make_nnx, step_nnx, None)
KINDS = {"dict": DICT, "linen": LINEN_STATE, "nnx": NNX}


@dataclasses.dataclass(frozen=True)
class Alone:
    """One member trained for itself on the default device, by JAX and Flax only."""

    arrays: list[np.ndarray]
    losses: np.ndarray
    logits: np.ndarray


@functools.lru_cache(maxsize=64)
def alone(name: str, index: int, num_steps: int = 3) -> Alone:
    kind = KINDS[name]
    member, losses = kind.make(jax.random.fold_in(KEY, index)), []
    step = _jitted(kind)
    for number in range(num_steps):
        if kind is NNX:
            losses.append(step(*member, *batch(number)))
        else:
            member, loss = step(member, *batch(number))
            losses.append(loss)
    return Alone(arrays_of(member), np.stack(losses), np.asarray(_applied(kind, member)))


@functools.lru_cache(maxsize=8)
def _jitted(kind: Kind) -> Callable[..., Any]:
    return nnx.jit(kind.step) if kind is NNX else jax.jit(kind.step)


def _applied(kind: Kind, member: Any) -> Any:
    if kind is NNX:
        member[0].eval()
        logits = member[0](X)
        member[0].train()
        return logits
    return apply_dict(member, X) if kind is DICT else LINEN.apply({"params": member.params}, X)


def arrays_of(member: Any) -> list[np.ndarray]:
    """A member's arrays, each variable once, keys as numbers."""
    is_module = lambda part: isinstance(part, nnx.Pytree)  # noqa: E731
    holds_modules = any(map(is_module, jax.tree.leaves(member, is_leaf=is_module)))
    return [data(leaf) for leaf in jax.tree.leaves(nnx.split(member, graph=True)[1] if holds_modules else member)]
