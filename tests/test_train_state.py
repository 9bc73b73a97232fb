"""What a state is made from, and what is refused."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.jax_utils import replicate

import paraxis as px
from tests._steps import LinenNet, Net, assert_near, assert_same_bits, loss, plain_loss, plain_params, rows

SGD = optax.sgd(0.1)


def plain_state() -> px.TrainState:
    return px.TrainState.create(plain_params(), SGD)


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


@pytest.mark.parametrize("train", [lambda path, x: path == ("v",), {"w": False, "b": False, "v": True}])
def test_train_state_trains_what_it_is_told_to_and_freezes_the_rest(train: Any) -> None:
    """As if the frozen parameters were constants of the loss: for the optimiser, the norm and the average, too."""
    params: dict[str, Any] = plain_params()
    v: Any = params["v"]
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1))
    opt_state, average = optimizer.init(v), v
    state = px.TrainState.create(params, optax.adam(0.1), train=train, ema=0.9)
    step = px.train_step(plain_loss, clip=0.1, microbatches=2)
    for seed in (0, 1):
        gradient = jax.grad(lambda v, seed: jnp.mean(plain_loss({**params, "v": v}, rows(8, seed))))(v, seed)
        updates, opt_state = optimizer.update(gradient, opt_state, v)
        v = optax.apply_updates(v, updates)
        average = 0.9 * average + 0.1 * v
        state, metrics = step(state, rows(8, seed))
        assert_near(float(metrics["grad_norm"]), jnp.linalg.norm(gradient))
    assert_near((state.params["v"], state.ema["v"], state.model()["v"]), (v, average, v))
    assert_same_bits(state.frozen, {"w": params["w"], "b": params["b"], "v": None})
    assert len(jax.tree.leaves(state.opt_state)) == 3  # two moments and a count
    assert repr(state) == "TrainState(plain, 96 parameters, 16 of them trained)"


def test_train_state_takes_a_filter_of_nnx_and_starts_again_with_another() -> None:
    net, batch = Net(dropout=0), rows(8)
    first = px.TrainState.create(net, optax.adam(0.1), train=nnx.PathContains("last"), ema=0.9)
    step = px.train_step(loss, shard="params", precision="bfloat16")
    state, _ = step(step(first, batch)[0], batch)
    model = state.model()
    assert_same_bits(model.first.kernel[...], net.first.kernel[...])
    assert not np.array_equal(model.last.kernel[...], net.last.kernel[...])
    again = state.restart(SGD, train=nnx.PathContains("first"))
    assert_same_bits((again.ema["first"], again.frozen["last"]), (state.frozen["first"], state.params["last"]))
    assert (int(again.step), again.params["last"], jax.tree.leaves(again.opt_state)) == (0, state.frozen["last"], [])
    later, _ = step(again, batch)
    assert not np.array_equal(later.params["first"]["kernel"], net.first.kernel[...])
    assert_same_bits(state.params["last"], later.frozen["last"])  # the state that was started again is still there


def writes(model: Any, batch: Any) -> jax.Array:
    model.first.kernel[...] = model.first.kernel[...] / 2
    return loss(model, batch)


NET, STATE = px.TrainState.create(Net(norm=False, dropout=0), SGD), plain_state()


def create(model: Any, optimizer: Any = SGD, **options: Any) -> Callable[[], Any]:
    return lambda: px.TrainState.create(model, optimizer, **options)


def stepped(fn: Any = plain_loss, batch: Any = None, state: px.TrainState = STATE) -> Callable[[], Any]:
    return lambda: px.train_step(fn)(state, rows(4) if batch is None else batch)


UNEVEN = {"x": np.ones((3, 2)), "y": np.ones(4)}
REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (create(nnx.Dropout(0.5)), px.StateError, "no arrays to train"),
    (create({"n": np.arange(3)}), px.StateError, r"params\['n'\] is no floating array to be trained"),
    (create(Net(), train={"first": True}), px.StateError, "train= says {'first': True} .* write train=lambda"),
    (create({"w": jnp.ones(1)}, train="w"), px.StateError, "train= says 'w' of a parameter"),
    (create(Net(), train=nnx.BatchStat), px.StateError, r"of {'first'.*, train= leaves no arrays to train"),
    (create(Net(), mutable={"a": 1}), px.StateError, "has mutable state of its own"),
    (create({"f": Net()}), px.StateError, "Net in a dict would be trained like parameters"),
    (create(nnx.state(Net())), px.StateError, "would be trained like parameters"),
    (
        create(LinenNet().init(jax.random.key(0), jnp.zeros((1, 3)))),
        px.StateError,
        "batch_stats in a dict would be trained",
    ),
    (stepped(state=replicate(STATE)), px.StateError, "and not replicated"),
    (stepped(lambda p, b: b["x"][:3, 0] * p["b"][0]), px.DataError, r"has shape \(3,\), but there are 4 rows"),
    (stepped(lambda p, b: jnp.asarray(1)), px.DataError, "a loss of int32"),
    (stepped(lambda p, b: {"loss": plain_loss(p, b)}), px.DataError, "returned dict; write return loss"),
    (stepped(lambda p, b, key: plain_loss(p, b)), px.StateError, "takes a random key, but the state has none"),
    (stepped(lambda p, b: (plain_loss(p, b), {"loss": 1.0})), px.StateError, "'loss' has a name that the step uses"),
    (stepped(lambda p, b: px.Mean(plain_loss(p, b).sum(), p["v"].sum())), px.DataError, "depends on the parameters"),
    (stepped(writes, state=NET), px.StateError, "the loss function wrote a parameter"),
    (stepped(batch=UNEVEN), px.DataError, r"as many rows each, .*'x': \(3, 2\), 'y': \(4,\)"),
    (stepped(batch=np.ma.masked_equal(np.ones(4), 1)), px.DataError, "batch is a MaskedArray"),
    (stepped(batch={"x": np.ones((0, 2))}), px.DataError, r"at least one; .*\(0, 2\)"),
]


def test_a_step_within_another_program_is_a_part_of_it() -> None:
    step, batches = px.train_step(plain_loss, donate=False), jax.tree.map(lambda *x: np.stack(x), rows(6), rows(6, 1))
    scanned, metrics = jax.lax.scan(step, STATE, batches)
    first = step(STATE, rows(6))
    second = step(first[0], rows(6, 1))
    assert_near(scanned.params, second[0].params)
    assert_near(metrics["loss"].value, np.array([float(first[1]["loss"]), float(second[1]["loss"])]))


@pytest.mark.parametrize(("call", "kind", "message"), REFUSED)
def test_states_and_steps_refuse_and_keep_a_state(call: Callable[[], Any], kind: type[Exception], message: str) -> None:
    before = jax.tree.map(np.asarray, (NET.params, STATE.params))
    with pytest.raises(kind, match=message):
        call()
    assert_same_bits((NET.params, STATE.params), before)


def test_train_state_that_a_step_has_consumed_says_so_and_what_it_was_made_of_is_there() -> None:
    given = jax.tree.map(jnp.asarray, plain_params())
    state = px.TrainState.create(given, SGD)
    px.train_step(plain_loss)(state, rows(4))
    for use in (px.train_step(plain_loss), px.eval_step(plain_loss), lambda state, batch: state.model()):
        with pytest.raises(px.StateError, match="were donated to an earlier step"):
            use(state, rows(4))
    assert not given["w"].is_deleted()


def test_mean_adds_up_and_is_none_without_weight() -> None:
    assert float(px.Mean(6.0, 3.0) + px.Mean(0.0, 1.0)) == 1.5
    assert f"{px.Mean(1.0, 4.0):.3f}" == "0.250"
    assert np.isnan(float(px.Mean(0.0, 0.0)))
