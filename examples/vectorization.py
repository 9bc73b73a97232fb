"""Vectorization: ``px.Vectorize`` on a module that draws random numbers, and on a gradient.

Typical output::

    [0 1 0 1 1]
    [1 1 1 1 1]
    [[ 1  2  3  4]
     [ 8  7  6  5]
     [ 9 10 11 12]
     [16 15 14 13]
     [20 19 18 17]]
    [0 1 0 1 1]
    [[-2 -1  0  1]
     [-2 -1  0  1]
     [-2 -1  0  1]
     [-2 -1  0  1]
     [-2 -1  0  1]]
    [[-2  0  2  4]
     [ 5  5  5  5]
     [ 6  8 10 12]
     [13 13 13 13]
     [17 17 17 17]]
    [(4,), (3, 4)]
    [(10, 4), (10, 3, 4)]
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import paraxis as px


class RandomReverse(nnx.Module):
    """Randomly reverse a single vector x and add a value y to it."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.rngs = rngs

    def __call__(self, x: jax.Array, y: Any) -> tuple[jax.Array, jax.Array, Any]:
        """The vector, whether it was reversed, and what was added."""
        r = self.rngs.randint((), 0, 2)
        return x + y + r * (x[::-1] - x), r, y


def random_reverse() -> dict[str, Any]:
    """Rows of a matrix, each with randomness of its own; ``y`` is given whole to all of them."""
    reverse = RandomReverse(nnx.Rngs(0))
    vector_reverse = px.Vectorize(reverse, batch_axis=(0, None))
    x = jnp.arange(20).reshape(5, 4)

    nnx.reseed(reverse, default=1357)
    z, r, y = vector_reverse(x, 1)
    print(r, y, z, sep="\n")
    draws = int(reverse.rngs.default.count[...])

    nnx.reseed(reverse, default=1357)
    with_vector = vector_reverse(x, jnp.array((-2, -1, 0, 1)))
    print(with_vector[1], with_vector[2], with_vector[0], sep="\n")

    after = [vector_reverse(x, 1)[1].tolist() for _ in range(8)]
    found = {"y = 1": (z, r, y), "y = (-2, -1, 0, 1)": with_vector}
    return {name: [np.asarray(a) for a in result] for name, result in found.items()} | {"r": after, "draws": draws}


def loss(net: nnx.Linear, x: jax.Array, y: jax.Array) -> jax.Array:
    return ((net(x) - y) ** 2).mean()


def per_example_gradients() -> dict[str, Any]:
    """The gradient of each row's loss, by vectorising what gives the gradient of one."""
    net = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    gradient_loss = px.GradValues(loss, net)
    single_gradients = px.Vectorize(lambda gradient_loss, x, y: gradient_loss(x, y)[0], gradient_loss)

    x = jax.random.normal(jax.random.key(0), (10, 3))
    y = jax.random.normal(jax.random.key(1), (10, 4))
    whole, each = gradient_loss(x, y)[0], single_gradients(x, y)
    print([g.shape for g in whole])
    print([g.shape for g in each])
    return {"x": x, "y": y, "net": net, "whole": list(whole), "each": list(each)}


def main() -> dict[str, Any]:
    return random_reverse() | per_example_gradients()


if __name__ == "__main__":
    main()
