"""Models that are pytrees, with functions, text and numbers among their leaves, give what they give by themselves."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import paraxis as px
from tests._support import assert_close, axis_on, values


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Scaled:
    """A class of a user's: two floating arrays, one of integers, and leaves that are no arrays."""

    w: jax.Array
    b: jax.Array
    order: jax.Array
    kind: str
    activation: Callable[[jax.Array], jax.Array]
    power: int
    slope: float
    inference: bool = False

    def __call__(self, x: jax.Array) -> jax.Array:
        assert isinstance(self.slope, float)
        assert self.inference or self.kind == "tanh"
        y = self.activation(x @ self.w)[self.order] if self.kind == "tanh" else x
        return self.slope * (y + self.b) ** self.power


def make_scaled(key: jax.Array) -> Scaled:
    return Scaled(jax.random.normal(key, (3, 2)), jnp.ones(2), jnp.array([1, 0]), "tanh", jnp.tanh, 2, 0.5)


def make_equinox(key: jax.Array) -> eqx.nn.Sequential:
    return eqx.nn.Sequential(
        [eqx.nn.MLP(3, 2, 4, 1, key=key), eqx.nn.Dropout(0.5, inference=True), eqx.nn.Lambda(jnp.tanh)]
    )


MAKES = pytest.mark.parametrize("make", [make_equinox, make_scaled])


def same(actual: Any, expected: Any) -> None:
    """Trees of one kind, the same in what is fixed, close in their arrays."""
    is_array = lambda x: isinstance(x, (jax.Array, np.ndarray))  # noqa: E731
    (a, fixed_a), (b, fixed_b) = (eqx.partition(x, is_array) for x in (actual, expected))
    assert eqx.tree_equal(fixed_a, fixed_b)
    assert_close(jax.tree.map(jnp.asarray, a), jax.tree.map(jnp.asarray, b))


@eqx.filter_jit
def rows_of(model: Any, x: jax.Array) -> jax.Array:
    return jax.vmap(model)(x)


def mean_loss(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((rows_of(model, x) - y) ** 2)


OPTIMIZER = optax.adam(1e-2)


@eqx.filter_jit
def plain_step(model: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any, jax.Array]:
    loss, gradient = eqx.filter_value_and_grad(mean_loss)(model, x, y)
    updates, opt_state = OPTIMIZER.update(gradient, opt_state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), opt_state, loss


def trained_alone(model: Any, x: jax.Array, y: jax.Array, steps: int) -> tuple[Any, jax.Array]:
    """Equinox's own loop, on one device."""
    opt_state, loss = OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array)), jnp.zeros(())
    for _ in range(steps):
        model, opt_state, loss = plain_step(model, opt_state, x, y)
    return model, loss


def halved(model: Any) -> Any:
    return jax.tree.map(lambda a: a / 2 if eqx.is_inexact_array(a) else a, model)


@pytest.mark.sampled(1)
@MAKES
def test_verbs_take_models_and_give_models(make: Callable[..., Any]) -> None:
    axis, model, x = axis_on(8, 10), make(jax.random.key(0)), values(10, 3)

    @jax.jit
    def loss(arrays: Any, x: jax.Array) -> jax.Array:
        copies = px.broadcast(eqx.combine(arrays, fixed), axis)
        return px.reduce_mean(px.map_fn(lambda model, x: model(x).sum(), (copies, x), axis), axis)

    arrays, fixed = eqx.partition(model, eqx.is_inexact_array)
    expected = jax.jit(jax.grad(lambda arrays: rows_of(eqx.combine(arrays, fixed), x).sum() / 10))(arrays)
    assert_close(jax.grad(loss)(arrays, x), expected)
    mapped = px.map_fn(lambda model: px.pmax(halved(model), axis), (px.broadcast(model, axis),), axis)
    same(px.gather(mapped, axis), jax.tree.map(lambda a: np.stack([a] * 10) if eqx.is_array(a) else a, halved(model)))
    same(px.reduce_max(px.scatter(mapped, axis), axis), halved(model))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("make", [make_scaled, make_equinox])
def test_transforms_take_models_bound_and_when_called(make: Callable[..., Any]) -> None:
    model, x, y = make(jax.random.key(0)), values(16, 3), values(16, 2, seed=1)
    expected = rows_of(model, x)
    assert_close(px.Jit(model)(x[0]), expected[0])
    assert_close(px.Parallel(px.Vectorize(model))(x), expected)

    def step(model: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
        loss, gradient = px.pmean(eqx.filter_value_and_grad(mean_loss)(model, x, y), "device")
        updates, opt_state = OPTIMIZER.update(gradient, opt_state)
        return eqx.apply_updates(model, updates), opt_state, loss

    fast = px.Parallel(step, batch_axis=(None, None, 0, 0), reduce="same")
    trained, opt_state, loss = model, OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array)), jnp.zeros(())
    for _ in range(3):
        trained, opt_state, loss = fast(trained, opt_state, x, y)
    same((trained, loss), trained_alone(model, x, y, 3))


@pytest.mark.sampled(1)
@MAKES
def test_training_of_a_model_is_that_of_a_plain_loop(make: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    model, x, y = make(jax.random.key(0)), values(13, 3), values(13, 2, seed=1)
    step = px.train_step(lambda model, batch: mean_loss(model, batch["x"], batch["y"]))
    first = px.TrainState.create(model, OPTIMIZER)
    # Another process goes on where this one ended: with a model made anew, of which only the form counts.
    again = px.TrainState.create(make(jax.random.key(7)), OPTIMIZER)
    for state, epochs in ((first, 2), (again, 3)):
        fitted = px.fit(state, step, [{"x": x, "y": y}], epochs=epochs, checkpoint=tmp_path, progress=False)
        same(fitted.state.model(), trained_alone(model, x, y, epochs)[0])


def test_a_model_is_evaluated_in_inference_mode() -> None:
    x = values(8, 3)
    net = eqx.nn.Sequential([eqx.nn.Linear(3, 2, key=jax.random.key(0)), eqx.nn.Dropout(0.5)])
    state = px.TrainState.create(net, OPTIMIZER)
    metrics = px.eval_step(lambda model, batch: {"mean": rows_of(model, batch)})(state, x)
    np.testing.assert_allclose(float(metrics["mean"]), rows_of(net[0], x).mean(), rtol=1e-5)
    with pytest.raises(RuntimeError, match="Dropout requires a key"):
        px.train_step(lambda model, batch: rows_of(model, batch), donate=False)(state, x)
    assert state.model()[1].inference is False
    ens = px.ensemble(lambda key: net, 1, 0, apply=rows_of)
    assert_close(ens.predict(x, average="mean"), rows_of(net[0], x))


def test_a_named_tuple_is_one_argument() -> None:
    """An optimizer's state is one."""
    axis, params = axis_on(2, 3), values(3, 2)
    states: Any = jax.vmap(optax.scale_by_adam().init)(params)
    assert issubclass(type(states), tuple)
    assert_close(px.map_fn(lambda state: state.mu + state.count, states, axis), states.mu + states.count[:, None])
