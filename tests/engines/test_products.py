"""Derivatives of a product over streamed elements are those of all factors at once: the first, second and third."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from tests._support import assert_close, axis_on, values

N = 7
AXIS = axis_on(1, N, name="clients")
ALONG = np.asarray(values(2, N, 2, seed=1))
AGAIN = np.asarray(values(2, N, 2, seed=2))


def product(x: Any) -> Any:
    return jnp.sin(px.reduce_prod(px.map_fn(lambda x: x + 0, (x,), AXIS), AXIS)).sum()


def plain(x: Any) -> Any:
    return jnp.sin(jnp.prod(x, 0)).sum()


DERIVED: dict[str, Callable[[Any], Callable[[Any], Any]]] = {
    "hessian": jax.hessian,
    "a gradient's derivative along values": lambda f: lambda x: jax.jvp(jax.grad(f), (x,), (ALONG[0],))[1],
    "a gradient's gradient": lambda f: jax.grad(lambda x: (jax.grad(f)(x) * ALONG[0]).sum()),
    "batched": lambda f: lambda x: jax.vmap(lambda v: jax.jvp(jax.grad(f), (x,), (v,))[1])(ALONG),
    "the third": lambda f: jax.grad(
        lambda x: (jax.grad(lambda x: (jax.grad(f)(x) * ALONG[0]).sum())(x) * AGAIN[0]).sum()
    ),
}


def factors(zeros: int) -> np.ndarray:
    x = np.array(values(N, 2))
    x[[1, 4, 6][:zeros], 0] = 0.0  # of the other column, none
    return x


def by_leaving_out(x: np.ndarray, *left_out: int) -> np.ndarray:
    return np.prod(np.delete(x.astype(np.float64), left_out, axis=0), axis=0)


@pytest.fixture(
    scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(N, marks=pytest.mark.slow)]
)
def engines(request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    with px.Pool(at_once=request.param, workers=2) as pool:
        yield [px.Stream(at_once=request.param), pool]


@pytest.mark.sampled(20)
@pytest.mark.parametrize("zeros", range(4))
@pytest.mark.parametrize("how", DERIVED)
def test_derivatives_of_a_product_are_those_of_all_factors_at_once(engines: list[Any], how: str, zeros: int) -> None:
    x, derive = factors(zeros), DERIVED[how]
    expected = jax.jit(derive(plain))(x)
    assert_close(jax.jit(derive(product))(x), expected)
    stream, pool = engines
    for engine in (stream, pool) if how == "a gradient's gradient" else (stream,):
        assert_close(np.asarray(engine.run(derive(product), px.Groups.of_arrays(x))), np.asarray(expected))


@pytest.mark.parametrize("zeros", range(4))
def test_second_derivatives_of_a_product_leave_two_factors_out(zeros: int) -> None:
    x = factors(zeros)[:, :1]
    pairs = [[by_leaving_out(x, i, j)[0] if i != j else 0.0 for j in range(N)] for i in range(N)]
    hessian = jax.hessian(lambda x: px.reduce_prod(px.map_fn(lambda x: x + 0, (x,), AXIS), AXIS)[0])
    found = px.Stream(at_once=3).run(hessian, px.Groups.of_arrays(x))
    assert_close(np.asarray(found)[:, 0, :, 0], np.array(pairs, np.float32))


UNEVEN = {
    "small": ([1e-4, 1, 1, 1], [1, 1, 1, 1]),
    "tiny": ([1e-20, 1, 2, 3], [1, 1, 1, 1]),
    "two small": ([1e-6, 1e-6, 2, 3], [1, 1, 1, 1]),
    "two tiny and equal": ([1e-12, -1e-12, 2, 3, 4], [1, 1, 1, 1, 1]),
    "small and zero": ([1e-8, 0, 2, 3], [1, 1, 1, 1]),
    "along one": ([1e-6, 2, 3, 4], [1, 0, 0, 0]),
    "along one much more": ([0.5, 0.7, 1.2, 1.4, 0.9], [1e8, 1, 1, 1, 1]),
    "zeros, along one much more": ([0, 0, 0.7, 1.2], [1e8, 1, 1, 1]),
    "large": ([1e15, 1e15, 1e-15, 1e-15], [1, 1, 1, 1]),
    "beyond what a float holds": ([1e30, 1e30, 2, 0.5], [1, 1, 1, 1]),
    "below it": ([1e-30, 1e-30, 1, 1], [1, 1, 1, 1]),
    "above and below it": ([1e25, 1e25, 1e-25, 1e-25, 1e25, 1e-25], [1, 1, 1, 1, 1, 1]),
    "one": ([3], [1]),
    "two": ([3, 4], [1, 1]),
}


@pytest.mark.parametrize(("x", "v"), UNEVEN.values(), ids=UNEVEN)
def test_derivatives_of_factors_of_very_different_size_keep_their_digits(x: list[float], v: list[float]) -> None:
    axis, along, n = axis_on(1, len(x)), np.array(v, np.float32), len(x)
    gradient = jax.grad(lambda x: px.reduce_prod(px.map_fn(lambda x: x + 0, (x,), axis), axis))

    def second(x: Any) -> Any:
        return jax.jvp(gradient, (x,), (along,))[1]

    double = np.array(x)
    expected = np.zeros((3, n))
    expected[0] = [by_leaving_out(double, i) for i in range(n)]
    for i, j in itertools.permutations(range(n), 2):
        expected[1, i] += v[j] * by_leaving_out(double, i, j)
    for i, j, k in itertools.permutations(range(n), 3):
        expected[2, i] += v[j] * v[k] * by_leaving_out(double, i, j, k)

    def third(x: Any) -> Any:
        return jax.jvp(second, (x,), (along,))[1]

    terms = np.abs(np.divide(v, x, out=np.zeros(n), where=double != 0))
    orders = (gradient, second, third)[: 2 + bool(terms.max() ** 2 < 1e38)]  # of the third, products of two are terms
    with np.errstate(over="ignore", under="ignore"):
        expected = expected.astype(np.float32)  # infinite, or 0, where a float holds no other
    for derived, exact in zip(orders, expected, strict=False):
        found = px.Stream(at_once=3).run(derived, px.Groups.of_arrays(np.array(x, np.float32)))
        np.testing.assert_allclose(np.asarray(found), exact, rtol=2e-6, atol=1e-38)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "complex64"])
def test_gradients_of_a_product_of_other_numbers_are_those_of_jax(dtype: str) -> None:
    x, axis = jnp.array([1.5, -2, 3, 0.25, 7], dtype), axis_on(1, 5)
    expected = jax.grad(lambda x: jnp.prod(x).real)(x)
    gradient = jax.grad(lambda x: px.reduce_prod(px.map_fn(lambda x: x + 0, (x,), axis), axis).real)
    assert_close(np.asarray(px.Stream(at_once=2).run(gradient, px.Groups.of_arrays(np.asarray(x)))), expected)


def test_the_gradient_of_very_many_factors_is_that_of_logarithms() -> None:
    x = np.exp(np.random.default_rng(3).normal(size=20_000) / 100).astype(np.float32)
    axis = axis_on(1, len(x))
    gradient = jax.grad(lambda x: px.reduce_prod(px.map_fn(lambda x: x + 0, (x,), axis), axis))
    found = px.Stream(at_once=700).run(gradient, px.Groups.of_arrays(x))
    double = x.astype(float)
    np.testing.assert_allclose(np.asarray(found), np.exp(np.log(double).sum() - np.log(double)), rtol=2e-3)


INFINITE = [
    *([np.inf, 2, 3], [-np.inf, 2, -3], [np.inf, -np.inf, 3], [np.inf, 0, 3], [0, -2, np.inf]),
    *([np.nan, 2, 3], [np.nan, 0, 3], [np.inf, np.nan, 3]),
]


@pytest.mark.parametrize("x", INFINITE, ids=str)
def test_gradients_of_infinite_factors_are_those_of_jax(x: list[float]) -> None:
    axis, given = axis_on(1, len(x)), np.array(x, np.float32)
    gradient = jax.grad(lambda x: px.reduce_prod(px.map_fn(lambda x: x + 0, (x,), axis), axis))
    expected = np.asarray(jax.grad(jnp.prod)(given))
    np.testing.assert_array_equal(gradient(given), expected)
    for at_once in (1, 3):
        np.testing.assert_array_equal(px.Stream(at_once=at_once).run(gradient, px.Groups.of_arrays(given)), expected)
