"""A step on any devices is the plain loop on one; and what it compiles to: collectives, traces, memory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import paraxis as px
from paraxis.testing import assert_communication, communication
from tests import _steps as models
from tests._steps import Net, assert_near, assert_same_bits, axis, loss, plain_loss, plain_params, rows, trained
from tests._support import at_night, table

ADAM = optax.adam(1e-2)


def plain_state(optimizer: Any = ADAM, **options: Any) -> px.TrainState:
    return px.TrainState.create(plain_params(), optimizer, **options)


def weighted(params: Any, batch: Any) -> Any:
    """Rows count by their weight, which may be zero for all of a micro-batch."""
    losses = plain_loss(params, batch)
    return px.Mean(jnp.sum(losses * batch["weight"]), jnp.sum(batch["weight"])), {"losses": losses}


def weighted_mean(params: Any, batch: Any) -> jax.Array:
    return jnp.sum(plain_loss(params, batch) * batch["weight"]) / jnp.sum(batch["weight"])


# A model, options of the step, the optimiser of the loop, and the share of a state that a device has.
LAWS: dict[str, Any] = {
    "NNX": (models.of_nnx, {}, ADAM, 1),
    "Linen": (models.of_linen, {}, ADAM, 1),
    "clip": (models.of_params, {"clip": 350}, optax.chain(optax.clip_by_global_norm(350), ADAM), 1),  # 379, 157
    "microbatches": (models.of_params, {"microbatches": 5}, ADAM, 1),
    "few rows": (lambda: models.of_params(weighted, weighted_mean), {"microbatches": 20}, ADAM, 1),
    "shard": (models.of_params, {"shard": "params"}, ADAM, 1 / 8),
    # Which leaves a sixth whole.
    "shard by name": (
        models.of_params,
        {"shard": lambda name, _: {"w": P(None, "batch"), "v": -1}.get(name)},
        ADAM,
        0.3,
    ),
}


@pytest.mark.floor
@pytest.mark.parametrize("devices", [8, *at_night([1, 2, 3], 3)])
@pytest.mark.parametrize("law", LAWS)
def test_train_step_is_the_loop_by_hand_for_any_rows_on_any_devices(law: str, devices: int) -> None:
    """Batch normalisation takes the statistics of the real rows, and dropout drops what it drops on one device."""
    make, options, optimizer, share = LAWS[law]
    model = make()
    size = 3 if law == "NNX" else 13  # some devices have no row of three
    batches = [rows(size, seed) | {"weight": np.arange(size, dtype="float32") % 3} for seed in (3, 4)]
    by_hand = list(models.by_hand(model, optimizer, batches))
    params, average, rest, _, _ = by_hand[-1]
    step = px.train_step(model.loss, axis=axis(devices), **options)
    state, found = trained(px.TrainState.create(model.model, ADAM, ema=models.DECAY, **model.options), step, batches)
    assert_near((found, state.params, state.ema), (np.array([step[-1] for step in by_hand]), params, average))
    assert_near({} if rest is None else state.mutable, rest or {})
    kept = jax.tree.leaves((state.params, state.opt_state, state.ema))
    own, whole = (sum(x.nbytes for x in xs) for xs in ([x.addressable_shards[0].data for x in kept], kept))
    assert own <= (share if devices == 8 else 1) * whole + 64


def test_train_step_carries_the_mutable_state_of_a_plain_function_through_microbatches() -> None:
    def counted(params: Any, batch: Any, mutable: Any) -> Any:
        return plain_loss(params, batch), {"rows": jnp.asarray(1)}, {"seen": mutable["seen"] + len(batch["x"])}

    step, state = px.train_step(counted, microbatches=5), plain_state(mutable={"seen": np.int32(0)})
    for seed in (0, 1):
        state, metrics = step(state, rows(13, seed))
    assert int(state.mutable["seen"]) == 26
    assert (float(metrics["rows"]), float(metrics["rows"].weight)) == (1, 13)


def test_train_step_gives_each_microbatch_a_key_of_its_own() -> None:
    def noisy(params: Any, batch: Any, key: Any) -> Any:
        noise = jax.random.normal(key)
        return plain_loss(params, batch), {"noise": noise, "square": noise**2}

    _, found = px.train_step(noisy, microbatches=4)(plain_state(key=jax.random.key(0)), rows(8))
    assert float(found["square"]) - float(found["noise"]) ** 2 > 0.1


@pytest.mark.parametrize("platform", ["cpu", "default"])
def test_train_step_changes_nothing_after_an_infinite_loss(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, **by_platform: by_platform[platform](*args))
    step = px.train_step(plain_loss, axis=axis(2), donate=False)
    good, _ = step(plain_state(ema=0.5), rows(6))
    after, metrics = step(good, rows(6) | {"y": np.full(6, np.nan, "float32")})
    assert np.isnan(float(metrics["loss"]))
    later, metrics = step(after, rows(6))
    assert np.isnan([float(metrics["loss"]), float(metrics["grad_norm"])]).all()
    for state in (after, later):
        assert (bool(state.ok), int(state.step)) == (False, 1)
        assert_same_bits(state.replace(ok=good.ok), good)


def test_train_step_without_a_guard_goes_on_after_a_loss_that_is_not_finite() -> None:
    step = px.train_step(plain_loss, axis=axis(2), guard=False)
    state, metrics = step(plain_state(), rows(6) | {"y": np.full(6, np.nan, "float32")})
    assert (sorted(metrics), bool(state.ok), int(state.step)) == (["loss"], True, 1)
    assert np.isnan(np.asarray(state.params["w"])).all()


@pytest.mark.parametrize("make", [px.train_step, px.eval_step])
def test_train_step_has_the_precision_of_the_parameters_and_rounds_no_targets(make: Any) -> None:
    """Near 1,000, numbers of bfloat16 are four apart."""
    seen = []

    def spy(params: Any, batch: Any) -> jax.Array:
        seen.append((str(params["w"].dtype), str(batch["y"].dtype)))
        return (params["w"] - batch["y"]) ** 2

    batch = {"y": np.linspace(1000, 1002, 9, dtype="float32")}
    found = make(spy, precision="bfloat16")(px.TrainState.create({"w": jnp.float32(1000.0)}, optax.sgd(0.1)), batch)
    params, metrics = (found[0].params, found[1]) if make is px.train_step else (None, found)
    np.testing.assert_allclose(float(metrics["loss"]), np.mean((1000 - batch["y"]) ** 2), rtol=1e-5)
    assert set(seen) == {("bfloat16", "float32")}
    assert {x.dtype for x in jax.tree.leaves((params, metrics))} == {jnp.dtype("float32")}


@pytest.mark.parametrize("options", [{}, {"microbatches": 3, "precision": "bfloat16", "clip": 1e6}])
def test_train_step_goes_downhill_in_complex_parameters(options: Any) -> None:
    """Steps of descent by hand, each half of the way to the solution, 1 + 2j."""
    state = px.TrainState.create({"w": jnp.zeros(2, complex)}, optax.sgd(0.25))
    step = px.train_step(lambda p, batch: batch * jnp.sum(jnp.abs(p["w"] - (1 + 2j)) ** 2), **options)
    state, losses = trained(state, step, [np.ones(7, "float32")] * 2)
    np.testing.assert_allclose(state.params["w"], [0.75 + 1.5j] * 2)
    np.testing.assert_allclose(losses, [10, 2.5])


def test_train_state_keeps_the_average_of_narrow_parameters_in_float32() -> None:
    """A hundredth of the way is less than the rounding of bfloat16."""
    state = px.TrainState.create({"w": jnp.ones(3, "bfloat16")}, optax.sgd(0.0), ema=0.99)
    state = state.replace(params={"w": jnp.full(3, 2, "bfloat16")})
    state, _ = trained(state, px.train_step(lambda p, b: b @ p["w"]), [np.ones((8, 3), "float32")] * 30)
    np.testing.assert_allclose(state.ema["w"], np.full(3, 2 - 0.99**30), rtol=1e-5)
    assert state.model(ema=True)["w"].dtype == "bfloat16"


def test_train_step_takes_the_norm_of_a_gradient_in_float32() -> None:
    """Its square, 1e6, is more than float16 holds."""
    state = px.TrainState.create({"w": jnp.zeros(4, "float16")}, optax.sgd(1.0))
    step = px.train_step(lambda params, batch: 500 * (batch @ params["w"]).astype("float32"), clip=10.0)
    state, metrics = step(state, np.ones((8, 4), "float16"))
    assert float(metrics["grad_norm"]) == 1000
    np.testing.assert_array_equal(state.params["w"], np.full(4, -5, "float16"))


def adversarial() -> Any:
    """Sharpness-aware minimisation, whose update refuses the loss."""
    inner = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    return optax.GradientTransformation(*optax.contrib.sam(optax.sgd(0.1), inner, sync_period=2))


@pytest.mark.parametrize(
    ("optimizer", "takes_loss"),
    [
        (optax.chain(optax.clip_by_global_norm(1.0), adversarial()), False),
        (optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()), True),
    ],
)
def test_train_step_gives_an_optimiser_the_loss_if_it_takes_it(optimizer: Any, takes_loss: bool) -> None:
    batches = [rows(6, seed) for seed in range(4)]
    params: Any = jax.tree.map(jnp.asarray, plain_params())
    opt_state = optimizer.init(params)

    @jax.jit
    def by_hand(params: Any, opt_state: Any, batch: Any) -> Any:
        value, gradient = jax.value_and_grad(lambda p: jnp.mean(plain_loss(p, batch)))(params)
        updates, opt_state = optimizer.update(gradient, opt_state, params, **({"value": value} if takes_loss else {}))
        return optax.apply_updates(params, updates), opt_state

    for batch in batches:
        params, opt_state = by_hand(params, opt_state, batch)
    assert_near(trained(plain_state(optimizer), px.train_step(plain_loss), batches)[0].params, params)


def test_eval_step_gives_no_key_to_a_function_that_can_do_without() -> None:
    """As one writes dropout that is only for training; a state needs no key then, either."""

    def fn(params: Any, batch: Any, key: Any = None) -> Any:
        return plain_loss(params, batch) if key is None else jax.random.normal(key, batch["y"].shape)

    step, evaluate, expected = px.train_step(fn), px.eval_step(fn), np.mean(plain_loss(plain_params(), rows(6)))
    for state in (plain_state(key=jax.random.key(0)), plain_state()):
        assert_near(float(evaluate(state, rows(6))["loss"]), expected)
        loss = float(step(state, rows(6))[1]["loss"])
        assert (abs(loss - expected) < 1e-4) == (state.key is None)


@pytest.mark.parametrize("make", [px.train_step, px.eval_step])
def test_a_step_warns_of_predictions_and_labels_that_broadcast_to_pairs_of_rows(make: Any) -> None:
    step = make(lambda params, batch: (batch["x"] @ params["w"][:, :1] - batch["y"]) ** 2)
    with pytest.warns(UserWarning, match=r"the loss has shape \(6, 6\), .*write model\(x\)\[:, 0\]"):
        step(plain_state(), rows(6))


@pytest.mark.parametrize(("devices", "microbatches"), table([(8, 4)], [(1, 1), (8, 1)]))
def test_eval_step_gives_metrics_of_all_rows(devices: int, microbatches: int) -> None:
    def fn(params: Any, batch: Any) -> Any:
        error = models.plain(params, batch["x"]) - batch["y"]
        return {"positive": error > 0, "absolute": jnp.mean(jnp.abs(error))}

    evaluate = px.eval_step(fn, axis=axis(devices), microbatches=microbatches)
    first, second = (evaluate(plain_state(), rows(size, size)) for size in (13, 5))
    error = np.concatenate([models.plain(plain_params(), rows(n, n)["x"]) - rows(n, n)["y"] for n in (13, 5)])
    found = [float(first[name] + second[name]) for name in ("positive", "absolute")]
    assert_near(found, [np.mean(error > 0), np.mean(np.abs(error))])


def test_eval_step_uses_a_module_as_after_eval() -> None:
    net, batch = Net(), rows(13)
    found = px.eval_step(loss, axis=axis(8))(px.TrainState.create(net, ADAM), batch)
    net.eval()
    assert_near(float(found["loss"]), loss(net, batch))


def test_train_step_takes_a_total_without_a_weight_for_no_loss() -> None:
    step = px.train_step(lambda params, batch: px.Mean(jnp.sum(plain_loss(params, batch)), 0.0))
    state, metrics = step(plain_state(), rows(6))
    assert np.isnan(float(metrics["loss"].total))
    assert not bool(state.ok)
    assert_same_bits(state.params, plain_params())


def test_train_step_communicates_as_a_step_by_hand() -> None:
    """With batch normalisation and dropout; a batch that does not divide adds nothing, micro-batches gather no rows."""
    mesh, model = Mesh(np.array(jax.devices()), ("batch",)), models.of_nnx()

    def by_hand(params: Any, opt_state: Any, batch: Any) -> Any:
        (value, rest), gradient = jax.value_and_grad(model.fn, has_aux=True)(params, model.rest, batch, 0)
        updates, opt_state = ADAM.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, rest, value

    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("batch"))
    jitted = jax.jit(by_hand, in_shardings=(whole, whole, split), out_shardings=whole)
    expected = communication(jitted, model.params, ADAM.init(model.params), rows(16)).count
    state = px.TrainState.create(model.model, ADAM)
    step = px.train_step(model.loss, axis=px.Axis("batch", 1, mesh=mesh))
    assert communication(step, state, rows(13)).count == expected
    parts = px.train_step(plain_loss, axis=axis(8), microbatches=3)
    assert_communication(parts, plain_state(), rows(13), all_gather=0, all_to_all=0, collective_permute=0)


def test_train_step_adds_the_gradients_of_a_map_s_chunks_on_each_device_and_sends_them_once() -> None:
    """A loss of each row by itself; ``microbatches`` sends each part's."""

    def step_with(at_once: int | None) -> Any:
        def by_rows(params: Any, batch: Any) -> jax.Array:
            over = px.Axis("batch", len(batch["x"]), at_once=at_once)
            row = lambda params, x, y: (models.plain(params, x) - y) ** 2  # noqa: E731
            return px.map_fn(row, (px.broadcast(params, over), batch["x"], batch["y"]), over)

        return px.train_step(by_rows)

    num_bytes, parts = sum(x.nbytes for x in plain_params().values()), px.train_step(plain_loss, microbatches=4)
    with pytest.raises(AssertionError, match=f"found {4 * (num_bytes + 4):,}"):
        assert_communication(parts, plain_state(), rows(64), max_bytes=2 * num_bytes)
    expected = trained(plain_state(), parts, [rows(61)])[0].params
    for step in map(step_with, (None, 1, 4)):
        assert_communication(step, plain_state(), rows(64), all_reduce=1, all_gather=0, max_bytes=num_bytes + 8)
        assert_near(trained(plain_state(), step, [rows(61)])[0].params, expected)


def test_train_state_begins_in_parts_where_its_step_lays_it() -> None:
    make = lambda: px.TrainState.create(plain_params(1536), ADAM, ema=0.9)  # noqa: E731
    step = px.train_step(plain_loss, axis=axis(8), shard="params")
    state = jax.jit(make, out_shardings=step.shardings(jax.eval_shape(make)))()
    for x in (state.params["w"], state.ema["w"], state.opt_state[0].mu["w"]):
        assert x.addressable_shards[0].data.shape == (models.FEATURES, 192)
    assert_near(trained(state, step, [rows(6)])[0].params, trained(make(), step, [rows(6)])[0].params)


@pytest.mark.parametrize("dimension", [2, -3])
def test_train_step_refuses_what_is_not_there_to_be_sharded(dimension: int) -> None:
    shard = lambda name, x: dimension if name == "w" else None  # noqa: E731
    with pytest.raises(px.StateError, match=f"shard= says dimension {dimension} of 'w', which has 2"):
        px.train_step(plain_loss, axis=axis(8), shard=shard)(plain_state(), rows(6))
    with pytest.raises(px.StateError, match="shard must be one of None, 'params', got 'parms'"):
        px.train_step(plain_loss, shard="parms")


def test_eval_step_is_compiled_once_for_all_optimisers() -> None:
    traces = []
    evaluate = px.eval_step(lambda params, batch: traces.append(1) or plain_loss(params, batch))
    for rate in (0.1, 0.2):
        evaluate(plain_state(optax.adam(rate), ema=rate), rows(6))
    assert traces == [1]


def test_train_step_is_traced_once_for_each_number_of_rows() -> None:
    traces = []

    def spy(params: Any, batch: Any) -> jax.Array:
        traces.append(batch["x"].shape)
        return plain_loss(params, batch)

    step, state = px.train_step(spy, axis=axis(2)), plain_state()
    for size in (6, 5, 6, 5, 6):
        state, _ = step(state, rows(size))
    assert traces == [(6, models.FEATURES), (5, models.FEATURES)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_train_step_uses_a_mesh_that_is_set(kind: AxisType) -> None:
    step = px.train_step(plain_loss)
    for devices in (jax.devices()[:4], jax.devices()[4:8]):
        mesh = Mesh(np.array(devices).reshape(2, 2), ("batch", "model"), axis_types=(kind, kind))
        with jax.set_mesh(mesh):
            state, metrics = step(plain_state(), rows(5))
        assert_near(float(metrics["loss"]), np.mean(np.asarray(plain_loss(plain_params(), rows(5)))))
        assert state.params["w"].devices() == {*devices}


def test_train_step_lets_a_batch_on_the_host_be_changed_once_it_returns() -> None:
    batch = {"x": np.ones((1 << 16, models.FEATURES), "float32"), "y": np.ones(1 << 16, "float32")}
    step, state = px.train_step(plain_loss, axis=axis(8), donate=False), plain_state()
    _, expected = step(state, jax.tree.map(np.copy, batch))
    _, metrics = step(state, batch)
    for x in batch.values():
        x[:] = np.nan
    assert float(metrics["loss"]) == float(expected["loss"])
