"""What a state is made from, and what is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.jax_utils import replicate

import paraxis as px
from tests._steps import LinenNet, Net, assert_same_bits, loss, plain_loss, plain_params, rows

SGD = optax.sgd(0.1)


def plain_state(**options: Any) -> px.TrainState:
    return px.TrainState.create(plain_params(), SGD, **options)


def test_train_state_gives_its_module_back() -> None:
    net, linen, x = Net(), LinenNet(), rows(3)["x"]
    state = px.TrainState.create(net, SGD)
    back = state.model()
    assert_same_bits(nnx.to_pure_dict(nnx.state(back)), nnx.to_pure_dict(nnx.state(net)))
    back.first.kernel[...] += 1
    assert_same_bits(state.params["first"]["kernel"], net.first.kernel[...])
    state = px.TrainState.create(linen, SGD, key=jax.random.key(1), sample={"x": x, "train": False}, ema=0.9)
    expected = linen.apply(linen.init(jax.random.key(1), x), x)
    for model in (state.model(), state.model(ema=True)):
        assert_same_bits(model(x), expected)


def variables() -> Any:
    return LinenNet().init(jax.random.key(0), jnp.zeros((1, 3)), train=False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: px.TrainState.create(nnx.Dropout(0.5), SGD), "no arrays to train"),
        (lambda: px.TrainState.create(plain_params(), 0.1), r"optimizer is 0\.1; write optimizer=optax\.adam"),
        (lambda: px.TrainState.create(Net(), SGD, mutable={"a": 1}), "has mutable state of its own"),
        (lambda: px.TrainState.create({"f": Net()}, SGD), "Net in a dict would be trained like parameters"),
        (lambda: px.TrainState.create(nnx.state(Net()), SGD), "would be trained like parameters"),
        (lambda: px.TrainState.create(variables(), SGD), "batch_stats in a dict would be trained"),
        (lambda: jax.jit(px.train_step(plain_loss))(plain_state(), rows(4)), r"outside of jax\.jit"),
        (lambda: px.train_step(plain_loss)(replicate(plain_state()), rows(4)), "and not replicated"),
    ],
)
def test_train_state_refuses_what_makes_no_state_or_step(make: Any, message: str) -> None:
    with pytest.raises(px.StateError, match=message):
        make()


def test_train_state_that_a_step_has_consumed_says_so() -> None:
    state = plain_state()
    px.train_step(plain_loss)(state, rows(4))
    for use in (px.train_step(plain_loss), px.eval_step(plain_loss), lambda state, batch: state.model()):
        with pytest.raises(px.StateError, match="were donated to an earlier step"):
            use(state, rows(4))


def writes(model: Any, batch: Any) -> jax.Array:
    model.first.kernel[...] = model.first.kernel[...] / 2
    return loss(model, batch)


def per_device(params: Any, batch: Any) -> jax.Array:
    return jax.lax.pmean(jnp.mean(plain_loss(params, batch)), "batch")


@pytest.mark.parametrize(
    ("fn", "kind", "message"),
    [
        (lambda p, b: b["x"][:3, 0] * p["b"][0], px.DataError, r"has shape \(3,\), but there are 4 rows"),
        (lambda p, b: jnp.asarray(1), px.DataError, "a loss of int32"),
        (lambda p, b: {"loss": plain_loss(p, b)}, px.DataError, "returned dict; write return loss"),
        (lambda p, b, mutable: (plain_loss(p, b), {"a": 1}), px.StateError, "the mutable state changed its structure"),
        (lambda p, b, key: plain_loss(p, b), px.StateError, "takes a random key, but the state has none"),
        (lambda p, b: (plain_loss(p, b), {"loss": 1.0}), px.StateError, "metric 'loss' has a name that the step uses"),
        (per_device, px.AxisError, "leave lax.pmean out"),
        (writes, px.StateError, "the loss function wrote a parameter"),
    ],
)
def test_train_step_refuses_a_loss_function_that_gives_no_loss_and_keeps_the_state(
    fn: Any, kind: type[Exception], message: str
) -> None:
    state = px.TrainState.create(Net(norm=False, dropout=0), SGD) if fn is writes else plain_state()
    before = jax.tree.map(np.asarray, state.params)
    with pytest.raises(kind, match=message):
        px.train_step(fn)(state, rows(4))
    assert_same_bits(state.params, before)


@pytest.mark.parametrize(
    ("batch", "kind", "message"),
    [
        ({"x": np.ones((3, 2)), "y": np.ones(4)}, px.DataError, r"as many rows each, .*'x': \(3, 2\), 'y': \(4,\)"),
        ({"x": np.ones((0, 2))}, px.DataError, r"at least one; .*\(0, 2\)"),
        ({"x": np.array([2**40])}, px.DataError, "holds 1099511627776"),
    ],
)
def test_train_step_refuses_what_is_no_batch(batch: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        px.train_step(plain_loss)(plain_state(), batch)


def test_mean_adds_up_and_is_none_without_weight() -> None:
    assert float(px.Mean(6.0, 3.0) + px.Mean(0.0, 1.0)) == 1.5
    assert f"{px.Mean(1.0, 4.0):.3f}" == "0.250"
    assert np.isnan(float(px.Mean(0.0, 0.0)))
    for weight in (float("nan"), float("inf"), -1.0):
        with pytest.raises(ValueError, match=r"px\.Mean: weight must be the sum of the weights"):
            float(px.Mean(6.0, weight, 2.0))
