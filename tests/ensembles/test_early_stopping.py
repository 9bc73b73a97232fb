"""Validation after each epoch, patience, members that fail, and how the epochs are shown."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

import paraxis as px
from paraxis.ensembles import Epoch, History
from tests._support import assert_close, values

MESH = Mesh(np.array(jax.devices()[:2]), ("members",))
ROWS = (np.arange(8, dtype=np.float32),)  # in batches of 4: two steps
NAN = float("nan")


def host(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), tree)


# --- scripted members: they count their steps, and read their validation losses off a table ---------------------------


def make_scripted(key: jax.Array, number: jax.Array) -> Any:
    return {"number": number, "steps": jnp.array(0)}


def count(state: Any, x: jax.Array) -> Any:
    return state | {"steps": state["steps"] + 1}, x.mean()


def count_with_convolution(state: Any, x: jax.Array) -> Any:
    return state | {"steps": state["steps"] + 1}, jnp.convolve(x, x).mean()


def look_up(state: Any, table: jax.Array) -> jax.Array:
    return table[state["number"], state["steps"] // 2 - 1]


def scripted(table: np.ndarray, step: Any = count, **options: Any) -> tuple[px.Ensemble, History]:
    """Members trained for as many epochs as the table ``(size, num_epochs)`` has."""
    size, num_epochs = table.shape
    ens = px.ensemble(make_scripted, size, 0, np.arange(size), mesh=MESH)
    validation = {"validate": look_up, "validation": (table,)} | options
    return ens, ens.fit(step, ROWS, batch_size=4, num_epochs=num_epochs, key=0, **validation)


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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("step", [count, count_with_convolution])
@pytest.mark.parametrize("patience", [1, 2, 3])
def test_patience_stops_each_member_by_itself_and_restores_its_best_state(patience: int, step: Any) -> None:
    table = np.random.default_rng(patience).uniform(0.5, 1.5, (7, 6)).astype(np.float32)
    table[5] = np.linspace(2, 1, 6)  # never stops
    table[6] = np.linspace(1, 2, 6)  # is never better than after its first epoch
    ens, history = scripted(table, step, patience=patience)
    assert history.scanned == (step is count)
    expected = [stopped_by_hand(losses, patience) for losses in table]
    assert history.best_epoch is not None
    np.testing.assert_array_equal(history.best_epoch, [best for best, _, _ in expected])
    np.testing.assert_array_equal(history.stopped, [stop for _, stop, _ in expected])
    np.testing.assert_array_equal(ens.stacked()["steps"], [2 * (best + 1) for best, _, _ in expected])
    assert history.validation is not None
    assert len(history.validation) == 6
    for losses, (_, _, seen) in zip(history.validation.T, expected, strict=True):
        np.testing.assert_array_equal(losses[: len(seen)], np.asarray(seen, np.float32))
        assert (losses[len(seen) :] == losses[len(seen) - 1]).all()  # a member that was stopped does not change


def test_training_ends_when_all_members_have_stopped() -> None:
    table = np.array([[1, 2, 3, 4, 5], [2, 1, 3, 4, 5]], np.float32)
    ens, history = scripted(table, patience=2)
    assert history.validation is not None
    assert len(history.validation) == len(history.outputs) == 4
    np.testing.assert_array_equal(history.stopped, [2, 3])
    np.testing.assert_array_equal(ens.stacked()["steps"], [2, 4])


def test_without_patience_nobody_stops_and_nothing_is_restored() -> None:
    table = np.array([[1, 2, 3], [3, 2, 1], [2, 1, 3]], np.float32)
    ens, history = scripted(table)
    assert history.best_epoch is not None
    np.testing.assert_array_equal(history.best_epoch, [0, 2, 1])
    np.testing.assert_array_equal(history.stopped, [-1, -1, -1])
    np.testing.assert_array_equal(ens.stacked()["steps"], [6, 6, 6])
    np.testing.assert_array_equal(history.validation, table.T)


def test_a_loss_that_is_not_a_number_is_no_improvement() -> None:
    table = np.array([[3, NAN, 2, 1], [NAN, NAN, NAN, NAN], [3, NAN, NAN, 1], [4, 3, 2, 1]], np.float32)
    with pytest.warns(RuntimeWarning, match=r"members \[.*\] gave results that are not finite"):
        ens, history = scripted(table, patience=2)
    assert history.best_epoch is not None
    np.testing.assert_array_equal(history.best_epoch, [3, -1, 0, 3])
    np.testing.assert_array_equal(history.stopped, [-1, 1, 2, -1])
    np.testing.assert_array_equal(np.asarray(ens.stacked()["steps"])[[0, 2, 3]], [8, 2, 8])
    assert history.failed == (0, 1, 2)


# --- real members -----------------------------------------------------------------------------------------------------


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layer: Any = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.norm(self.layer(x))).sum(-1)


def make_net(key: jax.Array) -> Net:
    return Net(nnx.Rngs(params=key, dropout=jax.random.fold_in(key, 1)))


def train_net(net: Net, x: jax.Array, y: jax.Array) -> jax.Array:
    loss, gradient = nnx.value_and_grad(mean_squares)(net, x, y)
    params = nnx.state(net, nnx.Param)
    nnx.update(net, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient))
    return loss


def mean_squares(net: Net, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((net(x) - y) ** 2)


def test_validation_losses_are_those_in_eval_mode() -> None:
    x, y, held_out = values(16, 3), values(16, seed=1), (values(6, 3, seed=2), values(6, seed=3))
    ens = px.ensemble(make_net, 3, 0, mesh=MESH)
    options: dict[str, Any] = {"batch_size": 8, "key": 4, "validate": mean_squares, "validation": held_out}
    for first, num in [(0, 1), (1, 2)]:
        history = ens.fit(train_net, (x, y), first_epoch=first, num_epochs=num, **options)
        by_hand = []
        for net in ens:
            net.eval()
            by_hand.append(float(mean_squares(net, *held_out)))
        assert history.validation is not None
        assert history.validation.shape == (num, 3)
        np.testing.assert_allclose(history.validation[-1], by_hand, rtol=1e-4)


def train_line(w: jax.Array, x: jax.Array, rate: jax.Array) -> Any:
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((w * x - 2 * x) ** 2))(w)
    return w - rate * gradient, loss


def make_line(key: jax.Array) -> jax.Array:
    return jax.random.normal(key, (2, 1))


LINE = (np.asarray(values(12)),)


@pytest.mark.slow
def test_a_member_that_fails_is_reported_once_with_its_index() -> None:
    ens = px.ensemble(make_line, 4, 0, mesh=MESH, apply=lambda w, x: (w * x).sum(0))
    rates = (jnp.array([0.1, 0.1, jnp.inf, 0.1]),)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = ens.fit(train_line, LINE, batch_size=4, num_epochs=4, key=0, per_member=rates)
    messages = [str(warning.message) for warning in caught if warning.category is RuntimeWarning]
    assert len(messages) == 1
    assert "in epoch 1, members [2]" in messages[0]
    assert "where=ens.finite()" in messages[0]
    assert "ens = ens.drop(2,)" in messages[0]
    assert caught[0].filename == __file__
    assert history.failed == (2,)
    np.testing.assert_array_equal(ens.finite(), [True, True, False, True])
    assert np.isfinite(ens.predict(LINE[0], average="mean", where=ens.finite())).all()
    assert ens.drop(2).finite().all()


def test_members_that_fail_later_are_reported_then() -> None:
    table = np.array([[1, 1, 1, 1], [1, NAN, NAN, NAN], [1, 1, np.inf, 1], [1, NAN, 1, 1]], np.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, history = scripted(table)
    messages = [str(warning.message) for warning in caught]
    assert [message[: message.index(" gave")] for message in messages] == [
        "ensemble.fit: in epoch 2, members [1, 3]",
        "ensemble.fit: in epoch 3, members [2]",
    ]
    assert history.failed == (1, 2, 3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_failures_in_half_precision_are_seen(dtype: str) -> None:
    def step(w: jax.Array, x: jax.Array, rate: jax.Array) -> Any:
        new, loss = train_line(w, x, rate)
        return new, loss.astype(dtype)

    ens = px.ensemble(make_line, 2, 0, mesh=MESH)
    with pytest.warns(RuntimeWarning, match=r"members \[1\] gave results that are not finite"):
        history = ens.fit(step, LINE, batch_size=4, key=0, per_member=(jnp.array([0.1, jnp.nan]),))
    assert history.failed == (1,)


# --- how it is shown --------------------------------------------------------------------------------------------------


def test_a_progress_function_gets_every_epoch() -> None:
    table = np.array([[1, 2, 3, 4], [4, 3, 2, 1]], np.float32)
    epochs: list[Epoch] = []
    _, history = scripted(table, patience=2, progress=epochs.append)
    assert [(epoch.number, epoch.num_epochs) for epoch in epochs] == [(number, 4) for number in range(4)]
    np.testing.assert_array_equal(np.stack([epoch.outputs for epoch in epochs]), history.outputs)
    np.testing.assert_array_equal(np.stack([np.asarray(epoch.validation) for epoch in epochs]), history.validation)
    assert [epoch.active.tolist() for epoch in epochs] == [[True, True]] * 2 + [[False, True]] * 2


def test_progress_shows_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    scripted(np.array([[3, 2, 1], [3, 2, 1]], np.float32), progress=True)
    shown = capsys.readouterr().out
    assert "3/3" in shown
    assert "2 of 2 active" in " ".join(shown.split())
    scripted(np.array([[3, 2, 1]], np.float32))
    assert capsys.readouterr().out == ""


def test_without_rich_a_bar_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "rich.progress", None)
    with pytest.raises(ModuleNotFoundError, match=r"progress=True needs rich, .* pip install .*\[cli\].*, or give a"):
        scripted(np.ones((2, 1), np.float32), progress=True)


def test_interrupted_between_epochs_members_are_whole() -> None:
    def stop(epoch: Epoch) -> None:
        if epoch.number == 1:
            raise KeyboardInterrupt("stop")

    rates = (jnp.array([0.1, 0.2, 0.3]),)
    here, there = (px.ensemble(make_line, 3, 0, mesh=MESH) for _ in range(2))
    with pytest.raises(KeyboardInterrupt, match="stop"):
        here.fit(train_line, LINE, batch_size=4, num_epochs=5, key=0, per_member=rates, progress=stop)
    there.fit(train_line, LINE, batch_size=4, num_epochs=2, key=0, per_member=rates)
    assert_close(host(here.stacked()), host(there.stacked()), rtol=0, atol=0)
    here.fit(train_line, LINE, batch_size=4, num_epochs=3, first_epoch=2, key=0, per_member=rates)
    there.fit(train_line, LINE, batch_size=4, num_epochs=3, first_epoch=2, key=0, per_member=rates)
    assert_close(host(here.stacked()), host(there.stacked()), rtol=0, atol=0)


# --- what is refused --------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an array for data": (
        {"data": np.ones(12)},
        r"data must be a tuple, one entry per argument.*got ndarray; write data=\(x,\)",
    ),
    "one array for per_member": ({"per_member": np.ones(2)}, r"per_member must be a tuple.*write per_member=\(x,\)"),
    "a list for validation": ({"validation": [1.0]}, r"validation must be a tuple.*got list"),
    "half a batch": ({"batch_size": 4.0}, r"batch_size must be an integer of at least 1, got 4\.0"),
    "an epoch before the first": ({"first_epoch": -1}, r"first_epoch must be an integer of at least 0, got -1"),
    "other numbers of rows": ({"data": (np.ones(12), np.ones(11))}, r"same number of rows, got \(\(12,\), \(11,\)\)"),
    "a number": ({"data": (np.ones(12), 1.0)}, r"same number of rows, got \(\(12,\), \(\)\); write ens\.fit"),
    "no data": ({"data": ()}, r"data must be a tuple of arrays.*got \(\); write ens\.fit"),
    "one list of rows": (
        {"rows": np.arange(12)},
        r"rows must be.*\(2, num_rows\).*int64\[12\].*bootstrap_rows\(key, 12\)",
    ),
    "rows of three": ({"rows": np.ones((3, 6), int)}, r"rows must be whole numbers.*int64\[3, 6\]; write rows="),
    "rows as booleans": ({"rows": np.ones((2, 6), bool)}, r"rows must be whole numbers.*got bool\[2, 6\]; write rows="),
    "rows beyond": ({"rows": np.full((2, 6), 12)}, r"rows must be between 0 and 11, .* they go from 12 to 12"),
    "rows below": ({"rows": np.full((2, 6), -1)}, r"rows must be between 0 and 11, .* they go from -1 to -1"),
    "weights": ({"weights": np.ones((3, 12))}, r"weights must be \(12,\), or \(2, 12\) for each.*got \(3, 12\)"),
    "no batch": ({"batch_size": 0}, r"batch_size must be an integer of at least 1, got 0"),
    "no epochs": ({"num_epochs": 0}, r"num_epochs must be an integer of at least 1, got 0"),
    "no patience": ({"patience": 0}, r"patience must be an integer of at least 1, got 0"),
    "a large batch": ({"batch_size": 13}, r"batch_size=13 is more than the 12 rows.*write batch_size=12"),
    "few rows": ({"rows": np.ones((2, 3), int)}, r"batch_size=4 is more than the 3 rows.*write batch_size=3"),
    "patience alone": ({"patience": 1}, r"patience needs both; write validate=.*validation=\(x, y\), patience=3"),
    "no validation": ({"validate": look_up}, r"validate and validation go together.*write validate="),
    "no validate": ({"validation": (1.0,)}, r"validate and validation go together.*write validate="),
    "not one loss": (
        {"validate": lambda w, x: w[:, 0], "validation": (1.0,)},
        r"validate must give one number for a member, got shape \(2,\); write validate=.*\.mean\(\)",
    ),
    "rates of three": ({"per_member": (np.ones(3),)}, r"\(3,\).*each of the 2 members has its own, \(2, \.\.\.\)"),
}


@pytest.fixture(scope="module")
def two() -> px.Ensemble:
    return px.ensemble(make_line, 2, 0, mesh=MESH)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_is_told(case: str, two: px.Ensemble) -> None:
    wrong, message = REFUSED[case]
    data = wrong.get("data", (np.ones(12, np.float32),))
    options: dict[str, Any] = {"batch_size": 4, "key": 0} | {k: v for k, v in wrong.items() if k != "data"}
    with pytest.raises(px.ShapeError, match=message):
        two.fit(lambda w, *batch: w, data, **options)
