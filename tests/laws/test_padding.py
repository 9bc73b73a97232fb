"""Padded rows never reach an answer, and never make a NaN, forward or backward."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from tests._support import REDUCTIONS, assert_close, axis_on, in_double, values

# Each is infinite, or NaN, or has such a derivative, or never ends, on a row of zeros.
BODIES: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "1/x": lambda i, x: (1 / x).sum(),
    "log": lambda i, x: jnp.log(x).sum(),
    "sqrt": lambda i, x: jnp.sqrt(x).sum(),
    "norm": lambda i, x: jnp.linalg.norm(x),
    "x/sum": lambda i, x: (x * jnp.arange(2.0)).sum() / x.sum(),
    "1/index": lambda i, x: (x / i).sum(),
    "power": lambda i, x: (x**-1.5).sum(),
    "solve": lambda i, x: jnp.linalg.inv(jnp.diag(x)).sum(),
    "loop": lambda i, x: (
        x.sum() + 0 * jax.lax.while_loop(lambda v: v < 9, lambda v: v * 2, jax.lax.stop_gradient(x[0]))
    ),
}


def everything(mapped: Callable[..., jax.Array], mean: Callable[[jax.Array], jax.Array]) -> Callable[..., Any]:
    """Values and gradients, by rows and a shared factor, of the rows and of their mean, for every body at once."""

    def run(index: jax.Array, x: jax.Array) -> dict[str, Any]:
        def averaged(w: jax.Array, x: jax.Array, body: Any) -> tuple[jax.Array, jax.Array]:
            rows = mapped(lambda w, i, x: body(i, w * x), w, index, x)
            return mean(rows), rows

        derived = jax.value_and_grad(averaged, (0, 1), has_aux=True)
        return {name: derived(jnp.ones(2), x, body) for name, body in BODIES.items()}

    return run


PLACES = [((8, 10), None), ((2, 7), None), ((8, 3), None), ((2, 7), 2), ((8, 9), 1), ((8, 13), None)]


@pytest.mark.sampled(2)  # by day: a device that is not full, and one that is idle as well
@pytest.mark.parametrize(("placement", "at_once"), PLACES, ids=str)
def test_bodies_that_zeros_would_break_are_padded_with_rows(placement: tuple[int, int], at_once: int | None) -> None:
    axis = axis_on(*placement, at_once=at_once)
    index, x = jnp.arange(1.0, axis.size + 1), values(axis.size, 2)
    here = everything(
        lambda f, w, *rows: px.map_fn(f, (px.broadcast(w, axis), *rows), axis), lambda y: px.reduce_mean(y, axis)
    )
    there = everything(lambda f, *args: jax.vmap(f, (None, 0, 0))(*args), jnp.mean)
    got = jax.jit(lambda i, x: here(i, px.map_fn(lambda x: 2 * x, x, axis)))(index, x / 2)  # padding reaches a map, too
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(got))
    assert_close(got, in_double(there, index, x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in REDUCTIONS if name not in ("any", "all")])
def test_masked_elements_may_be_anything(name: str) -> None:
    """A NaN or an infinity in an element that is left out reaches neither the value nor the gradient."""
    axis = axis_on(2, 5)
    x, keep = jnp.array([1.0, jnp.nan, 2.0, jnp.inf, 3.0]), np.array([True, False, True, False, True])
    value, gradient = jax.value_and_grad(lambda x: REDUCTIONS[name](x, axis, where=keep))(x)
    expected = jax.value_and_grad(getattr(jnp, name))(x[keep])
    assert_close(value, expected[0])
    np.testing.assert_allclose(np.asarray(gradient)[keep], expected[1], rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(gradient)[~keep], 0.0)


def test_weights_of_zero_are_no_mask() -> None:
    """A weight of zero multiplies; ``where`` is what leaves an element out."""
    axis, x = axis_on(2, 3), jnp.array([1.0, jnp.nan, 3.0])
    w, keep = jnp.array([1.0, 0.0, 1.0]), np.array([True, False, True])
    assert np.isnan(px.reduce_weighted_mean(x, w, axis))
    assert float(px.reduce_weighted_mean(x, w, axis, where=keep)) == 2.0
    assert float(px.reduce_weighted_mean(x, jnp.array([1.0, jnp.nan, 1.0]), axis, where=keep)) == 2.0
