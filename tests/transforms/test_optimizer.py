"""px.Optimizer against optax by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import paraxis as px
from tests.transforms._models import MLP

X = np.random.default_rng(0).normal(size=(12, 3)).astype("float32")
Y = np.random.default_rng(1).normal(size=(12, 4)).astype("float32")


def square_loss(net: Any, x: Any, y: Any) -> jax.Array:
    return ((net(x) - y) ** 2).mean()


def train(net: MLP, opt: px.Optimizer, x: Any, y: Any, lr: Any) -> jax.Array:
    value, gradients = nnx.value_and_grad(square_loss)(net, x, y)
    opt(lr, gradients)
    return value


def by_optax(factory: Any, rates: list[float]) -> list[jax.Array]:
    """The parameters after some steps on plain arrays."""
    definition, state = nnx.split(MLP(nnx.Rngs(0)))
    optimizer_state = factory(rates[0]).init(state)
    for lr in rates:
        gradients = jax.grad(lambda s: square_loss(nnx.merge(definition, s), X, Y))(state)
        updates, optimizer_state = factory(lr).update(gradients, optimizer_state, state)
        state = optax.apply_updates(state, updates)
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
def test_steps_are_those_of_optax_with_the_rate_of_the_call(factory: Any, options: dict[str, Any]) -> None:
    rates = [0.1, 0.02, 0.3]
    net = MLP(nnx.Rngs(0))
    opt = px.Optimizer(net, factory, **options)
    step = px.Jit(train, net, opt)
    for lr in rates:
        step(X, Y, lr)
    for got, expected in zip(px.variables(net), by_optax(lambda lr: factory(lr, **options), rates), strict=True):
        np.testing.assert_allclose(got[...], expected, rtol=2e-5, atol=1e-6)


def test_only_the_chosen_variables_are_trained() -> None:
    net = MLP(nnx.Rngs(0))
    kernels = px.variables(net).subset(lambda name, _: name.endswith("kernel"))
    biases = [v[...] for name, v in px.variables(net).items() if name.endswith("bias")]
    opt = px.Optimizer(net, optax.adam, wrt=kernels)
    gradients, _ = px.GradValues(square_loss, net, wrt=kernels)(X, Y)
    opt(0.1, gradients)
    assert all(
        v[...] is b
        for v, b in zip((v for n, v in px.variables(net).items() if n.endswith("bias")), biases, strict=True)
    )


@pytest.mark.parametrize(
    ("lr", "gradients"),
    [
        (0.1, [jnp.ones(4)]),
        (0.1, [jnp.ones(4), jnp.ones((1, 4))]),
        (jnp.ones(4), [jnp.ones(4), jnp.ones((3, 4))]),
    ],
    ids=["too few", "one of another shape", "several rates"],
)
def test_gradients_that_do_not_fit_raise_and_change_nothing(lr: Any, gradients: Any) -> None:
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
def test_an_optimiser_that_keeps_the_rate_in_its_state_is_refused(factory: Any) -> None:
    with pytest.raises(px.StateError, match=r"keeps the learning rate in its state.*lambda lr: optax\.rprop"):
        px.Optimizer(MLP(nnx.Rngs(0)), factory)
    fixed = px.Optimizer(MLP(nnx.Rngs(0)), lambda lr: optax.chain(optax.rprop(0.01), optax.scale(lr)))
    assert len(fixed.names) == 4
