"""A step on any devices is the plain loop on one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import paraxis as px
from tests._support import at_night
from tests.train._models import (
    LinenNet,
    Net,
    assert_near,
    assert_same_bits,
    axis,
    loss,
    nnx_by_hand,
    plain,
    plain_by_hand,
    plain_loss,
    plain_params,
    rows,
    trained,
)

pytestmark = pytest.mark.newest

ADAM = optax.adam(1e-2)


def plain_state(optimizer: Any = ADAM, **options: Any) -> px.TrainState:
    return px.TrainState.create(plain_params(), optimizer, **options)


@pytest.mark.slow
def test_one_device_gives_the_bits_of_a_loop_written_by_hand() -> None:
    batches = [rows(16, seed) for seed in range(4)]
    params, rest, losses = nnx_by_hand(Net(), ADAM, batches)
    state, found = trained(px.TrainState.create(Net(), ADAM), px.train_step(loss, axis=axis(1), guard=False), batches)
    assert_same_bits((state.params, state.mutable["norm"], found), (params, rest["norm"], losses))


@pytest.mark.parametrize("devices", [8, *at_night([2, 3], 2)])
def test_any_batch_on_any_devices_is_that_batch_on_one(devices: int) -> None:
    """Batch normalisation takes the statistics of the real rows, and dropout drops what it drops on one device."""
    batches = [rows(size, size) for size in (16, 13, 3)]
    params, rest, losses = nnx_by_hand(Net(), ADAM, batches)
    state, found = trained(px.TrainState.create(Net(), ADAM), px.train_step(loss, axis=axis(devices)), batches)
    assert_near((found, state.params, state.mutable["norm"]), (losses, params, rest["norm"]))
    assert_same_bits(state.mutable["dropout"], rest["dropout"])


@pytest.mark.parametrize("devices", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_a_linen_module_is_trained_as_one_that_is_bound(devices: int) -> None:
    net, key, batch = LinenNet(), jax.random.key(3), rows(13)
    variables = net.init(key, batch["x"][:1])

    def of(params: Any) -> Any:
        given = {"params": params, "batch_stats": variables["batch_stats"]}
        bound = net.bind(given, rngs={"params": jax.random.fold_in(key, 0)}, mutable=["batch_stats"])
        y = bound(jnp.asarray(batch["x"]), train=True)
        return jnp.mean((y - batch["y"]) ** 2), {"batch_stats": bound.variables["batch_stats"]}

    (value, written), gradient = jax.jit(jax.value_and_grad(of, has_aux=True))(variables["params"])
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, variables["params"], gradient)
    state = px.TrainState.create(net, optax.sgd(0.1), key=key, sample=batch["x"][:1])
    step = px.train_step(lambda m, b: jnp.mean((m(b["x"], train=True) - b["y"]) ** 2), axis=axis(devices))
    state, metrics = step(state, batch)
    assert_near((float(metrics["loss"]), state.params, state.mutable), (value, expected, written))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("microbatches", [None, 5])
def test_a_plain_function_has_mutable_state(microbatches: int | None) -> None:
    def counted(params: Any, batch: Any, mutable: Any) -> Any:
        return plain_loss(params, batch), {"rows": jnp.asarray(1)}, {"seen": mutable["seen"] + len(batch["x"])}

    step, state = px.train_step(counted, microbatches=microbatches), plain_state(mutable={"seen": np.int32(0)})
    for size in (13, 5):
        state, metrics = step(state, rows(size))
    assert int(state.mutable["seen"]) == 18
    assert (float(metrics["rows"]), float(metrics["rows"].weight)) == (1, 5)


@pytest.mark.slow
def test_clipping_is_that_of_optax() -> None:
    batches = [rows(13, seed) for seed in range(2)]
    params, _ = plain_by_hand(plain_params(), optax.chain(optax.clip_by_global_norm(0.1), ADAM), batches)
    gradient = jax.grad(lambda p: jnp.mean(plain_loss(p, batches[0])))(plain_params())
    step = px.train_step(plain_loss, clip=0.1)
    state, metrics = step(plain_state(), batches[0])
    assert_near(float(metrics["grad_norm"]), optax.tree.norm(gradient))
    assert_near(step(state, batches[1])[0].params, params)


def test_the_average_of_parameters_is_its_recurrence() -> None:
    step, state = px.train_step(plain_loss, axis=axis(2), donate=False), plain_state(ema=0.9)
    average = plain_params()
    for seed in range(3):
        state, _ = step(state, rows(6, seed))
        average = jax.tree.map(lambda e, p: 0.9 * e + np.float32(0.1) * np.asarray(p), average, state.params)
    value = px.eval_step(plain_loss, axis=axis(2))(state.replace(params=state.ema), rows(7))["loss"]
    expected = np.mean(plain_loss(average, rows(7)))
    assert_near((state.ema, state.model(ema=True), float(value)), (average, average, expected))


@pytest.mark.parametrize(("devices", "platform"), [(1, "cpu"), (2, "cpu"), (2, "default")])
def test_a_step_that_is_not_finite_changes_nothing_and_says_so(
    devices: int, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, **by_platform: by_platform[platform](*args))
    step = px.train_step(plain_loss, axis=axis(devices), donate=False)
    good, _ = step(plain_state(ema=0.5), rows(6))
    after, metrics = step(good, rows(6) | {"y": np.full(6, np.nan, "float32")})
    assert np.isnan(float(metrics["loss"]))
    later, metrics = step(after, rows(6))
    assert np.isnan([float(metrics["loss"]), float(metrics["grad_norm"])]).all()
    for state in (after, later):
        assert (bool(state.ok), int(state.step)) == (False, 1)
        assert_same_bits(state.replace(ok=good.ok), good)


def test_a_step_without_a_guard_goes_on_with_what_is_not_finite() -> None:
    step = px.train_step(plain_loss, axis=axis(2), guard=False)
    state, metrics = step(plain_state(), rows(6) | {"y": np.full(6, np.nan, "float32")})
    assert (sorted(metrics), bool(state.ok), int(state.step)) == (["loss"], True, 1)
    assert np.isnan(np.asarray(state.params["w"])).all()


def test_bfloat16_is_that_of_the_parameters_and_of_what_the_loss_casts() -> None:
    seen = []

    def spy(params: Any, batch: Any) -> jax.Array:
        predictions = plain(params, batch["x"].astype("bfloat16"))
        seen.append((str(predictions.dtype), str(batch["x"].dtype), str(batch["y"].dtype)))
        return (predictions - batch["y"]) ** 2

    state, metrics = px.train_step(spy, precision="bfloat16")(plain_state(), rows(16))
    assert set(seen) == {("bfloat16", "float32", "float32")}
    assert {x.dtype for x in jax.tree.leaves((state.params, metrics))} == {jnp.dtype("float32")}
    value, gradient = jax.value_and_grad(lambda p: jnp.mean(plain_loss(p, rows(16))))(plain_params())
    found = float(metrics["loss"]), float(metrics["grad_norm"])
    assert_near(found, (value, optax.tree.norm(gradient)), rtol=3e-2)


@pytest.mark.parametrize("make", [px.train_step, px.eval_step])
def test_bfloat16_rounds_no_targets(make: Any) -> None:
    """Near 1,000, numbers of bfloat16 are four apart."""
    batch = {"y": np.linspace(1000, 1002, 9, dtype="float32")}
    step = make(lambda params, batch: (params["w"] - batch["y"]) ** 2, precision="bfloat16")
    found = step(px.TrainState.create({"w": jnp.float32(1000.0)}, optax.sgd(0.1)), batch)
    metrics = found if isinstance(found, dict) else found[1]
    np.testing.assert_allclose(float(metrics["loss"]), np.mean((1000 - batch["y"]) ** 2), rtol=1e-5)


def adversarial() -> Any:
    """Sharpness-aware minimisation, whose update refuses the loss."""
    return optax.contrib.sam(optax.sgd(0.1), optax.chain(optax.contrib.normalize(), optax.sgd(0.05)), sync_period=2)


@pytest.mark.parametrize(
    ("optimizer", "takes_loss"),
    [
        (adversarial(), False),
        (optax.chain(optax.clip_by_global_norm(1.0), adversarial()), False),
        (optax.polyak_sgd(), True),
        (optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()), True),
    ],
)
def test_an_optimiser_is_given_the_loss_if_it_takes_it(optimizer: Any, takes_loss: bool) -> None:
    batches = [rows(6, seed) for seed in range(4)]
    params: Any = jax.tree.map(jnp.asarray, plain_params())
    opt_state = optimizer.init(params)
    for batch in batches:
        value, gradient = jax.value_and_grad(lambda p, batch=batch: jnp.mean(plain_loss(p, batch)))(params)
        updates, opt_state = optimizer.update(gradient, opt_state, params, **({"value": value} if takes_loss else {}))
        params = optax.apply_updates(params, updates)
    assert_near(trained(plain_state(optimizer), px.train_step(plain_loss), batches)[0].params, params)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("devices", "microbatches"), [(1, None), (8, None), (8, 4)])
def test_metrics_are_those_of_all_rows(devices: int, microbatches: int | None) -> None:
    def fn(params: Any, batch: Any) -> Any:
        error = plain(params, batch["x"]) - batch["y"]
        return {"positive": error > 0, "absolute": jnp.mean(jnp.abs(error))}

    evaluate = px.eval_step(fn, axis=axis(devices), microbatches=microbatches)
    first, second = (evaluate(plain_state(), rows(size, size)) for size in (13, 5))
    error = np.concatenate([plain(plain_params(), rows(n, n)["x"]) - rows(n, n)["y"] for n in (13, 5)])
    found = [float(first[name] + second[name]) for name in ("positive", "absolute")]
    assert_near(found, [np.mean(error > 0), np.mean(np.abs(error))])


@pytest.mark.parametrize("devices", [1, 8])
def test_a_module_is_evaluated_as_it_is_used(devices: int) -> None:
    net, batch = Net(), rows(13)
    found = px.eval_step(loss, axis=axis(devices))(px.TrainState.create(net, ADAM), batch)
    net.eval()
    assert_near(float(found["loss"]), loss(net, batch))


@pytest.mark.parametrize("weight", [0.0, -6.0])
def test_a_total_without_a_weight_is_no_loss(weight: float) -> None:
    step = px.train_step(lambda params, batch: px.Mean(jnp.sum(plain_loss(params, batch)), weight))
    state, metrics = step(plain_state(), rows(6))
    assert np.isnan(float(metrics["loss"].total))
    assert not bool(state.ok)
    assert_same_bits(state.params, plain_params())


def test_a_total_too_large_for_float32_is_a_loss_if_its_mean_is_none() -> None:
    step = px.train_step(lambda params, batch: jnp.mean(params["b"]) + 3e37)
    state, metrics = step(plain_state(), rows(64))
    assert bool(state.ok)
    np.testing.assert_allclose(float(metrics["loss"]), 3e37, rtol=1e-6)


def test_keys_and_arrays_on_other_devices_are_rows_too() -> None:
    batch = {"key": jax.random.split(jax.random.key(0), 5), "number": jnp.arange(5)}

    def drawn(params: Any, batch: Any) -> dict[str, jax.Array]:
        own = jax.vmap(jax.random.uniform)(batch["key"])
        return {f"row {k}": jnp.where(batch["number"] == k, own, 0) for k in range(5)}

    metrics = px.eval_step(drawn, axis=axis(2))(plain_state(), jax.device_put(batch, jax.devices()[3]))
    for k, key in enumerate(batch["key"]):
        assert_same_bits(metrics[f"row {k}"].total, jax.random.uniform(key))
