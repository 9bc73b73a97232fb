"""Broadcast and the reductions as primitives: derivative pairs, and ties."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import paraxis as px
from tests._support import assert_close, axis_on, values

PLACED = [(1, 3), (2, 5), (8, 3)]


def _mapped(axis: px.Axis) -> Callable[[jax.Array, jax.Array], jax.Array]:
    return lambda w, x: px.map_fn(lambda w, x: jnp.tanh(w * x), (px.broadcast(w, axis), x), axis)


FUNCTIONS: dict[str, Callable[[px.Axis], Callable[[jax.Array, jax.Array], Any]]] = {
    "broadcast": lambda axis: lambda w, x: px.broadcast(w, axis) * x,
    "map": _mapped,
    "sum": lambda axis: lambda w, x: px.reduce_sum(_mapped(axis)(w, x), axis),
    "mean": lambda axis: lambda w, x: px.reduce_mean(x * x, axis) * w,
    "weighted mean": lambda axis: lambda w, x: px.reduce_weighted_mean(_mapped(axis)(w, x), x[:, 0], axis),
    "max": lambda axis: lambda w, x: px.reduce_max(x, axis) * w,
    "masked": lambda axis: lambda w, x: px.reduce_mean(x * x, axis, where=np.arange(axis.size) != 1) * w,
    "exchange": lambda axis: lambda w, x: px.map_fn(lambda x: jnp.sin(x) * px.pmean(x, axis), x, axis) * w,
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_against_finite_differences(name: str) -> None:
    """Both modes, twice."""
    axis = axis_on(2, 3)
    check_grads(jax.jit(FUNCTIONS[name](axis)), (values(2), values(3, 2)), order=2, rtol=0.05, atol=0.05, eps=1e-2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("placement", PLACED, ids=str)
def test_elements_that_tie_share_the_derivative(placement: tuple[int, int]) -> None:
    axis = axis_on(*placement)
    x = jnp.zeros(axis.size).at[jnp.array([0, 2])].set(5.0)
    half = np.zeros(axis.size)
    half[[0, 2]] = 0.5
    assert_close(jax.grad(px.reduce_max)(x, axis), half)
    assert_close(jax.grad(lambda x: px.reduce_min(-x, axis))(x), -half)
    assert_close(jax.grad(px.reduce_max)(jnp.ones(axis.size), axis), np.full(axis.size, 1 / axis.size))
    assert_close(jax.hessian(px.reduce_max)(x, axis), np.zeros((axis.size, axis.size)))
