"""Mistakes that users make, and the errors that they get before a wrong number."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px

ROWS = px.Axis("rows", 4)
X = np.arange(4.0, dtype=np.float32)
MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "an axis without elements": (lambda: px.Axis("rows", 0), px.AxisError, r"size must be an integer of at least 1"),
    "an axis that is forgotten": (lambda: px.reduce_sum(X), px.AxisError, "no axis was given"),
    "an axis that is only a name": (
        lambda: px.broadcast(X, "b"),
        px.AxisError,
        "there is no axis 'b', and this is in no",
    ),
    "an axis that the program does not have": (
        lambda: px.program(a=4)(lambda x: px.reduce_sum(x, "b"))(X),
        px.AxisError,
        "there is no axis 'b', and the program has 'a'",
    ),
    "one of several axes": (
        lambda: px.program(a=4, b=2)(lambda x: px.reduce_max(x))(X),
        px.AxisError,
        "no axis was given, and the program has 'a', 'b'",
    ),
    "a leaf of another size": (
        lambda: px.map_fn(lambda p, x: x, ({"w": [np.zeros((5, 2))]}, X), ROWS),
        px.DataError,
        r"map_fn: args\[0\]\['w'\]\[0\] has shape \(5, 2\).*\(4, \.\.\.\)",
    ),
    "a leaf of another size under a derivative": (
        lambda: jax.grad(lambda w: px.map_fn(lambda w, x: w * x, (px.broadcast(w, ROWS), X[:3]), ROWS).sum())(1.0),
        px.DataError,
        r"map_fn: args\[1\] has shape \(3,\)",
    ),
    "integers that would be cut": (
        lambda: px.reduce_sum(np.array([1, 2**31, 3, 4]), ROWS),
        px.ParaxisError,
        "reduce_sum: x holds 2147483648",
    ),
    "a mask of numbers": (
        lambda: px.reduce_sum(X, ROWS, where=X),
        px.DataError,
        r"bool\[4\], got an array float32\[4\]",
    ),
    "weights for each number": (
        lambda: px.reduce_weighted_mean(X, np.ones((4, 2)), ROWS),
        px.DataError,
        r"w must be one weight per element, \(4,\), got \(4, 2\)",
    ),
    "a seed for a key": (lambda: px.keys(0, ROWS), TypeError, "invalid PRNG key data|unexpected PRNG key type"),  # pyright: ignore
    "a lowering that there is not": (
        lambda: px.map_fn(jnp.sin, X, ROWS, lowering="fast"),  # pyright: ignore
        px.AxisError,
        "lowering must be one of 'auto', 'vmap', 'unroll'",
    ),
    "a collective outside of a map": (lambda: px.psum(1.0, "rows"), px.AxisError, "is not being mapped here"),
    "a collective along an axis of another size": (
        lambda: px.map_fn(lambda x: px.psum(x, px.Axis("rows", 99)), X, ROWS),
        px.AxisError,
        "'rows' of 99 elements is not being mapped here .'rows' of 4 elements is",
    ),
    "a program without axes": (lambda: px.program()(jnp.sin), px.AxisError, "no axis was given"),
    "pmap of nothing": (lambda: px.pmap(lambda: 1)(), px.DataError, "no argument is mapped"),
    "pmap of two sizes": (
        lambda: px.pmap(lambda x, y: x)(np.ones(3), {"a": np.ones(4)}),
        px.DataError,
        r"\(args\[0\]: 3, args\[1\]\['a'\]: 4\)",
    ),
    "pmap of two sizes, by keyword": (
        lambda: px.pmap(lambda x, b: x)(np.ones(3), b=np.ones(4)),
        px.DataError,
        r"\(args\[0\]: 3, kwargs\['b'\]: 4\)",
    ),
    "pmap of a scalar": (lambda: px.pmap(lambda x: x)(2.0), px.DataError, r"args\[0\]: no axis 0 in \(\)"),
    "pmap of too few in_axes": (
        lambda: px.pmap(lambda x, y: x, in_axes=(0,))(X, X),
        px.DataError,
        r"in_axes=\(0,\) does not fit",
    ),
    "pmap of other out_axes": (
        lambda: px.pmap(lambda x: (x, x), out_axes=(0, 0, 0))(X),
        px.DataError,
        r"out_axes=\(0, 0, 0\) does not fit",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_common_mistake_is_an_error_that_names_it(mistake: str) -> None:
    call, kind, message = MISTAKES[mistake]
    with pytest.raises(kind, match=message):
        call()
