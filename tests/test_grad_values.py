"""Gradients of variables and arguments against ``jax.grad`` and ``nnx.grad``; px.Optimizer against optax."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import paraxis as px
from tests._modules import MLP, Normed

X: Any = np.random.default_rng(0).normal(size=(10, 3)).astype("float32")
Y: Any = np.random.default_rng(1).normal(size=(10, 4)).astype("float32")


def square_loss(net: Any, x: Any, y: Any) -> jax.Array:
    return ((net(x) - y) ** 2).mean()


def test_grad_values_gives_the_gradients_of_nnx() -> None:
    net = MLP(nnx.Rngs(0))
    value, expected = nnx.jit(nnx.value_and_grad(square_loss))(net, X, Y)
    gradients, got = px.GradValues(square_loss, net)(X, Y)
    np.testing.assert_allclose(got, value, rtol=1e-6)
    for g, e in zip(gradients, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(g, e, rtol=1e-5, atol=1e-7)


def test_grad_values_gives_gradients_of_inputs_with_and_without_those_of_variables() -> None:
    net = MLP(nnx.Rngs(0))
    expected = jax.grad(lambda x: square_loss(net, x, Y))(X)
    (of_net, of_x), _ = px.GradValues(square_loss, net, argnums=0)(X, Y)
    assert len(of_net) == 4
    np.testing.assert_allclose(of_x, expected, rtol=1e-6)
    (of_x, of_y), _ = px.GradValues(square_loss, net, wrt=None, argnums=(0, -1))(X, Y)
    np.testing.assert_allclose(of_x, expected, rtol=1e-6)
    np.testing.assert_allclose(of_y, jax.grad(lambda y: square_loss(net, X, y))(Y), rtol=1e-6)


def test_grad_values_and_optimizer_choose_variables_as_subset_does() -> None:
    net = MLP(nnx.Rngs(0))
    kernels = px.variables(net).subset(lambda name, _: name.endswith("kernel"))
    of_kernels, _ = px.GradValues(square_loss, net, wrt=kernels)(X, Y)
    assert of_kernels.names() == kernels.names()
    before = [v[...] for v in px.variables(net)]
    px.Optimizer(net, optax.adam, wrt=kernels)(0.1, of_kernels)
    assert [v[...] is old for v, old in zip(px.variables(net), before, strict=True)] == [True, False] * 2


def test_grad_values_keeps_state_written_in_the_loss_and_writes_it_once() -> None:
    net = Normed(nnx.Rngs(0))
    reference = Normed(nnx.Rngs(0))
    px.GradValues(square_loss, net)(X, Y)
    reference(X)
    for got, expected in zip(px.variables(net), px.variables(reference), strict=True):
        np.testing.assert_allclose(got[...], expected[...], rtol=1e-5, atol=1e-7)


def train(net: MLP, opt: px.Optimizer, x: Any, y: Any, lr: Any) -> jax.Array:
    value, gradients = nnx.value_and_grad(square_loss)(net, x, y)
    opt(lr, gradients)
    return value


def by_optax(factory: Any, rates: list[float]) -> list[jax.Array]:
    """The parameters after some steps on plain arrays."""
    definition, state = nnx.split(MLP(nnx.Rngs(0)))
    optimizer_state = factory(rates[0]).init(state)

    @jax.jit
    def step(state: Any, optimizer_state: Any, lr: Any) -> Any:
        gradients = jax.grad(lambda s: square_loss(nnx.merge(definition, s), X, Y))(state)
        updates, optimizer_state = factory(lr).update(gradients, optimizer_state, state)
        return optax.apply_updates(state, updates), optimizer_state

    for lr in rates:
        state, optimizer_state = step(state, optimizer_state, lr)
    return jax.tree.leaves(state)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("factory", "options"),
    [
        (optax.sgd, {"momentum": 0.9}),
        (optax.adam, {}),
        (optax.adamw, {"weight_decay": 0.1, "mask": lambda params: jax.tree.map(lambda p: p.ndim > 1, params)}),
        (lambda lr: optax.chain(optax.clip_by_global_norm(0.1), optax.rmsprop(lr)), {}),
    ],
    ids=["momentum", "adam", "masked decay", "chain"],
)
def test_optimizer_takes_the_steps_of_optax_with_the_rate_of_the_call(factory: Any, options: dict[str, Any]) -> None:
    rates = [0.1, 0.02, 0.3]
    net = MLP(nnx.Rngs(0))
    opt = px.Optimizer(net, factory, **options)
    step = px.Jit(train, net, opt)
    for lr in rates:
        step(X, Y, lr)
    for got, expected in zip(px.variables(net), by_optax(lambda lr: factory(lr, **options), rates), strict=True):
        np.testing.assert_allclose(got[...], expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("lr", "gradients"),
    [(0.1, [jnp.ones(4)]), (0.1, [jnp.ones(4), jnp.ones((1, 4))]), (jnp.ones(4), [jnp.ones(4), jnp.ones((3, 4))])],
    ids=["too few", "one of another shape", "several rates"],
)
def test_optimizer_refuses_gradients_that_do_not_fit_and_changes_nothing(lr: Any, gradients: Any) -> None:
    net = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    opt = px.Optimizer(net, optax.sgd, momentum=0.9)
    before = [v[...] for v in px.variables(opt)]
    with pytest.raises(px.DataError, match="gradients must be one for each of 2 variables"):
        opt(lr, gradients)
    assert all(v[...] is b for v, b in zip(px.variables(opt), before, strict=True))


@pytest.mark.parametrize(
    "factory",
    [optax.rprop, optax.inject_hyperparams(optax.sgd), lambda lr: optax.chain(optax.clip(1.0), optax.rprop(lr))],
    ids=["rprop", "injected", "chain"],
)
def test_optimizer_refuses_a_factory_that_keeps_the_rate_in_its_state(factory: Any) -> None:
    with pytest.raises(px.StateError, match=r"keeps the learning rate in its state.*lambda lr: optax\.rprop"):
        px.Optimizer(MLP(nnx.Rngs(0)), factory)
    fixed = px.Optimizer(MLP(nnx.Rngs(0)), lambda lr: optax.chain(optax.rprop(0.01), optax.scale(lr)))
    assert len(fixed.names) == 4
