"""A solution's derivative is that of where the minimum moves, by finite differences of solutions in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from paraxis.solve import objective
from tests._problems import in_float64, labelled

TIGHT = {"tol": 1e-11, "maxiter": 500}
X, Y = labelled(40, 3, 3)
WEIGHT = np.random.default_rng(2).uniform(0.5, 2, 40)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["l2reg", "X", "weight"])
@in_float64
def test_lbfgs_solution_of_a_linear_model_has_a_derivative_by_each_argument(by: str) -> None:
    given = {"l2reg": jnp.asarray(0.1), "X": jnp.asarray(X), "weight": jnp.asarray(WEIGHT)}
    fun, some = objective.l2_multiclass_logreg_with_intercept, np.random.default_rng(3).normal(size=(3, 3))
    solver = px.solve.LBFGS(fun, **TIGHT)

    def loss(value: Any) -> jax.Array:
        args = given | {by: jnp.asarray(value)}
        start, data = fun.init(3, 3, dtype=float), (args["X"], jnp.asarray(Y), args["weight"])
        return (solver.run(start, args["l2reg"], data).params[0] * some).sum()

    grad = jax.grad(loss)(given[by])
    direction = np.random.default_rng(4).normal(size=given[by].shape)
    expected = (loss(given[by] + 1e-5 * direction) - loss(given[by] - 1e-5 * direction)) / 2e-5
    np.testing.assert_allclose((grad * direction).sum(), expected, rtol=1e-5, atol=1e-8)
    forward = jax.jvp(loss, (given[by],), (jnp.asarray(direction),))[1]
    np.testing.assert_allclose(forward, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("batched", [False, pytest.param(True, marks=pytest.mark.slow)])
@in_float64
def test_lbfgs_solution_of_ridge_has_the_derivative_by_hand(batched: bool) -> None:
    """Both modes of differentiation, in one program with one solve."""
    x, y = X, X @ np.array([1.0, -2.0, 0.5]) + np.sin(np.arange(40.0))
    solver = px.solve.LBFGS(objective.ridge, **TIGHT)

    def ours(l2: Any, x: Any, y: Any) -> jax.Array:
        return solver.run(jnp.zeros(3), l2, (x, y)).params

    def closed(l2: Any, x: Any, y: Any) -> jax.Array:
        return jnp.linalg.solve(x.T @ x / 40 + l2 * jnp.eye(3), x.T @ y / 40)

    args = jnp.asarray(0.3), jnp.asarray(x), jnp.asarray(y)
    if not batched:

        @jax.jit
        def solution_and_derivatives(*args: Any) -> tuple[jax.Array, list[Any]]:
            solution, push = jax.linearize(ours, *args)  # `push` is linear, and so its own derivative
            return solution, [transform(push, argnums=(0, 1, 2))(*args) for transform in (jax.jacfwd, jax.jacrev)]

        solution, both = solution_and_derivatives(*args)
        np.testing.assert_allclose(solution, closed(*args), rtol=1e-9)
        for found in both:
            for one, expected in zip(found, jax.jit(jax.jacrev(closed, argnums=(0, 1, 2)))(*args), strict=True):
                np.testing.assert_allclose(one, expected, rtol=1e-7, atol=1e-9)
        return
    batch = jnp.array([0.1, 0.3, 1.0])
    found = jax.jit(jax.vmap(jax.grad(lambda l2: ours(l2, *args[1:]).sum())))(batch)
    expected = jax.vmap(jax.grad(lambda l2: closed(l2, *args[1:]).sum()))(batch)
    np.testing.assert_allclose(found, expected, rtol=1e-7)


@in_float64
def test_lbfgs_solution_has_derivatives_beside_keywords_pytrees_and_integers() -> None:
    def fun(p: Any, *, target: Any, power: Any) -> jax.Array:
        return ((p["a"] - target["a"]) ** power).sum() + (p["b"] - p["a"].sum()) ** 2 + 0.1 * (p["a"] ** 2).sum()

    def solution(a: Any) -> jax.Array:
        start = {"a": jnp.zeros(2), "b": jnp.ones(())}
        return px.solve.LBFGS(fun, **TIGHT).run(start, target={"a": a, "n": 3}, power=2).params["b"]

    at = jnp.array([1.0, 0.4])
    np.testing.assert_allclose(jax.grad(solution)(at), np.full(2, 1 / 1.1), rtol=1e-8)
