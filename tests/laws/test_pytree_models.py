"""Models that are pytrees, with functions, text and numbers among their leaves, give what they give by themselves."""

import dataclasses
import functools
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


def make_penzai(key: jax.Array) -> Any:
    """A model whose parameters are values, and whose arrays have named axes."""
    pz, kind = penzai_rows()
    made = pytest.importorskip("penzai.models.simple_mlp").MLP.from_config
    mlp = made(name="mlp", init_base_rng=key, feature_sizes=[3, 4, 2])
    model, variables = pz.unbind_params(mlp, freeze=True)
    return kind(pz.bind_variables(model, variables))


@functools.cache
def penzai_rows() -> tuple[Any, Any]:
    """Penzai, and a model of its own kind of a row without names."""
    pz = pytest.importorskip("penzai.pz", reason="Penzai is not installed; it is in the extra test")

    @pz.pytree_dataclass
    class Rows(pz.Struct):
        mlp: Any

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.mlp(pz.nx.wrap(x).tag("features")).unwrap("features")

    return pz, Rows


MAKES = pytest.mark.parametrize("make", [make_equinox, make_scaled, make_penzai])


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


# --- the verbs ------------------------------------------------------------------------------------------------------


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


@pytest.mark.slow
@MAKES
def test_programs_and_pmap_take_models_and_give_models(make: Callable[..., Any]) -> None:
    model, x = make(jax.random.key(0)), values(10, 3)

    @px.program(rows=10)
    def program(model: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        return model, px.reduce_mean(px.map_fn(lambda model, x: model(x), (px.broadcast(model), x)))

    given, mean = program(model, x)
    same(given, model)
    assert_close(mean, rows_of(model, x).mean(0))
    given, rows = px.pmap(lambda model, x: (model, model(x)), in_axes=(None, 0), out_axes=(None, 0))(model, x)
    same(given, model)
    assert_close(rows, rows_of(model, x))


# --- transforms -----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("make", [make_scaled, make_equinox, make_penzai])
def test_transforms_take_models_bound_and_when_called(make: Callable[..., Any]) -> None:
    model, x, y = make(jax.random.key(0)), values(16, 3), values(16, 2, seed=1)
    assert_close(px.Jit(model)(x[0]), model(x[0]))
    assert_close(px.Parallel(px.Vectorize(model))(x), rows_of(model, x))
    value, gradient = eqx.filter_value_and_grad(mean_loss)(model, x, y)
    same((value, gradient), eqx.filter_value_and_grad(mean_loss)(model, x, y))

    def step(model: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
        loss, gradient = px.pmean(eqx.filter_value_and_grad(mean_loss)(model, x, y), "device")
        updates, opt_state = OPTIMIZER.update(gradient, opt_state)
        return eqx.apply_updates(model, updates), opt_state, loss

    fast = px.Parallel(step, batch_axis=(None, None, 0, 0), reduce="same")
    trained, opt_state, loss = model, OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array)), jnp.zeros(())
    for _ in range(3):
        trained, opt_state, loss = fast(trained, opt_state, x, y)
    same((trained, loss), trained_alone(model, x, y, 3))


def test_what_is_set_in_a_bound_model_is_seen_at_the_next_call() -> None:
    model, x = make_scaled(jax.random.key(0)), values(2, 3)
    wrapped = [px.Vectorize(model), px.Jit(px.Vectorize(model)), px.Jit(px.Vectorize(model.__call__))]
    for change in ({}, {"b": jnp.zeros(2)}, {"power": 3}, {"activation": jnp.sin}):
        for name, value in change.items():
            setattr(model, name, value)
        for f in wrapped:
            assert_close(f(x), rows_of(model, x))


# --- training -------------------------------------------------------------------------------------------------------


@MAKES
def test_training_is_that_of_a_plain_loop(make: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    model, x, y = make(jax.random.key(0)), values(13, 3), values(13, 2, seed=1)
    step = px.train_step(lambda model, batch: mean_loss(model, batch["x"], batch["y"]))
    batch = {"x": x, "y": y}
    fitted = px.fit(
        px.TrainState.create(model, OPTIMIZER), step, [batch], epochs=2, checkpoint=tmp_path, progress=False
    )
    alone, _ = trained_alone(model, x, y, 2)
    same(fitted.state.model(), alone)
    # Another process goes on where this one ended: with a model made anew, of which only the form counts.
    other = px.TrainState.create(make(jax.random.key(7)), OPTIMIZER)
    fitted = px.fit(other, step, [batch], epochs=3, checkpoint=tmp_path, progress=False)
    alone, _ = trained_alone(model, x, y, 3)
    same(fitted.state.model(), alone)


def test_a_model_is_evaluated_in_inference_mode() -> None:
    x = values(8, 3)
    net = eqx.nn.Sequential([eqx.nn.Linear(3, 2, key=jax.random.key(0)), eqx.nn.Dropout(0.5)])
    state = px.TrainState.create(net, OPTIMIZER)
    evaluate = px.eval_step(lambda model, batch: {"mean": rows_of(model, batch)})
    metrics = evaluate(state, x)
    assert_close(jnp.float32(float(metrics["mean"])), rows_of(net[0], x).mean())
    with pytest.raises(RuntimeError, match="Dropout requires a key"):
        px.train_step(lambda model, batch: rows_of(model, batch), donate=False)(state, x)
    assert state.model()[1].inference is False
    ens = px.ensemble(lambda key: net, 1, 0, apply=rows_of)
    assert_close(ens.predict(x, average="mean"), rows_of(net[0], x))


def test_batch_statistics_of_equinox_are_mutable_state() -> None:
    x = values(13, 3)

    def loss(model: Any, batch: jax.Array, mutable: Any) -> tuple[jax.Array, Any]:
        y, mutable = jax.vmap(model, axis_name="rows", in_axes=(0, None), out_axes=(0, None))(batch, mutable)
        return jnp.mean(y**2), mutable

    made = functools.partial(eqx.nn.BatchNorm, 3, "rows", mode="batch")
    net, statistics = eqx.nn.make_with_state(made)()
    state = px.TrainState.create(net, OPTIMIZER, mutable=statistics)
    state, metrics = px.train_step(loss)(state, x)
    expected, after = loss(net, x, statistics)
    assert_close(jnp.float32(float(metrics["loss"])), expected)
    same(jax.tree.leaves(state.mutable), jax.tree.leaves(after))


# --- ensembles ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.sampled(1)
@MAKES
def test_members_are_models_trained_alone(make: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    x, y = values(13, 3), values(13, 2, seed=1)

    def make_member(key: jax.Array) -> Any:
        model = make(key)
        return model, OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))

    def step(model: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
        loss, gradient = eqx.filter_value_and_grad(mean_loss)(model, x, y)
        updates, opt_state = OPTIMIZER.update(gradient, opt_state, eqx.filter(model, eqx.is_inexact_array))
        return (eqx.apply_updates(model, updates), opt_state), loss

    ens = px.ensemble(make_member, 3, 0, apply=rows_of)
    ens.train(step, x, y)
    ens.train(step, x, y)
    alone = [trained_alone(make(key), x, y, 2)[0] for key in px.keys(jax.random.key(0), ens.axis)]
    same(ens[1][0], alone[1])
    loaded = px.ensemble(make_member, 3, 1, apply=rows_of)
    loaded.state = ens.state
    assert_close(loaded.predict(x, average="mean"), jnp.mean(jnp.stack([rows_of(m, x) for m in alone]), 0))
    assert len(ens[:2].add(ens[2])) == 3
    same(ens[:2].add(ens[2])[2], ens[2])


# --- what is refused ------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Data:
    """No model: it cannot be called."""

    w: jax.Array
    kind: str


def test_a_pytree_that_cannot_be_called_is_refused() -> None:
    axis, data, model = axis_on(2, 3), Data(values(3), "tanh"), make_scaled(jax.random.key(0))
    plain = Data(values(3), jnp.ones(()))  # pyright: ignore[reportArgumentType]
    nothing = eqx.nn.Lambda(jnp.tanh)
    calls: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (px.StateError, r"model\.kind is <U4", lambda: _created(data)),
        (px.ShapeError, r"x\.kind is 'tanh', which JAX cannot take", lambda: px.broadcast(data, axis)),
        (
            px.StateError,
            r"the model has no arrays to train",
            lambda: _created(nothing),
        ),
        (
            px.StateError,
            r"of a model that is a pytree, eqx\.filter_value_and_grad",
            lambda: px.GradValues(mean_loss, model)(1.0, 1.0),
        ),
    ]
    for kind, text, call in calls:
        with pytest.raises(kind, match=f"(?i){text}"):
            call()
    step = px.train_step(lambda model, batch: model(batch))
    with pytest.raises(TypeError, match="'Data' object is not callable"):
        step(_created(plain), values(3))


def _created(model: Any) -> px.TrainState:
    return px.TrainState.create(model, OPTIMIZER)


def test_a_member_keeps_what_is_fixed_in_it() -> None:
    ens = px.ensemble(make_scaled, 2, 0)
    before = ens[0]
    with pytest.raises(px.StateError, match="structure and settings of the old one"):
        ens.train(lambda model: dataclasses.replace(model, power=3))
    same(ens[0], before)


def test_a_named_tuple_is_one_argument() -> None:
    """An optimizer's state is one."""
    axis, params = axis_on(2, 3), values(3, 2)
    states: Any = jax.vmap(optax.scale_by_adam().init)(params)
    assert issubclass(type(states), tuple)
    assert_close(px.map_fn(lambda state: state.mu + state.count, states, axis), states.mu + states.count[:, None])
