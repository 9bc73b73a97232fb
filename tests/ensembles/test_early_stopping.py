"""Metrics after each epoch, members that stop by themselves, members that fail, and what is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from paraxis.ensembles import Epoch, History
from paraxis.train import StopEarly
from tests.ensembles._kinds import NNX, X, Y, loss_of, make_nnx, mesh_of

ROWS = (np.arange(8, dtype=np.float32),)  # in batches of 4: two steps
NAN = float("nan")

# Scripted members: they count their steps, and read their metric off a table.


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
    options = {"evaluate": look_up, "held_out": (table,), "stop_early": rule} | options
    return ens, ens.fit(step, ROWS, batch_size=4, epochs=epochs, key=0, **options)


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
def test_each_member_stops_by_itself_and_gets_its_best_state(patience: int, mode: Any, step: Any) -> None:
    table = np.random.default_rng(patience).uniform(0.5, 1.5, (7, 6)).astype(np.float32)
    table[5] = np.linspace(2, 1, 6)  # never stops
    table[6] = np.linspace(1, 2, 6)  # is never better than after its first epoch
    ens, history = scripted(table, StopEarly("loss" if mode == "min" else "accuracy", patience, mode), step)
    assert history.scanned == (step is count)
    expected = [stopped_by_hand(losses, patience) for losses in table]
    assert history.best_epoch is not None
    np.testing.assert_array_equal(history.best_epoch, [best for best, _, _ in expected])
    np.testing.assert_array_equal(history.stopped, [stop for _, stop, _ in expected])
    np.testing.assert_array_equal(ens.stacked()["steps"], [2 * (best + 1) for best, _, _ in expected])
    for losses, (_, _, seen) in zip(history.metrics["loss"].T, expected, strict=True):
        np.testing.assert_array_equal(losses[: len(seen)], np.asarray(seen, np.float32))
        assert (losses[len(seen) :] == losses[len(seen) - 1]).all()  # a member that was stopped does not change


def test_training_ends_when_all_members_have_stopped() -> None:
    ens, history = scripted([[1, 2, 3, 4, 5], [2, 1, 3, 4, 5]], StopEarly("loss", patience=2))
    assert len(history.metrics["loss"]) == len(history.outputs) == 4
    np.testing.assert_array_equal(history.stopped, [2, 3])
    np.testing.assert_array_equal(ens.stacked()["steps"], [2, 4])


def test_without_a_rule_nobody_stops_and_nothing_is_restored() -> None:
    table = [[1, 2, 3], [3, 2, 1], [2, 1, 3]]
    ens, history = scripted(table)
    assert history.best_epoch is None
    np.testing.assert_array_equal(history.stopped, [-1, -1, -1])
    np.testing.assert_array_equal(ens.stacked()["steps"], [6, 6, 6])
    np.testing.assert_array_equal(history.metrics["loss"], np.transpose(table))


def test_a_metric_that_is_not_a_number_is_no_improvement() -> None:
    table = [[3, NAN, 2, 1], [NAN, NAN, NAN, NAN], [3, NAN, NAN, 1], [4, 3, 2, 1]]
    ens, history = scripted(table, StopEarly("loss", patience=2))
    assert history.best_epoch is not None
    np.testing.assert_array_equal(history.best_epoch, [3, -1, 0, 3])
    np.testing.assert_array_equal(history.stopped, [-1, 1, 2, -1])
    np.testing.assert_array_equal(np.asarray(ens.stacked()["steps"])[[0, 2, 3]], [8, 2, 8])


def test_a_direction_is_asked_for() -> None:
    """Taken for a loss, an accuracy would keep each member's worst state."""
    with pytest.raises(px.errors.DataError, match="mode"):
        StopEarly("accuracy", patience=1)


def test_metrics_are_those_in_eval_mode() -> None:
    ens = px.ensemble(make_nnx, 3, 0, mesh=mesh_of(2))
    evaluate = lambda net, x, y: {"loss": loss_of(net(x), y)}  # noqa: E731
    history = ens.fit(NNX.step, (X, Y), batch_size=3, epochs=2, key=4, evaluate=evaluate, held_out=(X, Y))
    by_hand = []
    for net, _ in ens:
        net.eval()
        by_hand.append(float(loss_of(net(X), Y)))
    np.testing.assert_allclose(history.metrics["loss"][-1], by_hand, rtol=1e-4)


def test_progress_is_told_of_each_epoch() -> None:
    epochs: list[Epoch] = []
    _, history = scripted([[3, 4, 5, 5], [3, 2, 1, 1]], StopEarly("loss", patience=2), progress=epochs.append)
    assert [epoch.number for epoch in epochs] == [0, 1, 2, 3]
    assert str(epochs[3]) == (
        "epoch 4 of 4, output 3.5 (3.5 to 3.5), accuracy -3 (-5 to -1), loss 3 (1 to 5), 1 of 2 active"
    )
    np.testing.assert_array_equal(np.stack([epoch.outputs for epoch in epochs]), history.outputs)
    assert [epoch.active.tolist() for epoch in epochs] == [[True, True]] * 2 + [[False, True]] * 2


def test_interrupted_between_epochs_members_are_whole() -> None:
    def stop(epoch: Epoch) -> None:
        if epoch.number == 1:
            raise KeyboardInterrupt("stop")

    make = lambda key: jax.random.normal(key)  # noqa: E731
    step = lambda w, x: (w - 0.1 * x.mean(), w)  # noqa: E731
    here, there = (px.ensemble(make, 3, 0, mesh=mesh_of(2)) for _ in range(2))
    with pytest.raises(KeyboardInterrupt, match="stop"):
        here.fit(step, ROWS, batch_size=4, epochs=5, key=0, progress=stop)
    there.fit(step, ROWS, batch_size=4, epochs=2, key=0)
    np.testing.assert_array_equal(here.stacked(), there.stacked())
    for ens in (here, there):
        ens.fit(step, ROWS, batch_size=4, epochs=5, first_epoch=2, key=0)
    np.testing.assert_array_equal(here.stacked(), there.stacked())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "other numbers of rows": ({"data": (np.ones(8), np.ones(7))}, r"same number of rows, got \(\(8,\), \(7,\)\)"),
    "an array for data": ({"data": np.ones(8)}, "data must be a tuple of arrays"),
    "rows of three": ({"rows": np.ones((3, 6), int)}, r"rows must be numbers \(2, m\)"),
    "rows beyond": ({"rows": np.full((2, 6), 8)}, "rows must be numbers"),
    "rows below": ({"rows": np.full((2, 6), -1)}, "rows must be numbers"),
    "a large batch": ({"batch_size": 9}, "batch_size must be at most 8, got 9"),
    "no epochs": ({"epochs": 2, "first_epoch": 2}, "epochs must be an integer of at least 3"),
    "a rule without metrics": ({"stop_early": StopEarly("loss")}, "stop_early is a rule for a metric of evaluate"),
    "a metric that is not there": (
        {"stop_early": StopEarly("error"), "evaluate": lambda w: {"loss": w}},
        "stop_early watches 'error', but evaluate gives loss",
    ),
    "one number": ({"evaluate": lambda w: w}, "evaluate must give a dict of numbers"),
    "rates of three": ({"per_member": (np.ones(3),)}, r"\(3,\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_wrong_in_silence_is_refused(case: str) -> None:
    wrong, message = REFUSED[case]
    two = px.ensemble(lambda key: jax.random.normal(key), 2, 0, mesh=mesh_of(2))
    options: dict[str, Any] = {"data": ROWS, "batch_size": 4, "key": 0} | wrong
    with pytest.raises(px.ShapeError, match=message):
        two.fit(lambda w, *batch: w, **options)
