"""``ens.fit`` trains each member as ``px.fit`` trains it alone: the same loop, batches and words, on any devices."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import paraxis as px
from paraxis.train import Event, Fitted, StopEarly
from tests import _fits as fits
from tests._members import UNIFORM, Regular, mesh_of
from tests._support import bits, data, values

NUM_ROWS, BATCH, PER_EPOCH = 22, 8, 3  # the third batch has six rows
X, Y = np.asarray(values(NUM_ROWS, 3)), np.arange(NUM_ROWS) % 4
RATES = np.array([0.01, 0.1, 0.03, 0.3, 0.05], "float32")
DATA = px.loader({"x": X, "y": Y}, BATCH, seed=5)
TEST = px.loader({"x": X[:9], "y": Y[:9]}, 4)


def sgd(rate: Any) -> Any:
    return optax.inject_hyperparams(optax.sgd)(learning_rate=rate, momentum=0.9)


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(8, use_bias=False, kernel_init=UNIFORM)(x))
        return nn.Dense(4, kernel_init=UNIFORM)(nn.Dropout(0.5, deterministic=not train)(nn.relu(x)))


def entropy(logits: Any, batch: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])


def params_of(key: jax.Array) -> dict[str, jax.Array]:
    first, last = jax.random.split(key)
    return {"first": jax.random.uniform(first, (2, 1, 8)) - 0.5, "last": jax.random.uniform(last, (8, 4))}


def dense(params: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x[:, :2] @ params["first"][:, 0]) @ params["last"]


def convolved(params: Any, x: jax.Array) -> jax.Array:
    dims = ("NWC", "WIO", "NWC")
    y = jax.lax.conv_general_dilated(x[..., None], params["first"], (1,), "VALID", dimension_numbers=dims)
    return jnp.tanh(y).mean(1) @ params["last"]


def eqx_loss(net: Any, batch: Any, key: Any = None) -> Any:
    keys = None if key is None else jax.random.split(key, len(batch["x"]))
    return entropy(jax.vmap(lambda x, key: net(x, key=key), (0, None if key is None else 0))(batch["x"], keys), batch)


# What is trained, of a key; and the loss.
MODELS: dict[str, tuple[Callable[[jax.Array], dict[str, Any]], Callable[..., Any]]] = {
    "nnx": (lambda key: {"model": Regular(nnx.Rngs(key))}, lambda net, b: entropy(net(b["x"]), b)),
    "linen": (
        lambda key: {"model": LinenNet(), "sample": X[:1]},
        lambda net, b, key=None: entropy(net(b["x"], train=key is not None), b),
    ),
    "equinox": (
        lambda key: {"model": eqx.nn.Sequential([eqx.nn.Linear(3, 4, key=key), eqx.nn.Dropout(0.5)])},
        eqx_loss,
    ),
    "params": (lambda key: {"model": params_of(key), "ema": 0.9}, lambda p, b: entropy(dense(p, b["x"]), b)),
    "conv": (lambda key: {"model": params_of(key)}, lambda p, b: entropy(convolved(p, b["x"]), b)),
}


@functools.cache
def steps_of(name: str) -> tuple[Any, Any]:
    loss = MODELS[name][1]
    return px.train_step(loss, clip=1.0), px.eval_step(loss)


def make(name: str, size: int = 3, devices: int = 2) -> px.Ensemble:
    of_key = lambda key, rate: px.TrainState.create(optimizer=sgd(rate), key=key, **MODELS[name][0](key))  # noqa: E731
    return px.ensemble(of_key, size, 1, RATES[:size], mesh=mesh_of(devices))


def assert_alone(ens: px.Ensemble, fitted: Fitted, alone: Callable[[int], Fitted]) -> None:
    """Each member, and its column of the history, against a run of its own."""
    for index, member in enumerate(ens):
        one = alone(index)
        for found, expected in zip(jax.tree.leaves(member), jax.tree.leaves(one.state), strict=True):
            found, expected = map(data, (found, expected))
            np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)
        for metric in {name for r in (*one.history.steps[:1], *one.history.evaluations) for name in r.metrics}:
            (steps, column), (own_steps, own) = fitted.history.curve(metric), one.history.curve(metric)
            np.testing.assert_array_equal(steps[: len(own)], own_steps)
            np.testing.assert_allclose(column[: len(own), index], own, rtol=1e-3, atol=1e-5)
        assert one.best is None or fitted.best is None or fitted.best.step[index] == one.best.step


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("size", "devices"), [(3, 2), (5, 8), (2, 1)])
@pytest.mark.parametrize("name", MODELS)
def test_ensemble_fit_trains_each_member_as_it_is_trained_alone(name: str, size: int, devices: int) -> None:
    ens, (step, evaluate) = make(name, size, devices), steps_of(name)
    before, words = list(ens), {"epochs": 3, "evaluate": px.Evaluate(evaluate, TEST), "progress": False}
    fitted = ens.fit(step, DATA, **words)
    assert fitted.state is ens is fitted.last or len(fitted.last) == size
    assert_alone(ens, fitted, lambda index: px.fit(before[index], step, DATA, **words))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "case", ["rows", "list", "transform", "steps", "early", "in batches", "of a state that has done steps"]
)
def test_ensemble_fit_takes_the_words_of_fit(case: str) -> None:
    """Bagging; data that are read batch by batch; schedules within an epoch; early stopping of each member."""
    ens, (step, evaluate), words = make("params"), steps_of("params"), {"steps": 7, "progress": False}
    shares, arrays = np.random.default_rng(0).integers(0, NUM_ROWS, (3, 13)), {"x": X, "y": Y}
    data: dict[str, Any] = {
        "rows": px.loader(arrays, BATCH, seed=2, rows=shares),
        "list": [{"x": X[at], "y": Y[at]} for at in (slice(0, 8), slice(8, 15))],
        "transform": px.loader(arrays, BATCH, transform=lambda b: b | {"x": b["x"] + 1}),
    }
    if case in ("steps", "early"):
        words["evaluate"] = px.Evaluate(evaluate, [{"x": X[:9], "y": -Y[:9] % 4}], every=2)
    if case == "early":
        words |= {"stop_early": StopEarly("test/loss", patience=1), "steps": 30}
    if case.startswith("of"):
        ens.fit(step, DATA, steps=2, progress=False)
    before, found = list(ens), data.get(case, DATA)
    if case == "in batches":
        fitted = ens.fit(step, arrays, batch_size=BATCH, seed=5, **words)
    else:
        fitted = ens.fit(step, found, **words)
    of_one = lambda index: px.loader(arrays, BATCH, seed=2, rows=shares[index]) if case == "rows" else found  # noqa: E731
    assert_alone(ens, fitted, lambda index: px.fit(before[index], step, of_one(index), **words))
    if case == "early":
        assert fitted.best is not None
        assert len({*fitted.best.step.tolist()}) > 1
        assert int(ens[0].step) == fitted.best.step[0] < int(fitted.last[0].step)


PLAIN = lambda w, key: (w + jax.random.normal(key), {"loss": w})  # noqa: E731
NOISY = px.train_step(lambda w, key: jnp.sum((w - jax.random.normal(key)) ** 2))


@pytest.mark.parametrize("step", [PLAIN, NOISY], ids=["plain", "train_step"])
def test_ensemble_fit_without_data_gives_each_member_its_own_keys(step: Any) -> None:
    state = lambda w: px.TrainState.create(w, optax.sgd(0.1)) if step is NOISY else w  # noqa: E731
    ens, key = px.ensemble(lambda key: state(jax.random.normal(key)), 5, 0, mesh=mesh_of(2)), jax.random.key(4)
    before, keys = list(ens), px.keys(key, ens.axis)
    fitted = ens.fit(step, key, steps=4, progress=False)
    assert_alone(ens, fitted, lambda index: px.fit(before[index], step, keys[index], steps=4, progress=False))


@pytest.mark.parametrize("convolve", [False, True])
def test_ensemble_fit_takes_plain_steps_in_one_program_or_not(convolve: bool) -> None:
    """On CPU a step with a convolution is called for each batch, since a loop would be slow."""

    def step(w: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        return w + 1, (jnp.convolve(x, x)[0] if convolve else x[0] ** 2) + w

    ens = px.ensemble(lambda key, w: w, 3, 0, np.arange(3.0), mesh=mesh_of(2))
    told: list[Event] = []
    data = np.arange(1.0, 9.0, dtype="f"), np.ones(8)
    fitted = ens.fit(step, px.loader(data, 4, shuffle=False), epochs=2, callbacks=told.append, progress=False)
    losses = [1.0, 26.0, 3.0, 28.0] + np.arange(3.0)[:, None]
    np.testing.assert_allclose(fitted.history.curve("loss")[1].T, [[1, 26, 3, 28], [2, 27, 4, 29], [3, 28, 5, 30]])
    np.testing.assert_allclose([r.metrics["loss"] for r in fitted.history.epochs], losses.T.reshape(2, 2, 3).mean(1))
    assert [(e.kind, e.step, e.rows) for e in told if e.kind == "step"] == [("step", k, 4) for k in (1, 2, 3, 4)]
    assert {e.state is ens for e in told if e.kind in ("start", "epoch", "end")} == {True}
    assert str(fitted.history).splitlines()[1].split("  ")[-1] == "14.5 (13.5 to 15.5)"


def test_ensemble_fit_evaluates_in_eval_mode() -> None:
    ens = px.ensemble(lambda key: nnx.Dropout(0.5, rngs=nnx.Rngs(key)), 3, 0, mesh=mesh_of(2))
    mean = lambda net, x: net(x).mean()  # noqa: E731
    fitted = ens.fit(mean, (X,), batch_size=11, epochs=2, evaluate=px.Evaluate(mean, [(X,)]), progress=False)
    np.testing.assert_allclose(fitted.history.curve("test/loss")[1], np.full((2, 3), X.mean()), rtol=1e-4)
    assert np.abs(fitted.history.curve("loss")[1] - X.mean()).mean() > 0.01


NAN = float("nan")


def scripted(table: Any, rule: Any = None, **words: Any) -> tuple[px.Ensemble, Fitted]:
    """Members whose evaluation after epoch ``k`` is column ``k`` of a table ``(size, epochs)``."""
    table = np.asarray(table, np.float32)
    make = lambda key, number: {"number": number, "steps": jnp.array(0)}  # noqa: E731
    count = lambda state, x: (state | {"steps": state["steps"] + 1}, x.mean())  # noqa: E731
    look_up = lambda state, table: {"loss": table[state["number"], state["steps"] // 2 - 1]}  # noqa: E731
    ens = px.ensemble(make, len(table), 0, np.arange(len(table)), mesh=mesh_of(2))
    words = {"evaluate": px.Evaluate(look_up, [table]), "epochs": table.shape[1], "progress": False} | words
    return ens, ens.fit(count, np.arange(8.0, dtype="f"), batch_size=4, stop_early=rule, **words)


@pytest.mark.parametrize(("mode", "sign"), [("min", 1), ("max", -1)])
def test_ensemble_fit_stops_each_member_by_itself_at_its_best_state(mode: Any, sign: int) -> None:
    """The last of all, a member whose metric is never a number keeps what it has."""
    table = np.array([[3, 2, 4, 4, 1], [5, 4, 3, 2, 1], [1, 2, 2, 3, 3], [3, NAN, 2, NAN, NAN], [NAN] * 5])
    ens, fitted = scripted(sign * table, StopEarly("test/loss", patience=2, mode=mode))
    assert fitted.best is not None
    assert fitted.best.step.tolist() == [4, 10, 2, 6, -1]
    assert np.asarray(ens.stacked()["steps"])[:4].tolist() == [4, 10, 2, 6]
    assert np.asarray(fitted.last.stacked()["steps"]).tolist() == [8, 10, 6, 10, 4]
    assert fitted.active.tolist() == [False, True, False, False, False]
    seen = sign * fitted.history.curve("test/loss")[1].T  # a member that was stopped does not change
    np.testing.assert_array_equal(seen[[0, 2]], [[3, 2, 4, 4, 4], [1, 2, 2, 2, 2]])
    _, over = scripted(table[[0, 2]], StopEarly("test/loss", patience=2))
    assert (over.history.epochs[-1].epoch, over.stopped and over.stopped[:31]) == (3, "test/loss was not better than 1")


class KilledError(Exception):
    pass


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rule", [None, StopEarly("test/loss", patience=1)], ids=["all", "best"])
def test_ensemble_fit_that_was_killed_ends_with_the_same_bits(rule: Any, tmp_path: Path) -> None:
    """Also when it was complete, and on other devices; and what a callback does to members is saved."""

    def run(name: str, devices: int = 2, dies: bool = False) -> tuple[px.Ensemble, Fitted]:
        ens, (step, evaluate) = make("params", 4, devices), steps_of("params")

        def exploit(event: Event) -> None:
            if event.kind == "epoch":  # the worst copies the first
                worst = event.metrics["loss"] == event.metrics["loss"].max()
                first = lambda state, is_worst: jax.tree.map(  # noqa: E731
                    lambda x: jnp.where(is_worst, px.pick(x, 0, "members"), x) if x.dtype == "f" else x, state
                )
                ens.train(first, worst, in_axes=0)
            if dies and event.kind == "step" and event.step == 4 * PER_EPOCH - 1:
                raise KilledError

        paths: dict[str, Any] = {"checkpoint": tmp_path / name, "log": tmp_path / f"{name}.log"}
        evaluations = px.Evaluate(evaluate, [{"x": X[:9], "y": -Y[:9] % 4}])
        words = {"evaluate": evaluations, "stop_early": rule, "callbacks": exploit, "progress": False}
        return ens, ens.fit(step, DATA, epochs=6, **words, **paths)

    whole, told = run("whole")
    with pytest.raises(KilledError):
        run("killed", dies=True)
    for ens, fitted in (run("killed"), run("killed"), run("whole", devices=3)):
        assert bits((ens.state, fitted.last.state)) == bits((whole.state, told.last.state))
        assert (str(fitted.history), str(fitted.best)) == (str(told.history), str(told.best))
    assert fits.lines(tmp_path / "killed.log") == fits.lines(tmp_path / "whole.log")


def test_ensemble_fit_writes_a_number_for_each_member(tmp_path: Path) -> None:
    words: dict[str, Any] = {"log": tmp_path / "log", "tensorboard": tmp_path / "board", "checkpoint": tmp_path / "run"}
    fitted = scripted([[3, NAN], [2, 1]], **words)[1]
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line["metrics"]["test/loss"] for line in lines if line["event"] == "evaluate"] == [[3, 2], [None, 1]]
    found = fits.points(tmp_path / "board")
    assert (found["test/loss/1"], found["epoch/loss/0"]) == ({2: 2, 4: 1}, {2: 3.5, 4: 3.5})
    fitted.history.plot(tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "rows of other numbers": ({"data": (np.ones(8), np.ones(7))}, "source must be a tree of arrays"),
    "a metric that is no number": ({"step": lambda w, x: (w, x), "data": np.ones(8)}, "metric 'loss' must be a scalar"),
    "a metric that is not there": ({"stop_early": StopEarly("test/error")}, "names 'test/error', but there is"),
    "integers that JAX would cut": ({"data": np.array([2**40] * 8)}, "holds 1099511627776"),
    "a state of flax's": ({"step": px.train_step(lambda w, x: w)}, "a step takes a px.TrainState"),
    "no epochs": ({"epochs": None}, "give either epochs or steps"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_ensemble_fit_refuses_what_would_be_wrong_in_silence(case: str) -> None:
    two = px.ensemble(lambda key: jax.random.normal(key), 2, 0, mesh=mesh_of(2))
    words = {"step": lambda w, x: w, "data": np.ones(8), "batch_size": 4, "epochs": 1, "progress": False}
    wrong, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        two.fit(**(words | wrong))


@pytest.mark.parametrize(("backend", "which"), [("cpu", "step 1 "), ("gpu", "one of the steps 1 to 2;")])
def test_ensemble_fit_names_the_steps_that_raise(monkeypatch: Any, backend: str, which: str) -> None:
    """Where an epoch is one program, as on a GPU whatever it costs, these are all of them."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    two = px.ensemble(jax.random.normal, 2, 0, mesh=mesh_of(2))
    with pytest.raises(TypeError, match="incompatible shapes") as raised:
        two.fit(lambda w, x: w + x + jnp.ones(3), np.ones(8), batch_size=4, epochs=1, progress=False)
    assert f"raised by {which}" in raised.value.__notes__[-1]


@pytest.mark.parametrize("rows", [[[0, 1]], [0, 9], [0.5]])
def test_loader_refuses_rows_that_are_none_of_its_source(rows: Any) -> None:
    with pytest.raises(px.DataError, match=r"rows must be numbers of the source's 8 rows|rows=rows"):
        next(px.loader(np.ones(8), 2, rows=rows).epoch(0))
