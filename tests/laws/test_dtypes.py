"""Dtypes, weak types and odd shapes, as ``jax.numpy`` has them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from tests._support import REDUCTIONS, assert_close, at_night, axis_on

DTYPES = ["bool", "int8", "uint8", "int32", "uint32", "float16", "bfloat16", "float32", "complex64"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", [8, *at_night([2], 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_verbs_keep_every_dtype(dtype: str, devices: int) -> None:
    axis, x = axis_on(devices, 5), jnp.array([[3, 0], [1, 1], [2, 0], [1, 2], [4, 0]]).astype(dtype)
    ordered = [name for name in REDUCTIONS if dtype != "complex64" or name not in ("max", "min")]

    def here(x: jax.Array) -> Any:
        y = px.map_fn(lambda a, b: (a, b), (px.broadcast(x[0], axis), x), axis)
        return y, [(REDUCTIONS[name](y[1], axis), REDUCTIONS[name](x, axis)) for name in ordered]

    got = jax.jit(here)(x)
    expected = [(getattr(jnp, name)(x, axis=0),) * 2 for name in ordered]
    assert_close(got, ((jnp.stack([x[0]] * 5), x), expected), rtol=1e-2 if "16" in dtype else 1e-6)


def test_verbs_keep_float64() -> None:
    with jax.enable_x64(True):
        axis, x = axis_on(2, 5), jnp.linspace(1.0, 2.0, 5)
        reduced = jax.jit(lambda x: [f(px.map_fn(lambda x: x * 1.0, x, axis), axis) for f in REDUCTIONS.values()])
        expected = jax.jit(lambda x: [getattr(jnp, name)(x) for name in REDUCTIONS])(x)
        assert_close(reduced(x), expected, rtol=1e-14, atol=0)
        assert px.reduce_sum(jnp.arange(5), axis).dtype == jnp.int64
        gradient = jax.grad(lambda x: px.reduce_weighted_mean(x**2, x, axis))(x)
        np.testing.assert_allclose(gradient, jax.grad(lambda x: (x**3).sum() / x.sum())(x), rtol=1e-13)


def test_verbs_take_empty_trees() -> None:
    axis = axis_on(2, 3)
    x = jnp.arange(3.0)
    assert px.broadcast({}, axis) == {}
    assert px.reduce_sum({"a": None, "b": ()}, axis) == {"a": None, "b": ()}
    assert px.reduce_weighted_mean({}, x, axis) == {}
    assert px.map_fn(lambda x: None, x, axis) is None
    assert np.shape(px.map_fn(lambda: 1.0, (), axis)) == (3,)
    got = px.map_fn(lambda p, x: (p, x, None), ({"w": None}, x), axis)
    assert_close(got, ({"w": None}, x, None))


def test_verbs_take_python_numbers_and_weak_types() -> None:
    """A Python number stays weakly typed through a broadcast, a map and a reduction, as through ``jnp``."""
    axis, x = axis_on(2, 3), jnp.ones(3, jnp.bfloat16)
    plain = jnp.broadcast_to(jnp.asarray(2.0), (3,))

    def weak(y: Any) -> Any:
        return [(jax.typeof(leaf).dtype, jax.typeof(leaf).weak_type) for leaf in jax.tree.leaves(y)]

    for wrap in (lambda f: f, jax.jit):
        assert weak(wrap(lambda: px.broadcast(2.0, axis))()) == weak(plain)
        assert weak(wrap(lambda: px.reduce_sum(px.broadcast(2.0, axis), axis))()) == weak(plain.sum())
        assert weak(wrap(lambda: px.reduce_max(px.broadcast(2, axis), axis))()) == weak(jnp.full(3, 2).max())
        mapped = wrap(lambda x: px.map_fn(lambda w, x: (w * x, 1.0, 1), (px.broadcast(2.0, axis), x), axis))(x)
        assert weak(mapped) == weak(jax.vmap(lambda x: (2.0 * x, 1.0, 1))(x))


def test_extremes_of_negative_integers_are_not_those_of_padding() -> None:
    axis, x = axis_on(2, 3), jnp.array([-3, -2, -5])
    assert (int(px.reduce_max(x, axis)), int(px.reduce_min(-x, axis))) == (-2, 2)
    assert px.map_fn(lambda x: px.pmax(x, axis), x, axis).tolist() == [-2] * 3
    assert px.reduce_any(jnp.array([-1.0, 0.0, 0.0]), axis)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("size", [3, 8, 13])
@pytest.mark.parametrize("devices", [1, 2, 8])
def test_an_extremum_of_what_is_not_a_number_is_none(devices: int, size: int, dtype: str) -> None:
    """On one device, in ``jnp.max`` too. XLA's all-reduce on CPU drops NaN where another device has a number."""
    rng, axis = np.random.default_rng(size), axis_on(devices, size)
    x = rng.choice([-3, -0.5, 0, 1, 7, np.nan], (size, 6), p=[0.15, 0.2, 0.2, 0.2, 0.15, 0.1])
    x[:, 0], x[:, 1] = np.nan, -3
    if dtype != "float8_e4m3fn":  # it has no infinity
        x[:, 2], x[-1, 3] = -np.inf, np.inf
    x = jnp.asarray(x).astype(dtype)

    def reduced(x: Any) -> Any:
        y = px.map_fn(lambda x: x + 0, x, axis)
        return px.reduce_max(y, axis), px.reduce_min(y, axis)

    to_all = px.map_fn(lambda x: (px.pmax(x, axis), px.pmin(x, axis)), x, axis)
    of_one = [np.asarray(y)[size // 2] for y in to_all]
    expected = [f(np.asarray(x).astype(np.float64), 0) for f in (np.max, np.min)]
    for found in (reduced(x), jax.jit(reduced)(x), of_one, (px.reduce_max(x, axis), px.reduce_min(x, axis))):
        np.testing.assert_array_equal([np.asarray(y).astype(np.float64) for y in found], expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("placement", [(1, 3), (2, 5), (8, 3)], ids=str)
def test_elements_that_tie_share_the_derivative(placement: tuple[int, int]) -> None:
    axis = axis_on(*placement)
    x = jnp.zeros(axis.size).at[jnp.array([0, 2])].set(5.0)
    half = np.zeros(axis.size)
    half[[0, 2]] = 0.5
    slope = jax.jit(jax.grad(lambda x: px.reduce_max(x, axis)))
    assert_close(slope(x), half)
    assert_close(slope(jnp.ones(axis.size)), np.full(axis.size, 1 / axis.size))
    assert_close(jax.jit(jax.grad(lambda x: px.reduce_min(-x, axis)))(x), -half)
    assert_close(jax.jit(jax.jacfwd(slope))(x), np.zeros((axis.size, axis.size)))
