"""Mistakes that users make, and the errors that they get before a wrong number."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px

pytestmark = pytest.mark.floor

ROWS = px.Axis("rows", 4)
X = np.arange(4.0, dtype=np.float32)
MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "an axis without elements": (lambda: px.Axis("rows", 0), r"size must be an integer of at least 1"),
    "an axis that is only a name": (lambda: px.broadcast(X, "b"), "there is no axis 'b', and this is in no"),
    "an axis that a program lacks": (
        lambda: px.program(a=4)(lambda x: px.reduce_sum(x, "b"))(X),
        "there is no axis 'b', and the program has 'a'",
    ),
    "one of several axes": (lambda: px.program(a=4, b=2)(px.reduce_max)(X), "the program has 'a', 'b'"),
    "a program without axes": (lambda: px.program()(jnp.sin), "no axis was given"),
    "a decorator without parentheses": (lambda: px.program(lambda x: x), "write @px.program"),  # pyright: ignore
    "a leaf of another size": (
        lambda: px.map_fn(lambda p, x: x, ({"w": [np.zeros((5, 2))]}, X), ROWS),
        r"map_fn: args\[0\]\['w'\]\[0\] has shape \(5, 2\).*\(4, \.\.\.\)",
    ),
    "a leaf of another size under a derivative": (
        lambda: jax.grad(lambda w: px.map_fn(lambda w, x: w * x, (px.broadcast(w, ROWS), X[:3]), ROWS).sum())(1.0),
        r"map_fn: args\[1\] has shape \(3,\)",
    ),
    "a mask of numbers": (lambda: px.reduce_sum(X, ROWS, where=X), r"bool\[4\], got an array float32\[4\]"),
    "a seed for a key": (lambda: px.keys(0, ROWS), "invalid PRNG key data|unexpected PRNG key type"),  # pyright: ignore
    "a lowering that there is not": (lambda: px.map_fn(jnp.sin, X, ROWS, lowering="fast"), "'unroll'"),  # pyright: ignore
    "a collective along an axis of another size": (
        lambda: px.map_fn(lambda x: px.psum(x, px.Axis("rows", 99)), X, ROWS),
        "not being mapped here .'rows' of 4 elements is",
    ),
    "pmap of nothing": (lambda: px.pmap(lambda: 1)(), "no argument is mapped"),
    "pmap of two sizes": (
        lambda: px.pmap(lambda x, y, b: x)(np.ones(3), {"a": np.ones(3)}, b=np.ones(4)),
        r"\(args\[0\]: 3, kwargs\['b'\]: 4\)",
    ),
    "pmap of a scalar": (lambda: px.pmap(lambda x: x)(2.0), r"args\[0\]: no axis 0 in \(\)"),
    "pmap of too few in_axes": (lambda: px.pmap(jnp.add, in_axes=(0,))(X, X), r"in_axes=\(0,\) does not fit"),
    "pmap of other out_axes": (lambda: px.pmap(lambda x: (x, x), out_axes=(0,) * 3)(X), "does not fit"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_common_mistake_is_an_error_that_names_it(mistake: str) -> None:
    call, message = MISTAKES[mistake]
    with pytest.raises((px.ParaxisError, TypeError), match=message):
        call()
