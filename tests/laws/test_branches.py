"""Derivatives through branches in which elements exchange values: the function's own, or an error.

Expected ones are differences of values of ``jax.vmap`` in float64; those of rules are what the rule says.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import paraxis as px
from tests._support import assert_close, at_night, axis_on, values

NAME = "rows"


def _mean(x: jax.Array) -> jax.Array:
    return jnp.sin(lax.pmean(x, NAME))


def _either(taken: Any, x: jax.Array, exchange: Callable[[jax.Array], jax.Array] = _mean) -> jax.Array:
    return lax.cond(taken, exchange, jnp.cos, x)


def _scanned(taken: Callable[[jax.Array, jax.Array], Any], x: jax.Array) -> jax.Array:
    return lax.scan(lambda c, t: (_either(taken(c, t), c), None), x, jnp.arange(3))[0]


ALIKE: dict[str, Callable[[jax.Array], jax.Array]] = {
    "a sum that all know": lambda x: _either(lax.psum(x[0], NAME) > 2, x),
    "a loop's counter": lambda x: lax.fori_loop(0, 3, lambda i, c: _either(i % 2 == 0, c), x),
    "what is scanned": lambda x: _scanned(lambda c, t: t != 1, x),
    "own branches without exchange": lambda x: _either(lax.psum(1, NAME) > 2, lax.cond(x[0] > 1, jnp.sin, jnp.cos, x)),
    "own index in a branch": lambda x: lax.cond(x[0] > 1, lambda x: x * lax.axis_index(NAME), jnp.cos, x),
    "a choice of results": lambda x: jnp.where(x[0] > 1, _mean(x), jnp.cos(x)),
    "an axis inside": lambda x: px.map_fn(lambda v: _either(lax.psum(v, NAME) > 2, v), x, px.Axis("inner", 2)),
}
APART: dict[str, Callable[[jax.Array], jax.Array]] = {
    "own value": lambda x: _either(x[0] > 1, x),
    "own value, gathered": lambda x: _either(x[0] > 1, x, lambda x: jnp.sin(lax.all_gather(x, NAME)).sum(0)),
    "own index": lambda x: _either(lax.axis_index(NAME) % 2 == 0, x),
    "own value, carried": lambda x: _scanned(lambda c, t: c[0] * (t + 1) > 1, x),
    "compiled and saved": lambda x: jax.jit(jax.checkpoint(lambda x: _either(x[0] > 1, x)))(x),
    "in a branch taken alike": lambda x: lax.cond(lax.psum(1, NAME) > 2, lambda x: _either(x[0] > 1, x), jnp.cos, x),
    "an axis inside": lambda x: px.map_fn(lambda v: _either(v > 1, v), x, px.Axis("inner", 2)),
}
BODIES = [*((name, True) for name in ALIKE), *((name, False) for name in APART)]


def _inputs(size: int) -> jax.Array:
    """Rows whose first values lie on either side of 1."""
    return values(size, 2).at[:, 0].set(jnp.array([0.6, 1.2, 0.7, 1.3, 0.8])[:size])


def _score(body: Any, x: Any) -> Any:
    y = jax.vmap(body, axis_name=NAME)(x)
    return (y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)).sum()


def _differences(body: Any, x: jax.Array) -> np.ndarray:
    with jax.enable_x64(True):
        at, score = np.asarray(x, np.float64), jax.jit(lambda x: _score(body, x))
        steps = 1e-5 * np.eye(at.size).reshape(-1, *at.shape)
        return np.array([(score(at + step) - score(at - step)) / 2e-5 for step in steps]).reshape(at.shape)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("placement", [(2, 5), *at_night([(1, 4)], 1)], ids=str)
@pytest.mark.parametrize(("name", "alike"), BODIES, ids=str)
def test_branches_have_the_functions_derivative_or_none(name: str, alike: bool, placement: tuple[int, int]) -> None:
    axis, x, body = axis_on(*placement), _inputs(placement[1]), (ALIKE if alike else APART)[name]
    weights = jnp.cos(jnp.arange(x.size)).reshape(x.shape)
    gradient = jax.jit(jax.grad(lambda x: (px.map_fn(body, x, axis) * weights).sum()))
    if alike:
        np.testing.assert_allclose(gradient(x), _differences(body, x), rtol=1e-3, atol=1e-4)
        return
    assert_close(jax.jit(lambda x: px.map_fn(body, x, axis))(x), jax.vmap(body, axis_name=NAME)(x))
    for refused in (gradient, jax.vmap(lambda x: px.map_fn(body, x, axis))):
        with pytest.raises(px.AxisError, match=r"by itself, at .*test_branches\.py:\d+ .*jnp\.where"):
            refused(x if refused is gradient else jnp.stack([x, x]))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "alike"), BODIES, ids=str)
def test_branches_that_are_refused_have_another_derivative_in_jax(name: str, alike: bool) -> None:
    x, body = _inputs(4), (ALIKE if alike else APART)[name]
    is_right = np.allclose(jax.grad(lambda x: _score(body, x))(x), _differences(body, x), rtol=1e-3, atol=1e-4)
    assert is_right == alike


def test_branches_are_taken_alike_if_what_decides_is_shared() -> None:
    axis, x = axis_on(2, 4), _inputs(4)

    def score(taken: jax.Array, x: jax.Array) -> jax.Array:
        return px.map_fn(_either, (px.broadcast(taken, axis) if taken.ndim == 0 else taken, x), axis).sum()

    found = jax.jit(jax.grad(score, argnums=1))(jnp.array(True), x)
    assert_close(found, jax.grad(lambda x: jax.vmap(_mean, axis_name=NAME)(x).sum())(x))
    with pytest.raises(px.AxisError):
        jax.grad(score, argnums=1)(jnp.ones(4, bool), x)


def test_loops_that_elements_leave_apart_have_their_forward_derivative() -> None:
    def body(x: jax.Array) -> jax.Array:
        def turn(s: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return s[0] + 1, jnp.sin(0.5 * s[1] + lax.pmean(s[1], NAME))

        return lax.while_loop(lambda s: s[0] < lax.axis_index(NAME) % 3, turn, (jnp.zeros((), int), x))[1]

    x = _inputs(5)
    steps = np.eye(x.size, dtype=np.float32).reshape(-1, *x.shape)
    weights = np.cos(np.arange(x.size)).reshape(x.shape)
    for axis in (axis_on(1, 5), axis_on(2, 5), axis_on(8, 5)):
        mapped = jax.jit(lambda x, t, axis=axis: jax.jvp(lambda x: px.map_fn(body, x, axis), (x,), (t,))[1])
        found = np.array([(np.asarray(mapped(x, t)) * weights).sum() for t in steps]).reshape(x.shape)
        np.testing.assert_allclose(found, _differences(body, x), rtol=1e-3, atol=1e-4)


@jax.custom_vjp
def _summed_back(x: jax.Array) -> jax.Array:
    """Elements exchange in the derivative only."""
    return 2 * x


_summed_back.defvjp(lambda x: (2 * x, None), lambda _, ct: (lax.psum(ct, NAME),))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("placement", [(1, 5), (2, 5), (8, 8), (8, 5)], ids=str)
@pytest.mark.parametrize("mesh_axis", [NAME, "devices"])
def test_an_exchange_may_stand_in_a_rule_alone(placement: tuple[int, int], mesh_axis: str) -> None:
    """Also where a mesh axis of the same name lies under the elements, and has fewer."""
    mesh = axis_on(*placement, name=mesh_axis).mesh
    axis, x = px.Axis(NAME, placement[1], mesh=mesh, over=mesh_axis), np.asarray(values(placement[1]))
    weights = np.arange(placement[1], dtype=np.float32)
    found = jax.jit(jax.grad(lambda x: (weights * px.map_fn(_summed_back, x, axis)).sum()))(x)
    assert_close(found, np.full(x.shape, weights.sum()))
    shared = jax.grad(lambda w: px.reduce_sum(weights * px.map_fn(_summed_back, px.broadcast(w, axis), axis), axis))
    assert_close(shared(1.0), np.float32(axis.size * weights.sum()))


def test_an_exchange_in_a_rule_is_refused_where_elements_run_in_turns() -> None:
    axis, x = axis_on(2, 5, at_once=1), values(5)
    assert_close(px.map_fn(_summed_back, x, axis), 2 * x)
    with pytest.raises(px.AxisError, match="at_once=1"):
        jax.grad(lambda x: px.map_fn(_summed_back, x, axis).sum())(x)
