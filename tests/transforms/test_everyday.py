"""What people write every day is neither refused nor wrong."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import paraxis as px
from tests._support import assert_close, values
from tests.transforms._models import MLP

pytestmark = pytest.mark.newest


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rows", [1, 3, 5, 9, 13])
@pytest.mark.parametrize(
    "body",
    [
        lambda net, x: jnp.where(net(x) > 0, net(x), 0.0),
        lambda net, x: jax.nn.softmax(jnp.where(net(x) > 0, net(x), -jnp.inf), -1),
        lambda net, x: net(x).std(-1),
        lambda net, x: jnp.nan_to_num(net(x)).var(-1),
        lambda net, x: net(x).max(-1, where=net(x) < 9, initial=-9.0),
    ],
    ids=["where", "masked softmax", "standard deviation", "variance", "masked maximum"],
)
def test_functions_of_single_rows_take_any_number_of_them(body: Any, rows: int) -> None:
    net, x = MLP(nnx.Rngs(0)), values(rows, 3)
    assert_close(np.asarray(px.Parallel(body, net)(x)), np.asarray(body(net, x)), rtol=1e-4)


def test_a_key_per_row_may_be_padded() -> None:
    x, keys = values(13, 3), jax.random.split(jax.random.key(0), 13)
    noisy = jax.vmap(lambda row, key: row + jax.random.normal(key, row.shape))
    assert_close(np.asarray(px.Parallel(noisy)(x, keys)), np.asarray(noisy(x, keys)))


@pytest.mark.parametrize("rows", [3, 5])
def test_one_row_per_device_that_loses_its_dimension_is_refused(rows: int) -> None:
    one = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    for body in (lambda net, x: net(x).squeeze(), lambda net, x: net(x).sum() if len(x) == 1 else net(x)):
        with pytest.raises(px.ShapeError, match="with 1 rows per device the function does something else"):
            px.Parallel(body, one)(values(rows, 3))


def test_static_arguments_are_left_as_they_are() -> None:
    traces: list[int] = []

    def body(x: jax.Array, apply: Any) -> jax.Array:
        traces.append(0)
        return apply(x)

    fn, apply = px.Parallel(body, static_argnums=1), jax.tree_util.Partial(jnp.sin)
    for _ in range(3):
        fn(values(8, 3), apply)
    assert len(traces) == 1
