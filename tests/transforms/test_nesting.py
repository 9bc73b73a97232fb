"""Transforms inside transforms compute what the module computes, and write each variable once."""

from collections.abc import Callable
from typing import Any

import jax
import pytest
from flax import nnx

import paraxis as px
from tests._support import assert_close, values
from tests.transforms._models import Counter, arrays_in, assert_untouched, host

WRAPPERS = {"Jit": px.Jit, "Parallel": px.Parallel, "Vectorize": px.Vectorize}
STYLES: dict[str, Callable[[Any, Any, Any], Callable[..., Any]]] = {
    "wrapped twice": lambda outer, inner, net: outer(inner(net)),
    "given as a module": lambda outer, inner, net: outer(lambda f, x: f(x), inner(net)),
    "made inside": lambda outer, inner, net: outer(lambda net, x: inner(net)(x), net),
    "given beside the module": lambda outer, inner, net: outer(lambda net, f, x: f(x), net, inner(net)),
}


def _linear(net: Counter, x: jax.Array) -> jax.Array:
    return x @ net.layer.kernel.get_value() + net.layer.bias.get_value()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("outer", WRAPPERS)
@pytest.mark.parametrize("inner", WRAPPERS)
def test_two_transforms_in_any_order_write_once(outer: str, inner: str, style: str) -> None:
    net = Counter(nnx.Rngs(0))
    x = values(3, 8, 3) if outer == "Vectorize" else values(8, 3)
    fn = STYLES[style](WRAPPERS[outer], WRAPPERS[inner], net)
    kernel = net.layer.kernel.get_value()
    for n in (1, 2, 3):
        assert_close(host(fn(x)), _linear(net, x))
        assert net.calls.get_value() == n
        net.layer.bias[...] = values(4, seed=n)
    assert "Parallel" in (outer, inner) or net.layer.kernel.get_value() is kernel


def _loss(net: Counter, x: jax.Array) -> jax.Array:
    return (net(x) ** 2).mean()


@pytest.mark.slow
def test_a_failure_after_an_inner_write_undoes_it() -> None:
    net, x = Counter(nnx.Rngs(0)), values(8, 3)
    for outer in (px.Jit, px.Parallel, px.Vectorize, px.GradValues):
        for inner in (px.Jit(net), px.Vectorize(net), px.GradValues(_loss, net)):
            before = arrays_in(net)
            fn = outer(_fails, inner)
            with pytest.raises(ValueError, match="after an inner write"):
                fn(values(3, 8, 3) if outer is px.Vectorize else x)
            assert_untouched(before, net)
            assert_close(px.Jit(net)(x), _linear(net, x))


def _fails(inner: Callable[..., Any], x: jax.Array) -> jax.Array:
    inner(x)
    raise ValueError("after an inner write")
