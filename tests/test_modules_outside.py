"""Modules from outside, given late, or returned; copies of wrapped functions, and wrapped functions in others."""

import copy
import functools
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import paraxis as px
from tests._modules import MLP, Counter, arrays_in, assert_untouched, host
from tests._support import assert_close, values

NET: Any = nnx.Linear(3, 4, rngs=nnx.Rngs(5))
X = values(8, 3)
WRAPPERS = [px.Jit, px.Parallel]


class Trainer:
    """Names an attribute and a parameter as a global is named."""

    def __init__(self) -> None:
        self.NET, self.scale = NET, jnp.array(1.0)
        self.step = px.Jit(self.train, self.NET)

    def train(self, NET: Any, x: jax.Array) -> jax.Array:
        return NET(x) * jnp.ones(self.NET.kernel.shape)[0] * self.scale

    def predict(self, x: jax.Array) -> jax.Array:
        return x.sum() + self.NET(x)

    def bias(self, x: jax.Array) -> jax.Array:
        return jax.vmap(lambda row: row.sum() + self.NET.bias)(x)


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_module_from_outside_is_refused_with_the_line_to_write(wrap: Any) -> None:
    net: Any = MLP(nnx.Rngs(0))
    gradient = px.GradValues(lambda net, x: net(x).sum(), net)
    opt, nets, named = px.Optimizer(net, optax.sgd), [net], {"a": net}
    cases = {
        "net": (
            *(lambda x: net(x), lambda x: net.first(x), lambda x: x + net.first.bias[...]),
            *(lambda x: x @ net.first.kernel.get_value(), lambda x: x @ net.first.kernel.T),
        ),
        "nets": (lambda x: nets[0](x),),
        "named": (lambda x: [each(x) for each in named.values()],),
        "self.NET": (Trainer().predict, Trainer().bias),
        "gradient": (lambda x: gradient(x), lambda net, x: gradient(x)),
        "opt": (lambda x: opt(0.1, [x] * 4),),
        "NET": (lambda x: NET(x), lambda x: jax.vmap(lambda row: NET(row))(x)),
    }
    for name, functions in cases.items():
        for fn in functions:
            with pytest.raises(
                px.StateError, match=rf"uses '{name}' from outside, .*px\.{wrap.__name__}\(lambda net, …: …, {name}\)"
            ):
                wrap(fn, *([net] if inspect.signature(fn).parameters.keys() >= {"net"} else []))
    for fn in (functools.partial(call, net), lambda x, net=net: net(x)):
        with pytest.raises(px.StateError, match=r"is or holds a module.*\(f, net\)"):
            wrap(fn)


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_sizes_other_names_and_given_modules_are_no_modules_from_outside(wrap: Any) -> None:
    assert wrap(lambda x: x @ jnp.ones(NET.kernel.shape, NET.kernel.dtype))(X).shape == (8, 4)
    assert_close(Trainer().step(X), NET(X))
    assert_close(wrap(lambda NET, x: jax.vmap(lambda row: NET(row))(x), NET)(X), NET(X))
    assert_close(px.Vectorize(lambda x: NET(x))(X), NET(X))
    assert_close(px.GradValues(lambda x: NET(x).sum(), argnums=0)(X)[0], jnp.ones((8, 4)) @ NET.kernel[...].T)


def call(net: Counter, x: jax.Array) -> jax.Array:
    return net(x)


def loss(net: Counter, x: jax.Array, scale: float = 1.0) -> jax.Array:
    return net(x).sum() * scale


def test_wrapped_modules_are_copied_and_shared_by_shallow_copies() -> None:
    net = Counter(nnx.Rngs(0))
    for fn in (px.Jit(call, net), px.Jit(px.Jit(net)), px.Vectorize(net), px.GradValues(loss, net)):
        for copied in (copy.deepcopy(fn), pickle.loads(pickle.dumps(fn)), nnx.clone(fn)):
            calls = int(net.calls[...])
            assert_close(jax.tree.leaves(copied(X)), jax.tree.leaves(fn(X)))
            assert int(net.calls[...]) == calls + 1
        shallow = copy.copy(fn)
        shallow(X)
        assert int(net.calls[...]) == calls + 2


LATE = [px.Jit(call), px.Parallel(call), px.Vectorize(call, batch_axis=(None, 0)), px.GradValues(loss, argnums=1)]


@pytest.mark.parametrize("fn", LATE, ids=repr)
def test_a_module_given_when_calling_is_refused_and_is_left_as_it_was(fn: Any) -> None:
    net = Counter(nnx.Rngs(0))
    before = arrays_in(net)
    with pytest.raises(px.StateError, match=r"is or holds a module.*would be lost.*\(f, net\)"):
        fn(net, X)
    assert_untouched(before, net)


def test_a_function_that_jax_has_compiled_is_refused_if_it_is_to_have_modules() -> None:
    with pytest.raises(px.StateError, match=r"compiled by jax\.jit already.*f\.__wrapped__"):
        px.Jit(jax.jit(call), Counter(nnx.Rngs(0)))
    assert_close(px.Jit(jax.jit(lambda x: x * 2))(X), X * 2)


def noisy(net: Any, x: jax.Array, key: Any) -> jax.Array:
    return x + jax.random.normal(jnp.ravel(key)[0])


@pytest.mark.parametrize("wrap", [px.Vectorize, px.Parallel], ids=["rows", "devices"])
def test_one_key_for_all_is_refused_unless_batch_axis_says_so(wrap: Any) -> None:
    net, key, zeros = MLP(nnx.Rngs(0)), jax.random.key(5), jnp.zeros(8)
    for give in (lambda f: f(zeros, key), lambda f: f(zeros, key=key)):
        with pytest.raises(px.DataError, match=r"is one random key.*jax\.random\.split\(key, rows\)"):
            give(wrap(noisy, net))
    assert_close(
        jax.device_get(wrap(noisy, net, batch_axis=(0, None))(zeros, key)), jnp.full(8, jax.random.normal(key))
    )


WRAPS: dict[str, Callable[[Any, Counter], Callable[[Any], Any]]] = {
    "Jit": lambda f, net: px.Jit(f, net),
    "Vectorize": lambda f, net: px.Vectorize(f, net, batch_axis=(0,)),
    "Parallel": lambda f, net: px.Parallel(f, net),
    "GradValues": lambda f, net: px.GradValues(lambda net, x: (net(x).sum(), f(net, x)), net),
}


@pytest.mark.parametrize("wrap", WRAPS)
def test_wrapped_modules_refuse_a_part_of_what_was_given_and_write_nothing(wrap: str) -> None:
    for part in (lambda net: net, lambda net: {"found": (X, net.layer)}, lambda net: net.layer.bias):
        net = Counter(nnx.Rngs(0))
        message = rf"{wrap}: the function returned a module that it was given, .*nnx\.state\(module\)"
        with pytest.raises(px.StateError, match=message):
            WRAPS[wrap](lambda net, x, part=part: (net(x), part(net)), net)(X)
        assert int(net.calls[...]) == 0


NESTED = {"Jit": px.Jit, "Parallel": px.Parallel, "Vectorize": px.Vectorize}
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
@pytest.mark.parametrize("outer", NESTED)
@pytest.mark.parametrize("inner", NESTED)
def test_wrapped_modules_in_two_transforms_in_any_order_are_written_once(outer: str, inner: str, style: str) -> None:
    net = Counter(nnx.Rngs(0))
    x = values(3, 8, 3) if outer == "Vectorize" else values(8, 3)
    fn = STYLES[style](NESTED[outer], NESTED[inner], net)
    kernel = net.layer.kernel.get_value()
    for n in (1, 2, 3):
        assert_close(host(fn(x)), _linear(net, x))
        assert net.calls.get_value() == n
        net.layer.bias[...] = values(4, seed=n)
    assert "Parallel" in (outer, inner) or net.layer.kernel.get_value() is kernel
