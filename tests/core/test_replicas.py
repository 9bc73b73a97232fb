"""What elements have alike: found before anything runs, kept without sending anything."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from paraxis._core import jax_api, replicas
from paraxis.testing import communication
from tests._support import axis_on, values

ROWS = px.Axis("rows", 8)


def differing(body: Callable[..., Any], *args: Any, placed: list[bool]) -> list[bool]:
    closed, _ = jax_api.trace(body, args, {"rows": 8})
    return replicas.differing(closed, placed, ROWS)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (lambda x, w: x, True),
        (lambda x, w: w, False),
        (lambda x, w: w * 2 + jnp.sin(w), False),
        (lambda x, w: w + x * 0, True),
        (lambda x, w: jax.lax.psum(x, "rows"), False),
        (lambda x, w: jax.lax.pmean(x, "rows") + w, False),
        (lambda x, w: jax.lax.pmax(x, "rows"), False),
        (lambda x, w: jax.lax.pmin(x, "rows"), False),
        (lambda x, w: jax.lax.all_gather(x, "rows"), False),
        (lambda x, w: jax.lax.axis_index("rows"), True),
        (lambda x, w: jax.lax.ppermute(x, "rows", [(i, (i + 1) % 8) for i in range(8)]), True),
        (lambda x, w: jax.lax.scan(lambda c, _: (c + w, None), w, None, length=3)[0], False),
        (lambda x, w: jax.lax.scan(lambda c, _: (c + x, None), w, None, length=3)[0], True),
        (lambda x, w: jax.lax.cond(x[0] > 0, lambda: w, lambda: -w), True),
        (lambda x, w: jax.jit(lambda w: w + jax.lax.psum(x, "rows"))(w), False),
        (lambda x, w: jax.random.normal(jax.random.key(0), (3,)), False),
        (lambda x, w: 3.0, False),
    ],
)
def test_what_may_differ_between_elements(body: Callable[..., Any], expected: bool) -> None:
    assert differing(body, jnp.ones(3), jnp.ones(3), placed=[True, False]) == [expected]


def test_each_result_is_told_apart_and_none_is_no_trouble() -> None:
    assert differing(lambda x, w: (x, w, x + w), 1.0, 2.0, placed=[True, False]) == [True, False, True]
    assert differing(lambda x: (), 1.0, placed=[True]) == []


def test_an_outer_vmap_does_not_answer() -> None:
    found: list[list[bool]] = []

    def inner(index: jax.Array, row: jax.Array) -> jax.Array:
        return replicas.watched(row, index, found.append)

    jax.vmap(lambda row: jax.vmap(inner, in_axes=(0, None))(jnp.arange(2), row))(jnp.ones((3, 4)))
    assert found == [[False]]


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
def test_the_row_that_all_have_alike_and_its_derivatives(devices: int) -> None:
    rows = axis_on(devices, devices)
    x, w = values(devices, 5), values(5, seed=1)

    def alike(w: jax.Array, x: jax.Array) -> jax.Array:
        mean = px.map_fn(lambda w, x: w * jnp.tanh(px.pmean(x, rows)), (px.broadcast(w, rows), x), rows)
        return replicas.agreed(mean, rows)

    def expected(w: jax.Array, x: jax.Array) -> jax.Array:
        return w * jnp.tanh(x.mean(0))

    np.testing.assert_allclose(jax.jit(alike)(w, x), expected(w, x), rtol=1e-5)
    weight = values(5, seed=2)
    got = jax.jit(jax.grad(lambda w, x: alike(w, x) @ weight, argnums=(0, 1)))(w, x)
    by_hand = jax.grad(lambda w, x: expected(w, x) @ weight, argnums=(0, 1))(w, x)
    for g, e in zip(got, by_hand, strict=True):
        np.testing.assert_allclose(g, e, rtol=1e-5, atol=1e-6)
    tangents = (values(5, seed=3), values(devices, 5, seed=4))
    np.testing.assert_allclose(
        jax.jit(lambda *t: jax.jvp(alike, (w, x), t)[1])(*tangents),
        jax.jvp(expected, (w, x), tangents)[1],
        rtol=1e-5,
        atol=1e-6,
    )


def test_taking_it_sends_nothing() -> None:
    rows = axis_on(8, 8)
    sent = communication(lambda w: replicas.agreed(px.map_fn(jnp.sin, px.broadcast(w, rows), rows), rows), jnp.ones(4))
    assert sent.total_count == 0
