"""Assertions about memory and work: what they return where they hold, and what they say where they do not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import paraxis as px
from paraxis.testing import assert_memory, assert_no_redundant_work

pytestmark = pytest.mark.newest

X = jax.ShapeDtypeStruct((64, 64), jnp.float32)


def product_of_products(x):
    return (x @ x) @ (x + 1)  # at least one temporary of 16 KiB


def test_memory_that_fits_is_returned() -> None:
    memory = assert_memory(product_of_products, X, max_bytes=100_000, max_temporary_bytes=60_000)
    assert (memory.arguments, memory.results) == (64 * 64 * 4,) * 2
    assert assert_memory(jax.jit(lambda x: x + 1, donate_argnums=0), X, max_bytes=16384).donated == 16384


@pytest.mark.parametrize("name", ["max_bytes", "max_temporary_bytes"])
def test_memory_that_does_not_fit_is_told_in_parts(name: str) -> None:
    match = rf"product_of_products: {name}=9 was promised, found [\d,]+\. One device .*16,384"
    with pytest.raises(AssertionError, match=match):
        assert_memory(product_of_products, X, **{name: 9})


def test_work_that_is_shared_is_returned_and_work_done_twice_is_named() -> None:
    mesh = Mesh(np.array(jax.devices()), ("rows",))
    lies = [NamedSharding(mesh, spec) for spec in (P("rows"), P())]
    split, whole = (jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=sharding) for sharding in lies)
    work = assert_no_redundant_work(lambda x, w: x @ w, split, whole)
    assert work.flops == work.share == 2 * 64**3 / 8
    match = r"the same work is done 8\.0 times.*test_memory_and_work\.py:\d+.*px\.map_fn"
    with pytest.raises(AssertionError, match=match):
        assert_no_redundant_work(lambda x, w: x @ w, whole, whole)
    rows = px.Axis("rows", 9)
    assert_no_redundant_work(lambda x: px.map_fn(lambda x: x @ x, x, rows), jnp.ones((9, 4, 4)))  # padding is no work


def test_work_of_which_nobody_can_tell_is_not_taken_to_be_shared() -> None:
    with pytest.raises(AssertionError, match="nobody can tell"):
        assert_no_redundant_work(lambda x: jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ x, x), X)
    assert_no_redundant_work(lambda x: jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x + 1, x), X)


def test_work_that_is_not_counted_is_not_taken_to_be_shared() -> None:
    whole = NamedSharding(Mesh(np.array(jax.devices()), ("rows",)), P())
    x = jax.ShapeDtypeStruct((64, 8, 8), jnp.float32, sharding=whole)
    for fn, name in ((jnp.linalg.cholesky, "lapack_spotrf_ffi"), (jnp.fft.fft, "fft")):
        match = rf"nobody can tell whether work is done twice by {name}, .*write .*allow_uncounted=True"
        with pytest.raises(AssertionError, match=match):
            assert_no_redundant_work(fn, x)
        assert assert_no_redundant_work(fn, x, allow_uncounted=True).uncounted == (name,)
    assert_no_redundant_work(jnp.linalg.cholesky, jnp.ones((8, 8)))  # on one device, nothing is done twice
    with pytest.raises(AssertionError, match=r"the same work is done 8\.0 times"):
        assert_no_redundant_work(lambda x: jnp.linalg.cholesky(x @ x), x, allow_uncounted=True)
    args = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=whole) for shape in ((64, 8), (4, 8, 16))]
    with pytest.raises(AssertionError, match=r"the same work is done 8\.0 times"):
        assert_no_redundant_work(jax.lax.ragged_dot, *args, jnp.ones(4, jnp.int32))
