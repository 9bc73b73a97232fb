"""Gradients of variables and arguments, against ``jax.grad`` and ``nnx.grad`` written by hand."""

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import paraxis as px
from tests.transforms._models import MLP, Normed

X: Any = np.random.default_rng(0).normal(size=(10, 3)).astype("float32")
Y: Any = np.random.default_rng(1).normal(size=(10, 4)).astype("float32")


def square_loss(net: Any, x: Any, y: Any) -> jax.Array:
    return ((net(x) - y) ** 2).mean()


def by_nnx(net: Any, *args: Any) -> tuple[jax.Array, list[jax.Array]]:
    value, gradients = nnx.value_and_grad(square_loss)(net, *args)
    return value, jax.tree.leaves(gradients)


def test_gradients_are_those_of_nnx() -> None:
    net = MLP(nnx.Rngs(0))
    value, expected = by_nnx(net, X, Y)
    gradients, got = px.GradValues(square_loss, net)(X, Y)
    np.testing.assert_allclose(got, value, rtol=1e-6)
    for g, e in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(g, e, rtol=1e-5, atol=1e-7)


def test_gradients_of_inputs_with_and_without_those_of_variables() -> None:
    net = MLP(nnx.Rngs(0))
    expected = jax.grad(lambda x: square_loss(net, x, Y))(X)
    (of_net, of_x), _ = px.GradValues(square_loss, net, argnums=0)(X, Y)
    assert len(of_net) == 4
    np.testing.assert_allclose(of_x, expected, rtol=1e-6)
    (of_x, of_y), _ = px.GradValues(square_loss, net, wrt=None, argnums=(0, 1))(X, Y)
    np.testing.assert_allclose(of_x, expected, rtol=1e-6)
    np.testing.assert_allclose(of_y, jax.grad(lambda y: square_loss(net, X, y))(Y), rtol=1e-6)


def test_wrt_chooses_by_type_name_and_collection() -> None:
    net = MLP(nnx.Rngs(0))
    biases = px.GradValues(square_loss, net, wrt=lambda name, _: name.endswith("bias"))(X, Y)[0]
    assert [g.ndim for g in biases] == [1, 1]
    kernels = px.variables(net).subset(lambda name, _: name.endswith("kernel"))
    assert px.GradValues(square_loss, net, wrt=kernels)(X, Y)[0].names() == kernels.names()
    assert len(px.GradValues(square_loss, net, wrt=(nnx.Param, nnx.BatchStat))(X, Y)[0]) == 4


def test_state_written_in_the_loss_survives_and_is_written_once() -> None:
    net = Normed(nnx.Rngs(0))
    reference = Normed(nnx.Rngs(0))
    px.GradValues(square_loss, net)(X, Y)
    reference(X)
    for got, expected in zip(px.variables(net), px.variables(reference), strict=True):
        np.testing.assert_allclose(got[...], expected[...], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("loss", [lambda net, x: net(x), lambda net, x: net(x).sum().astype(int)], ids=["rows", "int"])
def test_a_loss_must_be_a_float_scalar(loss: Any) -> None:
    with pytest.raises(TypeError, match=r"scalar-output|grad requires real"):
        px.GradValues(loss, MLP(nnx.Rngs(0)))(X)


@pytest.mark.parametrize("wrap", [jax.jit, jax.grad], ids=["jit", "grad"])
@pytest.mark.parametrize("rows", [8, 3])
def test_jax_transforms_what_was_never_called(wrap: Any, rows: int) -> None:
    net, x = MLP(nnx.Rngs(0)), X[:rows]
    fast = px.Parallel(net)
    got = wrap(lambda x: (fast(x) ** 2).sum())(x)
    np.testing.assert_allclose(got, wrap(lambda x: (net(x) ** 2).sum())(x), rtol=1e-4, atol=1e-5)
