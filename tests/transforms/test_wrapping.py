"""What is known when a function is wrapped: how it will be called, and what can never be called."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import paraxis as px
from tests.transforms._models import MLP


def loss(net: Any, x: jax.Array, y: float = 1.0, *, scale: float = 2.0) -> jax.Array:
    """The text of the function."""
    return (net(x) * y).sum() * scale


@pytest.mark.parametrize("wrap", [px.Jit, px.Parallel, px.Vectorize, px.GradValues])
def test_the_signature_is_that_of_the_function_without_its_modules(wrap: Any) -> None:
    net = MLP(nnx.Rngs(0))
    fn = wrap(loss, net)
    assert list(inspect.signature(fn).parameters) == ["x", "y", "scale"]
    assert inspect.signature(fn).parameters["y"].default == 1.0
    assert fn.__doc__ == "The text of the function."
    for of_net in (wrap(net), wrap(net.__call__), wrap(wrap(net))):
        assert list(inspect.signature(of_net).parameters) == ["x"]
    assert list(inspect.signature(wrap(lambda *modules, x: x, net)).parameters) == ["modules", "x"]
    assert "modules" in inspect.signature(wrap).parameters


@pytest.mark.parametrize("make", [px.grad, px.value_and_grad])
def test_gradients_have_the_functions_name_text_and_signature(make: Any) -> None:
    fn = make(loss)
    assert inspect.signature(fn) == inspect.signature(loss)
    assert (fn.__name__, fn.__doc__) == (f"{make.__name__}(loss)", "The text of the function.")
    for f, options, message in [
        (5, {}, rf"{make.__name__}: f must be a function, got 5; write px\.{make.__name__}\("),
        (loss, {"argnums": "net"}, r"argnums must be positions.*'net'.*argnums=\(0,\)"),
        (loss, {"argnums": -1}, "argnums must be positions.*-1"),
        (loss, {"wrt": "Param"}, "wrt must be a variable type.*wrt=nnx.Param"),
    ]:
        with pytest.raises((px.StateError, TypeError), match=message):
            make(f, **options)


@pytest.mark.parametrize("wrap", [px.Parallel, px.Vectorize])
def test_axes_that_can_never_fit_are_refused_when_wrapped(wrap: Any) -> None:
    name = wrap.__name__
    with pytest.raises(px.ShapeError, match=rf"{name}: batch_axis=\(0,\) has 1 entries for 2 arguments; .*\(0, 0\)"):
        wrap(lambda net, x, y: x, MLP(nnx.Rngs(0)), batch_axis=(0,))
    for wrong in (True, "0", (0, 1.5)):
        with pytest.raises(px.ShapeError, match=rf"{name}: batch_axis must be of integers and None"):
            wrap(lambda x, y=None: x, batch_axis=wrong)
    assert wrap(lambda x, y=None: x, batch_axis=(0,))(jnp.ones(8)).shape == (8,)
    assert wrap(lambda *xs: xs[0], batch_axis=(0,))(jnp.ones(8)).shape == (8,)
    constant = px.Parallel(lambda x, mode: x, batch_axis=(0,), static_argnums=(1,))
    assert constant(jnp.ones(8), "a").shape == (8,)
