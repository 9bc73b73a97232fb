"""``px.Jit`` computes what the function computes, writes back what it wrote, and otherwise leaves all as it was."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import paraxis as px
from tests._modules import MLP, Tied, arrays_in, assert_untouched
from tests._support import assert_close, values


class Scaler(nnx.Module):
    def __init__(self) -> None:
        self.scale = nnx.Param(values(3))

    def scaled(self, x: jax.Array, by: float = 1.0) -> jax.Array:
        return self.scale[...] * x * by

    def __call__(self, x: jax.Array, *, negate: bool = False) -> jax.Array:
        return -self.scaled(x) if negate else self.scaled(x)


def test_jit_computes_in_every_form_what_is_computed_without_it() -> None:
    x, net, scaler = values(5, 3), MLP(nnx.Rngs(0)), Scaler()
    w = np.asarray(scaler.scale[...])
    assert_close(px.Jit(net)(x), net(x))
    assert_close(px.Jit(lambda net, x: net(x).sum(), net)(x), net(x).sum())
    assert_close(px.Jit(lambda net, scaler, x: net(scaler(x)), net, scaler)(x), net(scaler(x)))
    assert_close(px.Jit(lambda nets, x: nets["a"](nets["b"][0](x)), {"a": net, "b": [scaler]})(x), net(scaler(x)))
    assert_close(px.Jit(scaler.scaled)(x), jnp.asarray(w * x))
    assert_close(px.Jit(scaler.scaled)(x, by=3.0), jnp.asarray(w * x * 3))
    assert_close(px.Jit(lambda v, x: v[...] * x, scaler.scale)(x), jnp.asarray(w * x))


def _static(net: Scaler, x: jax.Array, kind: str, power: int = 1, flag: bool = False) -> jax.Array:
    assert isinstance(power, int)
    assert isinstance(flag, bool)
    return (net(x, negate=flag) ** power) + (1.0 if kind == "plus" else 0.0)


def test_jit_takes_static_arguments_by_number_or_name_as_jax_jit_does() -> None:
    net, x = Scaler(), values(2, 3)
    plain = np.asarray(net.scale[...]) * np.asarray(x)
    for fn in (
        px.Jit(_static, net, static_argnums=(1, 2, 3)),
        px.Jit(_static, net, static_argnames=("kind", "power", "flag")),
    ):
        for got, expected in (
            (fn(x, "plus", 2), plain**2 + 1),
            (fn(x, "plus", power=2), plain**2 + 1),
            (fn(x=x, kind="minus", power=3), plain**3),
            (fn(x, power=3, kind="plus", flag=True), -(plain**3) + 1),
        ):
            assert_close(got, jnp.asarray(expected))


def test_jit_keeps_tied_weights_one_variable() -> None:
    def step(net: Tied, x: jax.Array) -> jax.Array:
        net.encode.bias[...] += 1.0
        net.decode.kernel[...] *= 2.0
        return net(x)

    here, there, x = Tied(nnx.Rngs(0)), Tied(nnx.Rngs(0)), values(2, 3)
    assert_close(px.Jit(step, here)(x), step(there, x))
    assert here.encode is here.decode
    assert_close(arrays_in(here), arrays_in(there))
    shared: Any = nnx.Linear(3, 3, rngs=nnx.Rngs(1))
    other: Any = nnx.Linear(3, 3, rngs=nnx.Rngs(2))
    other.kernel = shared.kernel  # one variable in two modules that are bound side by side

    def both(a: nnx.Linear, b: nnx.Linear, x: jax.Array) -> jax.Array:
        a.kernel[...] += 1.0
        return b(x)

    expected = x @ (shared.kernel.get_value() + 1.0) + other.bias[...]
    assert_close(px.Jit(both, shared, other)(x), expected)
    assert other.kernel is shared.kernel


def _step(net: MLP, opt: px.Optimizer, x: jax.Array, y: jax.Array, mean: Callable[[Any], Any]) -> jax.Array:
    loss, gradients = nnx.value_and_grad(lambda net: ((net(x) - y) ** 2).mean())(net)
    opt(0.1, mean(gradients))
    return mean(loss)


WAYS = [(px.Jit, lambda x: x), (px.Parallel, lambda x: px.pmean(x, "device"))]


@pytest.mark.parametrize(("wrap", "mean"), WAYS, ids=["Jit", "Parallel"])
def test_jit_with_donation_takes_the_same_steps_and_gives_nothing_away_if_tracing_fails(wrap: Any, mean: Any) -> None:
    nets = [MLP(nnx.Rngs(0)) for _ in range(2)]
    opts = [px.Optimizer(net, optax.adam) for net in nets]
    options: dict[str, Any] = {"reduce": "same"} if wrap is px.Parallel else {}
    donated = wrap(_step, nets[0], opts[0], static_argnames="mean", donate=True, **options)
    plain = wrap(_step, nets[1], opts[1], static_argnames="mean", **options)
    x, y = values(16, 3), values(16, 4, seed=1)
    for number in range(3):
        old = arrays_in(nets[0], opts[0])
        assert_close(np.asarray(donated(x, y, mean=mean)), np.asarray(plain(x, y, mean=mean)))
        # The first call of Parallel brings variables to all devices, and what was on one stays there.
        assert all(a.is_deleted() for a in old) or (wrap is px.Parallel and number == 0)
    before = arrays_in(nets[0], opts[0])
    with pytest.raises(TypeError, match="incompatible shapes"):
        donated(x, values(16, 5), mean=mean)
    assert_untouched(before, nets[0], opts[0])
    assert_close(jax.tree.map(np.asarray, before), jax.tree.map(np.asarray, arrays_in(nets[1], opts[1])))
    assert not x.is_deleted()
    for _ in range(2):  # variables that are only read come back, too
        assert_close(np.asarray(wrap(nets[0], donate=True)(x)), np.asarray(nets[1](x)))
