"""What devices have alike: found before anything runs, kept without sending anything."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import paraxis as px

pytestmark = pytest.mark.floor


def is_refused(body: Callable[..., Any], *args: Any) -> bool:
    """Whether results that must be the same on all devices are refused, when traced; nothing runs."""
    mesh = Mesh(np.array(jax.devices()), ("rows",))
    try:
        jax.eval_shape(px.Parallel(body, reduce="same", axis_name="rows", mesh=mesh, batch_axis=(0, None)), *args)
    except px.StateError as error:
        return "is to be the same on all devices" in str(error)
    return False


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
def test_parallel_finds_what_may_differ_between_elements(body: Callable[..., Any], expected: bool) -> None:
    assert is_refused(body, jnp.ones(24), jnp.ones(3)) == expected
