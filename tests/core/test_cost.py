"""No public face: the work of one element only decides, by one bound, how a device runs several.

It is counted as by hand.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from paraxis._jax import cost
from tests._support import values

CONV = jnp.ones((8, 3, 5, 5))  # (out channels, in channels, height, width)


def _scanned(x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda c, _: (c @ c, None), x, length=10)[0]


FLOPS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], int]] = {
    "elementwise": (jnp.sin, (values(4, 4),), 0),
    "a product": (jnp.matmul, (values(2, 3), values(3, 5)), 2 * 2 * 3 * 5),
    "a vector": (jnp.matmul, (values(2, 3), values(3)), 2 * 2 * 3),
    "a batch": (jnp.matmul, (values(7, 2, 3), values(7, 3, 5)), 7 * 2 * 2 * 3 * 5),
    "two axes contracted": (
        lambda x, y: jnp.einsum("abc,bcd->ad", x, y),
        (values(2, 3, 4), values(3, 4, 5)),
        2 * 2 * 12 * 5,
    ),
    "a loop": (_scanned, (values(4, 4),), 10 * 2 * 4**3),
    "a loop in a loop": (
        lambda x: jax.lax.scan(lambda c, _: (_scanned(c), None), x, length=3)[0],
        (values(4, 4),),
        30 * 2 * 4**3,
    ),
    "jit": (lambda x: jax.jit(jnp.matmul)(x, x), (values(4, 4),), 2 * 4**3),
    "both branches": (
        lambda x: jax.lax.cond(x[0, 0] > 0, lambda: x @ x, lambda: x @ x @ x),
        (values(4, 4),),
        3 * 2 * 4**3,
    ),
    "a while loop once": (
        lambda x: jax.lax.while_loop(lambda c: c[0, 0] < 9, lambda c: c @ c, x),
        (values(4, 4),),
        2 * 4**3,
    ),
    "a convolution": (
        lambda x: jax.lax.conv(x, CONV, (1, 1), "VALID"),
        (values(2, 3, 9, 9),),
        2 * (2 * 8 * 5 * 5) * (3 * 5 * 5),  # per number that comes out, a product with a patch
    ),
    "a derivative": (
        jax.grad(lambda w, x: jnp.sum(jnp.sin(x @ w))),
        (values(3, 5), values(2, 3)),
        2 * (2 * 2 * 3 * 5),
    ),
}


@pytest.mark.parametrize("name", FLOPS)
def test_work_is_counted_as_by_hand(name: str) -> None:
    fn, args, expected = FLOPS[name]
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    assert cost.flops(jaxpr) == expected
    assert cost.convolves(jaxpr) == (name == "a convolution")


def test_a_convolution_is_found_inside_of_loops() -> None:
    def fn(x: jax.Array) -> jax.Array:
        step = lambda c, _: (jax.lax.conv(c, jnp.ones((3, 3, 1, 1)), (1, 1), "SAME"), None)  # noqa: E731
        return jax.jit(lambda x: jax.lax.scan(step, x, length=4)[0])(x)

    jaxpr = jax.make_jaxpr(fn)(values(1, 3, 2, 2)).jaxpr
    assert cost.convolves(jaxpr)
    assert cost.flops(jaxpr) == 4 * 2 * (3 * 2 * 2) * 3
