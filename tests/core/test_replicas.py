"""What devices have alike: found before anything runs, kept without sending anything."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import paraxis as px
from paraxis.testing import communication
from tests._support import values


def mesh_of(devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]), ("rows",))


def alike(body: Callable[..., Any], devices: int = 8, reduce: Any = "same", **options: Any) -> px.Parallel:
    """The body of each device, whose results must be the same on all of them: else it is refused."""
    return px.Parallel(body, reduce=reduce, axis_name="rows", mesh=mesh_of(devices), **options)


def is_refused(body: Callable[..., Any], *args: Any, axes: Any, reduce: Any = "same") -> bool:
    """Whether it is, when it is traced; nothing runs."""
    try:
        jax.eval_shape(alike(body, reduce=reduce, batch_axis=axes), *args)
    except px.StateError as error:
        message = str(error)
    else:
        return False
    assert "is to be the same on all devices" in message
    return True


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
    assert is_refused(body, jnp.ones(24), jnp.ones(3), axes=(0, None)) == expected


def test_each_result_is_told_apart_and_none_is_no_trouble() -> None:
    def body(x: jax.Array, w: jax.Array) -> Any:
        return x, w, x + w

    args = jnp.ones(8), jnp.ones(1)
    found = [
        is_refused(body, *args, axes=(0, None), reduce=tuple("same" if k == n else "concat" for k in range(3)))
        for n in range(3)
    ]
    assert found == [True, False, True]
    assert not is_refused(lambda x: (), jnp.ones(8), axes=0)


def test_an_outer_vmap_does_not_answer() -> None:
    run = alike(lambda x, row: row, 2, batch_axis=(0, None))
    rows = values(3, 4)
    found = jax.vmap(lambda row: run(jnp.arange(2), row))(rows)
    np.testing.assert_array_equal(found, rows)
    with pytest.raises(px.StateError, match="is to be the same on all devices"):
        jax.vmap(lambda row: alike(lambda x, row: row + x, 2, batch_axis=(0, None))(jnp.arange(2), row))(rows)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", [1, 2, 3, 8])
def test_the_row_that_all_have_alike_and_its_derivatives(devices: int) -> None:
    x, w = values(devices, 5), values(5, seed=1)
    found = alike(lambda w, x: w * jnp.tanh(px.pmean(x[0], "rows")), devices, batch_axis=(None, 0))

    def expected(w: jax.Array, x: jax.Array) -> jax.Array:
        return w * jnp.tanh(x.mean(0))

    np.testing.assert_allclose(found(w, x), expected(w, x), rtol=1e-5)
    weight = values(5, seed=2)
    got = jax.jit(jax.grad(lambda w, x: found(w, x) @ weight, argnums=(0, 1)))(w, x)
    by_hand = jax.grad(lambda w, x: expected(w, x) @ weight, argnums=(0, 1))(w, x)
    for g, e in zip(got, by_hand, strict=True):
        np.testing.assert_allclose(g, e, rtol=1e-5, atol=1e-6)
    tangents = (values(5, seed=3), values(devices, 5, seed=4))
    np.testing.assert_allclose(
        jax.jit(lambda *t: jax.jvp(found, (w, x), t)[1])(*tangents),
        jax.jvp(expected, (w, x), tangents)[1],
        rtol=1e-5,
        atol=1e-6,
    )


def test_taking_it_sends_nothing() -> None:
    assert communication(alike(jnp.sin, batch_axis=None), jnp.ones(4)).total_count == 0
