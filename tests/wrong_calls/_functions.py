"""What a user wrote: the functions that the calls are given. An error that comes out of them is the user's own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import paraxis as px


def plus(x: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf + 1, x)


def total(x: Any) -> Any:
    return jnp.sum(x**2)


def summed(x: Any, y: Any) -> Any:
    return px.reduce_sum(x) + y["a"]


def scaled(w: Any, x: Any) -> Any:
    return w * x


def half(x: Any, w: Any = 0.5) -> Any:
    return x * w


class Net(nnx.Module):
    """3 → 2."""

    def __init__(self) -> None:
        self.kernel = nnx.Param(jnp.ones((3, 2)))

    def __call__(self, x: Any) -> Any:
        return x @ self.kernel[...]


def module_loss(x: Any) -> Any:
    return jnp.sum(NET(x) ** 2)


NET = Net()


def make(key: Any) -> Any:
    return {"w": jax.random.uniform(key, (3, 2))}


def apply(params: Any, x: Any) -> Any:
    return x @ params["w"]


def member_step(params: Any, x: Any) -> Any:
    return jax.tree.map(lambda p: p - 0.1 * jnp.mean(x), params), jnp.sum(x)


def score(params: Any, x: Any) -> Any:
    return jnp.mean(apply(params, x) ** 2)


def row_loss(params: Any, batch: Any) -> Any:
    return (batch["x"] @ params["w"]).sum(-1) ** 2


def quadratic(params: Any, scale: Any = 1.0) -> Any:
    return jnp.sum((params - 1.0) ** 2 * scale)


def seen(event: Any) -> None:
    del event


def changed(batch: Any, key: Any = None) -> Any:
    del key
    return {name: np.asarray(x) for name, x in batch.items()}


def net_apply(net: Any, x: Any) -> Any:
    return net(x)


def net_loss(net: Any, x: Any) -> Any:
    return jnp.sum(net(x) ** 2)


def averaged(x: Any) -> Any:
    return px.reduce_mean(px.map_fn(jnp.sin, x, px.Axis("rows", 8)), px.Axis("rows", 8))


def streamed(x: Any) -> Any:
    return px.reduce_mean(x, px.Axis("rows", 8))
