"""With ``at_once``, the memory that a step's work takes does not grow with the number of members."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import paraxis as px

pytestmark = pytest.mark.slow

ROWS = jnp.ones((256, 16))


def make(key: jax.Array) -> jax.Array:
    return jax.random.normal(key, (16,))


def step(w: jax.Array, x: jax.Array) -> Any:
    """The work needs far more memory than the member: 256 × 16 × 64 numbers."""

    def loss(w: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(jnp.sin(x[:, :, None] * w[:, None]) * jnp.ones((16, 64))) ** 2)

    value, gradient = jax.value_and_grad(loss)(w)
    return w - gradient, value


def temporary(size: int, at_once: int | None, lowering: Any) -> int:
    """Bytes that the compiled step of an ensemble on two devices takes on each besides arguments and results."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("members",))
    ens = px.ensemble(make, size, 0, mesh=mesh, at_once=at_once, lowering=lowering)
    ens.train(step, ROWS)
    return ens.lower(step, ROWS).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("lowering", ["vmap", "unroll"])
@pytest.mark.parametrize("size", [64, 61])
def test_the_memory_of_a_step_is_bounded_by_the_members_under_way(size: int, lowering: Any) -> None:
    assert temporary(size, 2, lowering) < 1.3 * temporary(4, 2, lowering)


def test_without_the_bound_it_grows() -> None:
    assert temporary(64, None, "vmap") > 8 * temporary(4, None, "vmap")
