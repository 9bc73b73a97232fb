"""``fit`` trains as a Python loop over single members does: same rows, same order, whatever the devices."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import paraxis as px
from paraxis.ensembles import Epoch, History
from paraxis.train import StopEarly
from tests._members import mesh_of
from tests._modules import host
from tests._support import assert_close, values

DIMS = ("NWC", "WIO", "NWC")
NUM_ROWS, BATCH, NUM_STEPS = 22, 4, 5  # two rows are left over in every epoch
X, Y = np.asarray(values(NUM_ROWS, 3)), np.asarray(values(NUM_ROWS, seed=1))


def make_mlp(key: jax.Array) -> Any:
    first, last = jax.random.split(key)
    return {"first": jax.random.uniform(first, (3, 6)) - 0.5, "last": jax.random.uniform(last, (6,))}


def apply_mlp(params: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["first"]) @ params["last"]


def make_conv(key: jax.Array) -> Any:
    return {"kernel": jax.random.uniform(key, (2, 1, 2)), "last": jnp.full((2,), 0.3)}


def apply_conv(params: Any, x: jax.Array) -> jax.Array:
    y = jax.lax.conv_general_dilated(x[..., None], params["kernel"], (1,), "VALID", dimension_numbers=DIMS)
    return jnp.tanh(y).mean(1) @ params["last"]


@functools.cache
def sgd(apply: Callable[..., Any]) -> Callable[..., Any]:
    def step(params: Any, x: jax.Array, y: jax.Array, rate: Any = 0.1) -> Any:
        loss, gradient = jax.value_and_grad(lambda p: jnp.mean((apply(p, x) - y) ** 2))(params)
        return jax.tree.map(lambda p, g: p - rate * g, params, gradient), loss

    return step


MODELS = {"mlp": (make_mlp, apply_mlp), "conv": (make_conv, apply_conv)}


def batches(key: int, epoch: int, num_rows: int = NUM_ROWS) -> np.ndarray:
    """The row numbers of an epoch, written down again."""
    order = np.asarray(jax.random.permutation(jax.random.fold_in(jax.random.key(key), epoch), num_rows))
    return order[: num_rows // BATCH * BATCH].reshape(-1, BATCH)


def check(ens: px.Ensemble, step: Any, key: int, pick: Callable[..., Any], **options: Any) -> History:
    """Two epochs of ``fit`` against each member alone; ``pick(member, epoch)`` gives the arguments of its steps."""
    alone, losses = [host(member) for member in ens], np.zeros((2, len(ens)))
    history, once = ens.fit(step, (X, Y), batch_size=BATCH, epochs=2, key=key, **options), jax.jit(step)
    outs: list[float] = []
    for index, member in enumerate(ens):
        for epoch in range(2):
            outs.clear()
            for args in pick(index, epoch):
                alone[index], loss = once(alone[index], *args)
                outs.append(float(loss))
            losses[epoch, index] = np.mean(outs)
        assert_close(host(member), alone[index])
    steps, found = history.curve("loss")
    assert steps.tolist() == [len(outs), 2 * len(outs)]
    np.testing.assert_allclose(found, losses, rtol=1e-4)
    return history


@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", [8, 1, 2])
@pytest.mark.parametrize("size", [3, 5, 7])
@pytest.mark.parametrize("model", ["mlp", "conv"])
def test_ensemble_fit_is_a_python_loop_over_single_members(model: str, size: int, devices: int) -> None:
    make, apply = MODELS[model]
    ens = px.ensemble(make, size, 3, mesh=mesh_of(devices))
    history = check(ens, sgd(apply), 11, lambda index, epoch: [(X[rows], Y[rows]) for rows in batches(11, epoch)])
    assert (history.best_epoch == -1).all()
    assert (history.stopped == -1).all()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", ["conv", "mlp"])
def test_ensemble_fit_gives_each_member_its_own_rows_and_rate(model: str) -> None:
    make, apply = MODELS[model]
    shares, rates = np.random.default_rng(0).integers(0, NUM_ROWS, (3, 13)), jnp.array([0.01, 0.1, 0.0])
    ens = px.ensemble(make, 3, 0, mesh=mesh_of(2))
    before = host(ens[2])

    def pick(index: int, epoch: int) -> list[Any]:
        chosen = [shares[index][at] for at in batches(5, epoch, num_rows=13)]
        return [(X[rows], Y[rows], rates[index]) for rows in chosen]

    check(ens, sgd(apply), 5, pick, rows=shares, per_member=(rates,))
    assert_close(host(ens[2]), before, rtol=0, atol=0)  # a rate of zero


@pytest.mark.parametrize("convolve", [False, True])
def test_ensemble_fit_averages_metrics_of_any_kind_however_epochs_run(convolve: bool) -> None:
    """On CPU a step with a convolution is called for each batch, since a loop would be slow."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        return w, {"loss": (jnp.convolve(x, x)[0] if convolve else x[0] ** 2) + 2j, "rows": x}

    ens = px.ensemble(jax.random.normal, 2, 0, mesh=mesh_of(2))
    history = ens.fit(step, (np.ones(8, np.float32),), batch_size=4, key=0)
    np.testing.assert_allclose(history.curve("loss")[1], [[1 + 2j, 1 + 2j]])
    np.testing.assert_allclose(history.curve("rows")[1], np.ones((1, 2, 4)))


ROWS = (np.arange(8, dtype=np.float32),)  # in batches of 4: two steps
NAN = float("nan")


def make_scripted(key: jax.Array, number: jax.Array) -> Any:
    return {"number": number, "steps": jnp.array(0)}


def count(state: Any, x: jax.Array) -> Any:
    return state | {"steps": state["steps"] + 1}, x.mean()


def count_with_convolution(state: Any, x: jax.Array) -> Any:
    return state | {"steps": state["steps"] + 1}, jnp.convolve(x, x).mean()


def look_up(state: Any, table: jax.Array) -> dict[str, jax.Array]:
    value = table[state["number"], state["steps"] // 2 - 1]
    return {"loss": value, "accuracy": -value}


def scripted(table: Any, rule: Any = None, step: Any = count, **options: Any) -> tuple[px.Ensemble, History]:
    """Members trained for as many epochs as the table ``(size, epochs)`` has."""
    table = np.asarray(table, np.float32)
    size, epochs = table.shape
    ens = px.ensemble(make_scripted, size, 0, np.arange(size), mesh=mesh_of(2))
    options = {"evaluate": look_up, "held_out": (table,), "stop_early": rule, "epochs": epochs} | options
    return ens, ens.fit(step, ROWS, batch_size=4, key=0, **options)


def stopped_by_hand(losses: np.ndarray, patience: int) -> tuple[int, int, list[float]]:
    """One member: the best epoch, the one it was stopped after, and the losses of the epochs that it saw."""
    best, least, seen = -1, float("inf"), []
    for epoch, loss in enumerate(losses):
        seen.append(float(loss))
        if loss < least:
            best, least = epoch, loss
        if epoch - best >= patience:
            return best, epoch, seen
    return best, -1, seen


@pytest.mark.sampled(3)
@pytest.mark.parametrize("step", [count, count_with_convolution])
@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("patience", [1, 2, 3])
def test_ensemble_fit_stops_each_member_by_itself_at_its_best_state(patience: int, mode: Any, step: Any) -> None:
    table = np.random.default_rng(patience).uniform(0.5, 1.5, (7, 6)).astype(np.float32)
    table[5] = np.linspace(2, 1, 6)  # never stops
    table[6] = np.linspace(1, 2, 6)  # is never better than after its first epoch
    ens, history = scripted(table, StopEarly("test/loss" if mode == "min" else "test/accuracy", patience, mode), step)
    expected = [stopped_by_hand(losses, patience) for losses in table]
    np.testing.assert_array_equal(history.best_epoch, [best for best, _, _ in expected])
    np.testing.assert_array_equal(history.stopped, [stop for _, stop, _ in expected])
    np.testing.assert_array_equal(ens.stacked()["steps"], [2 * (best + 1) for best, _, _ in expected])
    for losses, (_, _, seen) in zip(history.curve("test/loss")[1].T, expected, strict=True):
        np.testing.assert_array_equal(losses[: len(seen)], np.asarray(seen, np.float32))
        assert (losses[len(seen) :] == losses[len(seen) - 1]).all()  # a member that was stopped does not change


def test_ensemble_fit_takes_a_metric_that_is_not_a_number_for_no_improvement() -> None:
    table = [[3, NAN, 2, 1], [NAN, NAN, NAN, NAN], [3, NAN, NAN, 1], [4, 3, 2, 1]]
    ens, history = scripted(table, StopEarly("test/loss", patience=2))
    np.testing.assert_array_equal(history.best_epoch, [3, -1, 0, 3])
    np.testing.assert_array_equal(history.stopped, [-1, 1, 2, -1])
    np.testing.assert_array_equal(np.asarray(ens.stacked()["steps"])[[0, 2, 3]], [8, 2, 8])


def test_ensemble_fit_may_watch_the_training_loss() -> None:
    step = lambda w, x: (w + 1, jnp.where(w < 4, -w, w))  # noqa: E731
    ens = px.ensemble(lambda key, w: w, 2, 0, jnp.array([0.0, 2.0]))
    history = ens.fit(step, ROWS, batch_size=8, epochs=9, key=0, stop_early=StopEarly("loss", patience=2))
    np.testing.assert_array_equal(history.best_epoch, [3, 1])
    np.testing.assert_array_equal(ens.stacked(), [4, 4])


def test_ensemble_fit_evaluates_in_eval_mode() -> None:
    ens = px.ensemble(lambda key: nnx.Dropout(0.5, rngs=nnx.Rngs(key)), 3, 0, mesh=mesh_of(2))
    mean = lambda net, x: net(x).mean()  # noqa: E731
    history = ens.fit(mean, (X,), batch_size=11, epochs=2, key=4, evaluate=mean, held_out=(X,))
    np.testing.assert_allclose(history.curve("test/loss")[1], np.full((2, 3), X.mean()), rtol=1e-4)
    assert (np.abs(history.curve("loss")[1] - X.mean()) > 1e-3).all()


def test_ensemble_fit_tells_a_callback_of_each_epoch() -> None:
    told: list[Epoch] = []
    rule = StopEarly("test/loss", patience=2)
    _, history = scripted([[3, 4, 5, 5], [3, 2, 1, 1]], rule, callbacks=told.append)
    assert told == history.epochs
    assert [(one.epoch, one.step) for one in told] == [(0, 2), (1, 4), (2, 6), (3, 8)]
    assert str(history).splitlines()[3] == (
        "epoch 4 of 4, loss 3.5 (3.5 to 3.5), test/accuracy -3 (-5 to -1), test/loss 3 (1 to 5), 1 of 2 active"
    )
    assert [one.active.tolist() for one in told] == [[True, True]] * 2 + [[False, True]] * 2


class KilledError(Exception):
    pass


def kill(epoch: Epoch) -> None:
    if epoch.epoch == 2:
        raise KilledError


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("rule", "size"), [(None, 4), (StopEarly("test/loss", patience=2), 3)], ids=["all", "best"])
def test_ensemble_fit_that_was_killed_ends_with_the_same_bits(rule: Any, size: int, tmp_path: Path) -> None:
    """Its members, its history, and who has stopped; also when it was complete, and on other devices."""

    def run(name: str, devices: int = 2, epochs: int = 6, **options: Any) -> tuple[px.Ensemble, History]:
        ens, checkpoint = px.ensemble(make_mlp, size, 0, mesh=mesh_of(devices)), px.Checkpoints(tmp_path / name)
        evaluate = lambda params, x, y: {"loss": jnp.mean((apply_mlp(params, x) - y) ** 2)}  # noqa: E731
        options |= {"evaluate": evaluate, "held_out": (X[:5], Y[:5]), "stop_early": rule, "checkpoint": checkpoint}
        return ens, ens.fit(sgd(apply_mlp), (X, Y), batch_size=BATCH, epochs=epochs, key=1, **options)

    whole, told = run("whole")
    with pytest.raises(KilledError):
        run("killed", callbacks=kill)
    for found, history in (run("killed"), run("killed"), run("whole", devices=3)):
        jax.tree.map(np.testing.assert_array_equal, found.state, whole.state)
        assert str(history) == str(told)
        for name in told.epochs[0].metrics:
            np.testing.assert_array_equal(history.curve(name)[1], told.curve(name)[1])
        np.testing.assert_array_equal(history.stopped, told.stopped)


def test_ensemble_fit_refuses_a_checkpoint_of_another_run(tmp_path: Path) -> None:
    ens, checkpoint = px.ensemble(make_mlp, 3, 0, mesh=mesh_of(2)), px.Checkpoints(tmp_path / "run")
    ens.fit(sgd(apply_mlp), (X, Y), batch_size=BATCH, key=1, checkpoint=checkpoint)
    rows = np.tile(np.arange(NUM_ROWS)[::-1], (3, 1))
    for name, other in ("key", {"key": 2}), ("batch_size", {"batch_size": 5}), ("data", {"rows": rows}):
        options: Any = {"batch_size": BATCH, "key": 1, "checkpoint": checkpoint} | other
        with pytest.raises(px.StateError, match=f"has a run with other {name}; write"):
            ens.fit(sgd(apply_mlp), (X, Y), **options)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "other numbers of rows": ({"data": (np.ones(8), np.ones(7))}, r"same number of rows, got \(\(8,\), \(7,\)\)"),
    "rows of one member": ({"rows": np.arange(8)}, r"integers \(size, m\)"),
    "rows beyond": ({"rows": np.full((2, 6), 8)}, "rows must be numbers"),
    "a metric that is not there": (
        {"stop_early": StopEarly("test/error"), "evaluate": lambda w: {"loss": w}},
        "stop_early watches 'test/error', but the metrics are test/loss",
    ),
    "integers that JAX would cut": (
        {"evaluate": lambda w, n: {"n": n.sum()}, "held_out": (np.array([2**40]),)},
        r"\(data, held_out\)\[1\]\[0\] holds 1099511627776",
    ),
    "a path": ({"checkpoint": "runs"}, r"checkpoint is 'runs'; write checkpoint=px\.Checkpoints\('runs'\)"),
    "a patience": ({"stop_early": 3}, r"stop_early is 3; write stop_early=px\.train\.StopEarly"),
    "a pair of evaluate": ({"evaluate": lambda w: (w, w)}, "step and evaluate give one array"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_ensemble_fit_refuses_what_would_be_wrong_in_silence(case: str) -> None:
    wrong, message = REFUSED[case]
    two = px.ensemble(lambda key: jax.random.normal(key), 2, 0, mesh=mesh_of(2))
    options: dict[str, Any] = {"step": lambda w, *batch: w, "data": ROWS, "batch_size": 4, "key": 0}
    options |= wrong
    with pytest.raises((px.DataError, px.StateError), match=message):
        two.fit(**options)
