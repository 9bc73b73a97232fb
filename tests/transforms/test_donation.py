"""``donate=True``: the variables' memory is used again, over several steps, and nobody else's is."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import paraxis as px
from tests._support import assert_close, values
from tests.transforms._models import MLP, Counter, arrays_in, assert_untouched

WRAPPERS = [px.Jit, px.Parallel]
X, Y = values(16, 3), values(16, 4, seed=1)
IDS = ["Jit", "Parallel"]


def train(net: MLP, opt: px.Optimizer, x: jax.Array, y: jax.Array, *, rate: float) -> jax.Array:
    loss, gradients = nnx.value_and_grad(lambda net: ((net(x) - y) ** 2).mean())(net)
    opt(rate, gradients)
    return loss


def train_on_devices(net: MLP, opt: px.Optimizer, x: jax.Array, y: jax.Array, *, rate: float) -> jax.Array:
    loss, gradients = nnx.value_and_grad(lambda net: ((net(x) - y) ** 2).mean())(net)
    opt(rate, px.pmean(gradients, "device"))
    return px.pmean(loss, "device")


STEPS: dict[str, Callable[..., Any]] = {
    "Jit": lambda net, opt: px.Jit(train, net, opt, donate=True),
    "Parallel": lambda net, opt: px.Parallel(train_on_devices, net, opt, reduce="same", donate=True),
}


def weights(net: MLP) -> list[jax.Array]:
    return [v[...] for layer in (net.first, net.last) for v in (layer.kernel, layer.bias)]


def trained_by_hand(steps: int) -> tuple[list[jax.Array], list[float]]:
    """Adam with a decaying rate on one device, the network written out."""

    def loss(p: list[jax.Array]) -> jax.Array:
        return ((jax.nn.relu(X @ p[0] + p[1]) @ p[2] + p[3] - Y) ** 2).mean()

    losses: list[float] = []
    params: Any = weights(MLP(nnx.Rngs(0)))
    state = optax.adam(0.1).init(params)
    for step in range(steps):
        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optax.adam(0.1 / (step + 1)).update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
    return params, losses


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", STEPS)
def test_several_donated_steps_are_those_by_hand_and_give_all_old_memory_away(kind: str) -> None:
    net = MLP(nnx.Rngs(0))
    opt = px.Optimizer(net, optax.adam)
    step, losses = STEPS[kind](net, opt), []
    for number in range(5):
        old = arrays_in(net, opt)
        losses.append(float(step(X, Y, rate=0.1 / (number + 1))))
        assert not any(a.is_deleted() for a in arrays_in(net, opt))
        # The first call of Parallel brings variables to all devices, and what was on one stays there.
        assert all(a.is_deleted() for a in old) or (kind == "Parallel" and number == 0)
    expected, expected_losses = trained_by_hand(5)
    assert_close(np.array(losses), np.array(expected_losses))
    assert_close([np.asarray(w) for w in weights(net)], [np.asarray(w) for w in expected], rtol=1e-4, atol=1e-5)
    assert_close(np.asarray(px.Jit(net)(X)), np.asarray(net(X)))


@pytest.mark.parametrize("wrap", WRAPPERS, ids=IDS)
def test_variables_that_are_not_written_stay_usable(wrap: Any) -> None:
    here, there = Counter(nnx.Rngs(0)), Counter(nnx.Rngs(0))
    fast, inside = wrap(here, donate=True), wrap(lambda net, x: net.layer(x), here, donate=True)
    for call in range(1, 4):
        assert_close(np.asarray(fast(X)), np.asarray(there(X)))
        assert_close(np.asarray(inside(X)), np.asarray(there.layer(X)))
        assert_close(np.asarray(here.layer.kernel[...]), np.asarray(there.layer.kernel[...]))
        assert int(here.calls[...]) == call


@pytest.mark.parametrize("wrap", WRAPPERS, ids=IDS)
def test_an_exception_while_tracing_gives_nothing_away(wrap: Any) -> None:
    net = Counter(nnx.Rngs(0))
    fast = wrap(
        lambda net, x, w: net(x) @ w, net, donate=True, **({"batch_axis": (0, None)} if wrap is px.Parallel else {})
    )
    w = values(4, 2)
    fast(X, w)
    before = arrays_in(net)
    with pytest.raises(TypeError, match="dot_general"):
        fast(X, values(5, 2))
    assert_untouched(before, net)
    assert_close(np.asarray(fast(X, w)), np.asarray(Counter(nnx.Rngs(0)).layer(X) @ w))
    assert int(net.calls[...]) == 2
