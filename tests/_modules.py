"""Small NNX modules that the tests of the transforms share. Layers are ``Any``: to type checkers a bias may be None."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import AxisType, Mesh


class MLP(nnx.Module):
    """Two layers, 3 → 8 → 4, ReLU between them."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first: Any = nnx.Linear(3, 8, rngs=rngs)
        self.last: Any = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(jax.nn.relu(self.first(x)))


class Noisy(nnx.Module):
    """A layer, 3 → 4, followed by dropout of half of the features."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layer: Any = nnx.Linear(3, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.layer(x))


class Normed(nnx.Module):
    """Two layers, 3 → 8 → 4, batch normalisation between them."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first: Any = nnx.Linear(3, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.last: Any = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(jax.nn.relu(self.norm(self.first(x))))


class Tied(nnx.Module):
    """One layer, 3 → 3, under two attributes."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.encode: Any = nnx.Linear(3, 3, rngs=rngs)
        self.decode = self.encode

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.decode(jnp.tanh(self.encode(x)))


class Counter(nnx.Module):
    """A layer, 3 → 4, and the number of times that it was called."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layer: Any = nnx.Linear(3, 4, rngs=rngs)
        self.calls = nnx.Variable(jnp.asarray(0, "int32"))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] = self.calls[...] + 1
        return self.layer(x)


def arrays_in(*modules: object) -> list[jax.Array]:
    """The arrays that modules hold, each variable once: the very objects, so that identity can be asked for too."""
    return jax.tree.leaves(nnx.split(modules, graph=True)[1])


def assert_untouched(before: list[jax.Array], *modules: object) -> None:
    """Modules hold the very arrays of before."""
    now = arrays_in(*modules)
    assert len(now) == len(before)
    assert all(new is old for new, old in zip(now, before, strict=True))
    assert not any(x.is_deleted() or isinstance(x, Tracer) for x in now)


def mlp() -> MLP:
    return MLP(nnx.Rngs(0))


def mesh_of(devices: int, name: str = "device", kind: AxisType = AxisType.Auto) -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]), (name,), axis_types=(kind,))


def host(tree: Any) -> Any:
    """The same arrays on one device."""
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), tree)
