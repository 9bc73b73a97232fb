"""``fit`` trains as a Python loop over single members does: same rows, same order, whatever the devices."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

import paraxis as px
from tests._support import assert_close, values

DIMS = ("NWC", "WIO", "NWC")
NUM_ROWS, BATCH, NUM_STEPS = 22, 4, 5  # two rows are left over in every epoch


def on(devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]), ("members",))


def make_mlp(key: jax.Array) -> Any:
    first, last = jax.random.split(key)
    return {"first": jax.random.normal(first, (3, 6)), "last": jax.random.normal(last, (6,))}


def apply_mlp(params: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["first"]) @ params["last"]


def make_conv(key: jax.Array) -> Any:
    return {"kernel": jax.random.normal(key, (2, 1, 2)), "last": jnp.full((2,), 0.3)}


def apply_conv(params: Any, x: jax.Array) -> jax.Array:
    y = jax.lax.conv_general_dilated(x[..., None], params["kernel"], (1,), "VALID", dimension_numbers=DIMS)
    return jnp.tanh(y).mean(1) @ params["last"]


@functools.cache
def sgd(apply: Callable[..., Any]) -> Callable[..., Any]:
    """A step with optional weights of the rows, and an optional learning rate, in this order."""

    def step(params: Any, x: jax.Array, y: jax.Array, weights: Any = 1.0, rate: Any = 0.1) -> Any:
        loss, gradient = jax.value_and_grad(lambda p: jnp.mean(weights * (apply(p, x) - y) ** 2))(params)
        return jax.tree.map(lambda p, g: p - rate * g, params, gradient), loss

    return step


MODELS = {"mlp": (make_mlp, apply_mlp), "conv": (make_conv, apply_conv)}
X, Y = np.asarray(values(NUM_ROWS, 3)), np.asarray(values(NUM_ROWS, seed=1))


def batches(key: Any, epoch: int, num_rows: int = NUM_ROWS) -> np.ndarray:
    """The row numbers of an epoch, written down again."""
    order = np.asarray(jax.random.permutation(jax.random.fold_in(jax.random.key(key), epoch), num_rows))
    return order[: num_rows // BATCH * BATCH].reshape(-1, BATCH)


def host(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), tree)


def singles(ens: px.Ensemble) -> list[Any]:
    return [host(member) for member in ens]


once = functools.cache(jax.jit)


def by_hand(
    step: Callable[..., Any], members: list[Any], epochs: range, key: int, pick: Callable[..., Any]
) -> tuple[list[Any], np.ndarray]:
    """Each member alone, step after step; ``pick(member, numbers)`` gives the arguments. The mean losses as well."""
    compiled, trained = once(step), []
    losses = np.zeros((len(epochs), len(members)), np.float32)
    for index, state in enumerate(members):
        for row, epoch in enumerate(epochs):
            outs = []
            for numbers in pick(index, epoch):
                state, loss = compiled(state, *numbers)
                outs.append(float(loss))
            losses[row, index] = np.mean(outs)
        trained.append(state)
    return trained, losses


def plain(key: int) -> Callable[..., Any]:
    return lambda index, epoch: [(X[rows], Y[rows]) for rows in batches(key, epoch)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", [8, 1, 2])
@pytest.mark.parametrize("size", [3, 5, 7])
@pytest.mark.parametrize("model", ["mlp", "conv"])
def test_the_same_as_a_python_loop_over_single_members(model: str, size: int, devices: int) -> None:
    make, apply = MODELS[model]
    step = sgd(apply)
    ens = px.ensemble(make, size, 3, mesh=on(devices))
    expected, losses = by_hand(step, singles(ens), range(2), 11, plain(11))
    history = ens.fit(step, (X, Y), batch_size=BATCH, epochs=2, key=11)
    assert history.scanned == (model == "mlp")  # on CPU a convolution in a loop is slow
    for member, alone in zip(ens, expected, strict=True):
        assert_close(host(member), alone)
    np.testing.assert_allclose(history.outputs, losses, rtol=1e-4)
    assert history.metrics == {}
    assert history.best_epoch is None
    assert (history.stopped == -1).all()


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp", "conv"])
def test_rows_give_each_member_its_own_share(model: str) -> None:
    make, apply = MODELS[model]
    step, shares = sgd(apply), np.random.default_rng(0).integers(0, NUM_ROWS, (3, 13))
    ens = px.ensemble(make, 3, 0, mesh=on(2))

    def pick(index: int, epoch: int) -> list[Any]:
        return [(X[shares[index][at]], Y[shares[index][at]]) for at in batches(5, epoch, num_rows=13)]

    expected, losses = by_hand(step, singles(ens), range(2), 5, pick)
    history = ens.fit(step, (X, Y), batch_size=BATCH, epochs=2, key=5, rows=shares)
    for member, alone in zip(ens, expected, strict=True):
        assert_close(host(member), alone)
    np.testing.assert_allclose(history.outputs, losses, rtol=1e-4)


@pytest.mark.slow
def test_a_sweep_over_learning_rates_is_an_ensemble() -> None:
    step, rates = sgd(apply_mlp), jnp.array([0.01, 0.03, 0.1, 0.3, 0.0])
    weighted = lambda params, x, y, rate: step(params, x, y, 1.0, rate)  # noqa: E731
    ens = px.ensemble(make_mlp, 5, 0, mesh=on(2))
    before = singles(ens)
    pick = lambda index, epoch: [(X[at], Y[at], rates[index]) for at in batches(1, epoch)]  # noqa: E731
    expected, _ = by_hand(weighted, before, range(2), 1, pick)
    ens.fit(weighted, (X, Y), batch_size=BATCH, epochs=2, key=1, per_member=(rates,))
    for member, alone in zip(ens, expected, strict=True):
        assert_close(host(member), alone)
    assert_close(host(ens[4]), before[4], rtol=0, atol=0)  # a rate of zero


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp", "conv"])
def test_first_epoch_goes_on_exactly_where_another_call_ended(model: str) -> None:
    make, apply = MODELS[model]
    step = sgd(apply)
    here, there = (px.ensemble(make, 3, 0, mesh=on(2)) for _ in range(2))
    whole = here.fit(step, (X, Y), batch_size=BATCH, epochs=3, key=6)
    parts = [
        there.fit(step, (X, Y), batch_size=BATCH, epochs=n, first_epoch=first, key=6) for first, n in [(0, 1), (1, 3)]
    ]
    assert_close(host(here.stacked()), host(there.stacked()), rtol=0, atol=0)
    np.testing.assert_array_equal(whole.outputs, np.concatenate([part.outputs for part in parts]))


def make_optimised(key: jax.Array) -> tuple[nnx.Module, nnx.Optimizer]:
    net = nnx.Linear(3, 1, rngs=nnx.Rngs(key))
    return net, nnx.Optimizer(net, optax.adam(optax.linear_schedule(0.1, 0.0, 20)), wrt=nnx.Param)


def nnx_step(net: Any, opt: nnx.Optimizer, batch: Any) -> dict[str, Any]:
    loss, gradient = nnx.value_and_grad(lambda net: jnp.mean((net(batch["x"])[:, 0] - batch["y"]) ** 2))(net)
    opt.update(net, gradient)
    return {"loss": loss, "vector": batch["x"].mean(0)}


@pytest.mark.slow
def test_modules_with_an_optimiser_a_schedule_and_a_dict_of_data() -> None:
    ens = px.ensemble(make_optimised, 3, 0, mesh=on(2))
    alone = list(ens)
    history = ens.fit(nnx_step, ({"x": X, "y": Y},), batch_size=BATCH, epochs=2, key=9)
    compiled, outs = nnx.jit(nnx_step), []
    for net, opt in alone:
        for epoch in range(2):
            outs.append([compiled(net, opt, {"x": X[rows], "y": Y[rows]}) for rows in batches(9, epoch)])
    for (net, opt), (lone, lone_opt) in zip(ens, alone, strict=True):
        assert_close(host(nnx.state((net, opt))), host(nnx.state((lone, lone_opt))))
    losses = np.array([[float(out["loss"]) for out in epoch] for epoch in outs]).mean(1).reshape(3, 2).T
    np.testing.assert_allclose(history.outputs["loss"], losses, rtol=1e-4)
    assert history.outputs["vector"].shape == (2, 3, 3)
    np.testing.assert_allclose(history.outputs["vector"][0, 0], np.mean([o["vector"] for o in outs[0]], 0), rtol=1e-5)


def make_diary(key: jax.Array) -> Any:
    """A member that writes down which rows it saw in the steps of the last epoch."""
    return {"rows": jnp.full((NUM_STEPS, BATCH), -1), "now": jnp.array(0), "key": key}


def write_down(diary: Any, rows: jax.Array) -> Any:
    return diary | {"rows": diary["rows"].at[diary["now"] % NUM_STEPS].set(rows), "now": diary["now"] + 1}


def seen_by(ens: px.Ensemble, **options: Any) -> np.ndarray:
    """The rows that each member saw in the last epoch, ``(size, steps, batch)``."""
    options.setdefault("epochs", options.get("first_epoch", 0) + 1)
    history = ens.fit(write_down, (np.arange(NUM_ROWS),), batch_size=BATCH, **options)
    assert history.outputs is None  # nothing but the state was returned
    return np.asarray(ens.stacked()["rows"])


def test_an_own_order_depends_on_key_epoch_and_number_only() -> None:
    ens, fewer = (px.ensemble(make_diary, size, 0, mesh=on(devices)) for size, devices in [(7, 2), (3, 8)])
    here = seen_by(ens, key=0, own_order=True)
    assert len({rows.tobytes() for rows in here}) == 7
    assert all(len(np.unique(rows)) == NUM_STEPS * BATCH for rows in here)
    np.testing.assert_array_equal(seen_by(fewer, key=0, own_order=True), here[:3])
    for other in ({"key": 1}, {"key": 0, "first_epoch": 1}):
        assert (seen_by(ens, own_order=True, **other) != here).any((1, 2)).all()
    np.testing.assert_array_equal(seen_by(ens, key=0, own_order=True), here)


def test_shares_of_rows_are_shuffled_anew_in_each_epoch() -> None:
    rows = np.arange(16).reshape(2, 8)
    order = np.asarray(jax.random.permutation(jax.random.fold_in(jax.random.key(4), 0), 8))
    assert order[::2].sum() != np.arange(8)[::2].sum()  # else what is expected would be that of the rows in order
    ens = px.ensemble(lambda key: jax.random.normal(key), 2, 0)
    history = ens.fit(lambda s, x: (s, x * jnp.arange(1.0, 3)), (np.arange(16.0),), batch_size=2, key=4, rows=rows)
    expected = np.stack([(row[order].reshape(4, 2) * [1.0, 2.0]).mean(0) for row in rows])
    np.testing.assert_allclose(history.outputs[0], expected, rtol=1e-6)


@pytest.mark.parametrize("convolve", [False, True])
def test_imaginary_parts_are_averaged_however_epochs_run(convolve: bool) -> None:
    def step(w: jax.Array, x: jax.Array) -> Any:
        return w, (jnp.convolve(x, x)[0] if convolve else x[0] ** 2) + 2j

    ens = px.ensemble(jax.random.normal, 2, 0, mesh=on(2))
    history = ens.fit(step, (np.ones(8, np.float32),), batch_size=4, key=0)
    assert history.scanned != convolve
    np.testing.assert_allclose(history.outputs, [[1 + 2j, 1 + 2j]])
