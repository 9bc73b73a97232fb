"""What is kept of functions, solvers, optimisers and nets that are made anew: nothing that grows."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import paraxis as px

X = np.random.default_rng(0).normal(size=(12, 3)).astype("float32")
Y = X @ np.array([1.0, 2.0, 3.0], np.float32)


class Mark:
    """Something that a function holds, to see whether it is let go."""


def cost(mark: Mark) -> Callable[..., jax.Array]:
    def fn(w: jax.Array, data: Any) -> jax.Array:
        assert mark
        return jnp.mean((data[0] @ w - data[1]) ** 2)

    return fn


def lbfgs(mark: Mark) -> Any:
    return px.solve.LBFGS(cost(mark), tol=1e-5).run(jnp.zeros(3), (X, Y)).params


def of_solver(mark: Mark) -> None:
    lbfgs(mark)


def of_gradient(mark: Mark) -> None:
    def penalised(w: jax.Array, weight: jax.Array, data: Any) -> jax.Array:
        return cost(mark)(w, data) + weight * w @ w

    solver = px.solve.LBFGS(penalised, maxiter=5)
    jax.grad(lambda weight: solver.run(jnp.zeros(3), weight, (X, Y)).params.sum())(0.1)


def of_ensemble(mark: Mark) -> None:
    ens = px.ensemble(lambda key: jax.random.normal(key, (3,)), 2, 0)
    ens.train(lambda w, x, y: w - 0.1 * jax.grad(cost(mark))(w, (x, y)), X, Y)


def of_step(mark: Mark) -> None:
    step = px.train_step(lambda w, batch: cost(mark)(w, (batch["x"], batch["y"])))
    step(px.TrainState.create(jnp.zeros(3), optax.sgd(0.1)), {"x": X, "y": Y})


def of_transform(mark: Mark) -> None:
    net = nnx.Linear(3, 1, rngs=nnx.Rngs(0))

    def loss(net: nnx.Linear, x: jax.Array) -> jax.Array:
        assert mark
        return jnp.mean(net(x) ** 2)

    px.Jit(loss, net)(X)
    px.Parallel(px.GradValues(loss, net), reduce="mean")(X[:8])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("use", [of_solver, of_gradient, of_ensemble, of_step, of_transform])
def test_functions_and_what_they_hold_are_let_go(use: Callable[[Mark], None]) -> None:
    marks = [Mark() for _ in range(3)]
    gone = [weakref.ref(mark) for mark in marks]
    while marks:
        use(marks.pop())
    gc.collect()
    assert sum(ref() is not None for ref in gone) <= 1  # JAX itself may hold on to the last


def num_programs() -> int:
    """How many compiled programs there are."""
    gc.collect()
    return len(jax.devices()[0].client.live_executables())


@pytest.mark.slow
def test_a_gradient_of_a_solution_is_that_of_its_own_function() -> None:
    """Programs that do the same may have other derivatives: a rule of the user's is not found by structure."""
    found = []
    for factor in (1.0, 3.0):

        @jax.custom_jvp
        def penalty(weight: jax.Array) -> jax.Array:
            return weight * 1.0

        penalty.defjvp(lambda primals, tangents, f=factor: (primals[0] * 1.0, f * tangents[0]))
        solver = px.solve.LBFGS(lambda w, weight, data, p=penalty: cost(Mark())(w, data) + p(weight) * w @ w, tol=1e-5)
        found.append(jax.grad(lambda weight, s=solver: s.run(jnp.zeros(3), weight, (X, Y)).params.sum())(0.1))
    np.testing.assert_allclose(found[1], 3 * found[0], rtol=1e-3)
