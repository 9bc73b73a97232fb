"""Gradients where variables are shared by arguments or written on the way, and functions that JAX itself transforms."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import paraxis as px
from tests._support import assert_close, values
from tests.transforms._models import MLP, Counter, arrays_in, assert_untouched

X = values(8, 3)


def layer(seed: int) -> Any:
    return nnx.Linear(3, 3, rngs=nnx.Rngs(seed))


def tied() -> tuple[Any, Any]:
    """Two layers with one kernel, and a bias each."""
    encoder, decoder = layer(0), layer(1)
    decoder.kernel = encoder.kernel
    return encoder, decoder


def through_both(encoder: Any, decoder: Any, x: jax.Array) -> jax.Array:
    return (decoder(jnp.tanh(encoder(x))) ** 2).sum()


def by_hand(kernel: jax.Array, bias: jax.Array, other_bias: jax.Array) -> jax.Array:
    return ((jnp.tanh(X @ kernel + bias) @ kernel + other_bias) ** 2).sum()


def tied_gradients(encoder: Any, decoder: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    arrays = encoder.kernel[...], encoder.bias[...], decoder.bias[...]
    return jax.grad(by_hand, argnums=(0, 1, 2))(*arrays)


def by_kind(gradients: Any) -> dict[str, jax.Array]:
    return {name.rpartition(".")[2]: g for name, g in gradients.items()}


def test_a_tied_weight_is_in_the_gradient_of_the_one_module_that_is_asked_for() -> None:
    encoder, decoder = tied()
    kernel, bias, other_bias = tied_gradients(encoder, decoder)
    of_second = px.grad(through_both, argnums=1)(encoder, decoder, X)
    assert_close(by_kind(of_second), {"bias": other_bias, "kernel": kernel})
    of_first = px.grad(through_both, argnums=0)(encoder, decoder, X)
    assert_close(by_kind(of_first), {"bias": bias, "kernel": kernel})
    (alone,) = px.grad(through_both, argnums=(1,))(encoder, decoder, X)
    assert_close(by_kind(alone), by_kind(of_second))


def test_a_tied_weight_is_once_in_the_gradients_of_both_modules_in_the_first() -> None:
    encoder, decoder = tied()
    kernel, bias, other_bias = tied_gradients(encoder, decoder)
    first, second = px.grad(through_both, argnums=(0, 1))(encoder, decoder, X)
    assert_close(by_kind(first), {"bias": bias, "kernel": kernel})
    assert_close(by_kind(second), {"bias": other_bias})
    compiled = px.Jit(lambda e, d, x: px.grad(through_both, argnums=(0, 1))(e, d, x), encoder, decoder)(X)
    assert_close([by_kind(g) for g in compiled], [by_kind(first), by_kind(second)])


def test_an_optimizer_of_several_modules_takes_their_gradients_together() -> None:
    def loss(modules: tuple[Any, Any], x: jax.Array) -> jax.Array:
        return ((modules[0](x) - 2 * modules[1](x)) ** 2).mean()

    def plain(params: Any, x: jax.Array) -> jax.Array:
        return (((x @ params[0][0] + params[0][1]) - 2 * (x @ params[1][0] + params[1][1])) ** 2).mean()

    a, b = layer(0), layer(1)
    params = [(m.kernel[...], m.bias[...]) for m in (a, b)]
    rule = optax.sgd(0.1, momentum=0.9)
    opt, state = px.Optimizer((a, b), optax.sgd, momentum=0.9), rule.init(params)
    for _ in range(3):
        opt(0.1, px.grad(loss)((a, b), X))
        updates, state = rule.update(jax.grad(plain)(params, X), state, params)
        params = optax.apply_updates(params, updates)
    assert_close([(m.kernel[...], m.bias[...]) for m in (a, b)], params)


def test_an_optimizer_of_several_modules_still_refuses_the_gradients_of_others() -> None:
    a, b = layer(0), nnx.Linear(3, 3, use_bias=False, rngs=nnx.Rngs(1))
    opt = px.Optimizer((a, b), optax.sgd)
    before = arrays_in(a, b)
    of_one = px.grad(lambda a, x: a(x).sum())(a, X)
    with pytest.raises(px.ShapeError, match=r"gradients are not those of the variables.*same module and the same wrt"):
        opt(0.1, of_one)
    assert_untouched(before, a, b)


# --- transforms of JAX around ours -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [8, 3])
def test_jit_of_jax_around_a_parallel_that_was_never_called(rows: int) -> None:
    net, x = MLP(nnx.Rngs(0)), values(rows, 3)
    before = arrays_in(net)
    fast = px.Parallel(net)
    outer = jax.jit(lambda x: fast(x) * 2)
    for _ in range(2):
        assert_close(np.asarray(outer(x)), np.asarray(net(x) * 2))
        assert_untouched(before, net)
    assert_close(np.asarray(fast(x)), np.asarray(net(x)))


def test_grad_of_jax_around_a_parallel_that_was_never_called() -> None:
    net = MLP(nnx.Rngs(0))
    before = arrays_in(net)
    fast = px.Parallel(lambda net, x: (net(x) ** 2).mean(), net, reduce="mean")
    expected = jax.grad(lambda x: (net(x) ** 2).mean())(X)
    assert_close(np.asarray(jax.jit(jax.grad(fast))(X)), np.asarray(expected))
    assert_untouched(before, net)


class Averaged(nnx.Module):
    """A weight, and the last sum of what it gave, which is traced if the input is."""

    def __init__(self) -> None:
        self.weight, self.seen = nnx.Param(jnp.asarray(2.0)), nnx.Variable(jnp.asarray(0.0))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.seen[...] = (self.weight[...] * x**2).mean()
        return self.weight[...] * x**2


LINE = r"px\.grad\(f, argnums=1\)\(net, x\)"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("inner", [px.Jit, px.Parallel], ids=["Jit", "Parallel"])
def test_state_written_under_a_derivative_of_an_input_shows_how_to_give_the_module(inner: Any) -> None:
    net = Averaged()
    fast = inner(net, sync={nnx.Variable: "mean"}) if inner is px.Parallel else inner(net)
    outers: dict[str, Any] = {
        "px.grad": lambda: px.grad(lambda x: fast(x).sum())(X),
        "px.value_and_grad": lambda: px.value_and_grad(lambda x: fast(x).sum())(X),
        "px.GradValues": lambda: px.GradValues(lambda x: fast(x).sum(), argnums=0)(X),
        "jax.grad": lambda: jax.grad(lambda x: fast(x).sum())(X),
        "jax.jvp": lambda: jax.jvp(fast, (X,), (X,)),
    }
    before = arrays_in(net)
    for take in outers.values():
        with pytest.raises(px.StateError, match=rf"variable \(Averaged\)\.seen would be written.*give it the.*{LINE}"):
            take()
        assert_untouched(before, net)


def test_the_line_that_the_message_shows_gives_the_gradient_and_keeps_the_state() -> None:
    net = Averaged()
    fast = px.Jit(net)
    gradient = px.grad(lambda net, x: fast(x).sum(), argnums=1)(net, X)
    assert_close(gradient, 4 * X)
    assert_close(net.seen[...], jnp.mean(2 * X**2))
    counter = Counter(nnx.Rngs(0))
    assert_close(px.grad(lambda net, x: net(x).sum(), argnums=1)(counter, X), jnp.ones((8, 4)) @ counter.layer.kernel.T)
    assert int(counter.calls[...]) == 1
