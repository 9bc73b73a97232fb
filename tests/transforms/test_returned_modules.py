"""A result that is a part of the modules would be a copy, apart from the one outside: refused; what is new is not."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx

import paraxis as px

X = jnp.ones((8, 2))


class Net(nnx.Module):
    def __init__(self) -> None:
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(0))])
        self.count = nnx.Variable(jnp.array(0))

    def __call__(self, x: Any) -> Any:
        return self.layers[0](x)


WRAPS: dict[str, Callable[[Any, Net], Callable[[Any], Any]]] = {
    "Jit": lambda f, net: px.Jit(f, net),
    "Vectorize": lambda f, net: px.Vectorize(f, net, batch_axis=(0,)),
    "Parallel": lambda f, net: px.Parallel(f, net),
    "GradValues": lambda f, net: px.GradValues(lambda net, x: (net(x).sum(), f(net, x)), net),
    "Jit of Jit": lambda f, net: px.Jit(px.Jit(f, net)),
}


def counted(f: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    def call(net: Any, x: Any) -> Any:
        net.count[...] += 1
        return f(net)

    return call


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_part_of_what_was_given_is_refused_and_nothing_is_written(wrap: str) -> None:
    for f in (lambda net: net, lambda net: {"found": (X, net.layers[0])}, lambda net: net.layers[0].bias):
        net = Net()
        message = (
            rf"{wrap.rpartition(' ')[2]}: the function returned a module that it was given, .*nnx\.state\(module\)"
        )
        with pytest.raises(px.StateError, match=message):
            WRAPS[wrap](counted(f), net)(X)
        assert int(net.count[...]) == 0


def test_new_modules_copies_that_were_made_on_purpose_and_values_are_returned() -> None:
    net = Net()
    made: Any = px.Jit(lambda net: nnx.Linear(2, 3, rngs=nnx.Rngs(1)), net)()
    assert made.kernel.shape == (2, 3)
    copied: Any = px.Jit(lambda net: nnx.clone(net.layers[0]), net)()
    layer: Any = net.layers[0]
    layer.bias[...] += 1.0
    assert copied.bias[...].tolist() == [0.0, 0.0]
    state: Any = px.Jit(lambda net: nnx.state(net.layers[0]), net)()
    assert state["bias"][...].tolist() == [1.0, 1.0]
