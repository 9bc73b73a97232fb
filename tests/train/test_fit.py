"""px.fit is the loop that one would write by hand, and nothing is waited for in it."""

import collections
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import paraxis as px
from tests._support import axis_on
from tests.train._fits import ONE, PER_EPOCH, arrays, batches, bits, by_hand, data, evaluate_step, loss, start, step


class Seen:
    """Keeps the events."""

    def __init__(self) -> None:
        self.events: list[px.train.Event] = []

    def __call__(self, event: px.train.Event) -> None:
        self.events.append(event)

    def of(self, kind: str) -> list[px.train.Event]:
        return [event for event in self.events if event.kind == kind]


def test_a_run_is_the_hand_written_loop_bit_for_bit() -> None:
    seen = Seen()
    fitted = px.fit(start(), step, data(), epochs=3, callbacks=seen, progress=False)
    expected = list(by_hand(batches(data(), range(3 * PER_EPOCH))))
    params, opt_state, _ = expected[-1]
    assert bits((fitted.state.params, fitted.state.opt_state)) == bits((params, opt_state))
    assert [event.metrics["loss"] for event in seen.of("step")] == [loss for _, _, loss in expected]
    assert [event.rows for event in seen.of("step")] == [16, 16, 16, 8] * 3
    assert [(event.step, event.epoch) for event in seen.of("step")] == [(k + 1, k // 4) for k in range(12)]


def test_an_epoch_s_average_weighs_each_row_the_same() -> None:
    fitted = px.fit(start(), step, data(), epochs=2, progress=False)
    losses = np.array([loss for _, _, loss in by_hand(batches(data(), range(8)))], np.float64)
    rows = np.array([16, 16, 16, 8] * 2, np.float64)
    expected = [np.average(losses[k : k + 4], weights=rows[k : k + 4]) for k in (0, 4)]
    found = [record.metrics["loss"] for record in fitted.history.epochs]
    np.testing.assert_allclose(found, expected, rtol=1e-15)
    assert [(record.step, record.epoch) for record in fitted.history.epochs] == [(4, 0), (8, 1)]


@pytest.mark.parametrize("kind", ["list", "function", "function of the epoch", "iterable", "known steps"])
def test_any_batches_will_do_that_can_be_gone_through_again(kind: str) -> None:
    first, second = batches(data(), range(4)), batches(data(), range(4, 8))
    again: dict[str, tuple[Any, list[Any], Any]] = {
        "list": (first, first + first, {"epochs": 2}),
        "function": (lambda: iter(first), first + first, {"epochs": 2}),
        "function of the epoch": (lambda epoch: (first, second)[epoch], first + second, {"epochs": 2}),
        "iterable": (collections.deque(first), first + first, {"epochs": 2}),
        "known steps": (lambda: iter(first), first + first[:2], {"steps": 6}),
    }
    source, in_order, length = again[kind]
    fitted = px.fit(start(), step, source, **length, progress=False)
    params, opt_state, _ = list(by_hand(in_order))[-1]
    assert bits((fitted.state.params, fitted.state.opt_state)) == bits((params, opt_state))
    assert len(fitted.history.epochs) == len(in_order) // 4


def test_epochs_of_different_lengths_end_where_they_end() -> None:
    found = batches(data(), range(6))
    fitted = px.fit(start(), step, lambda epoch: found[: epoch + 1], epochs=3, progress=False)
    assert [(record.step, record.epoch) for record in fitted.history.epochs] == [(1, 0), (3, 1), (6, 2)]


def test_a_run_goes_on_from_the_steps_that_its_state_has_done() -> None:
    whole = px.fit(start(), step, data(), steps=9, progress=False)
    part = px.fit(start(), step, data(), steps=5, progress=False)
    rest = px.fit(part.state, step, data(), steps=9, progress=False)
    assert bits(rest.state) == bits(whole.state)
    assert px.fit(rest.state, step, data(), steps=9, progress=False).state is rest.state


class Fetched:
    """A metric that notes when it is fetched."""

    def __init__(self, number: int, order: list[tuple[str, int]]) -> None:
        self._number, self._order = number, order

    def __float__(self) -> float:
        if ("fetched", self._number) not in self._order:
            self._order.append(("fetched", self._number))
        return 1.0


def test_metrics_are_fetched_when_later_steps_are_under_way_and_few_wait() -> None:
    order: list[tuple[str, int]] = []

    def own_step(state: int, batch: int) -> Any:
        order.append(("begun", state))
        return state + 1, {"loss": Fetched(state, order)}

    px.fit(0, own_step, [0, 1, 2], steps=50, progress=False)
    for number in range(45):
        assert order.index(("fetched", number)) > order.index(("begun", number + 4))
        assert order.index(("fetched", number)) < order.index(("begun", number + 5))
    assert [number for kind, number in order if kind == "fetched"] == list(range(50))


def test_a_step_of_one_s_own_needs_no_train_state() -> None:
    fitted = px.fit({"w": 0.0}, lambda state, batch: ({"w": state["w"] + batch}, state["w"]), [1.0, 2.0], epochs=2)
    assert fitted.state == {"w": 6.0}
    assert [record.metrics for record in fitted.history.steps] == [{"loss": x} for x in (0.0, 1.0, 3.0, 4.0)]


def test_an_evaluation_is_the_mean_over_all_rows_on_its_schedule_and_at_the_end() -> None:
    test_rows = {name: x[:21] for name, x in arrays().items()}
    uneven = [{name: x[part] for name, x in test_rows.items()} for part in (slice(0, 10), slice(10, 20), slice(20, 21))]
    evaluations = [
        px.Evaluate(evaluate_step, uneven, every=3),
        px.Evaluate(evaluate_step, [test_rows], name="whole"),
    ]
    fitted = px.fit(start(), step, data(), steps=10, evaluate=evaluations, progress=False)
    after = [params for params, _, _ in by_hand(batches(data(), range(10)))]

    def expected(step: int) -> float:
        w, b = np.asarray(after[step - 1]["w"], np.float64), float(after[step - 1]["b"])
        return float(np.mean((test_rows["x"] @ w + b - test_rows["y"]) ** 2))

    for name, steps in (("test/loss", [3, 6, 9, 10]), ("whole/loss", [4, 8, 10])):
        found, values = fitted.history.curve(name)
        assert found.tolist() == steps
        np.testing.assert_allclose(values, [expected(k) for k in steps], rtol=1e-5)
    with pytest.raises(px.errors.DataError, match=r"one of 'grad_norm', 'loss', .*got 'tset/loss'"):
        fitted.history.curve("tset/loss")


def test_callbacks_are_told_in_order_with_the_state_where_it_is_known() -> None:
    class Recording:
        def __init__(self) -> None:
            self.told: list[tuple[str, int, int | None]] = []

        def on_step(self, event: px.train.Event) -> None:
            assert event.state is None
            self.told.append(("step", event.step, None))

        def on_epoch(self, event: px.train.Event) -> None:
            self.told.append(("epoch", event.step, int(event.state.step)))

        def on_evaluate(self, event: px.train.Event) -> None:
            self.told.append(("evaluate", event.step, int(event.state.step)))

        def on_end(self, event: px.train.Event) -> None:
            self.told.append(("end", event.step, int(event.state.step)))

    recording, seen = Recording(), Seen()
    px.fit(start(), step, data(), steps=6, evaluate=px.Evaluate(evaluate_step, [arrays()]), callbacks=[recording, seen])
    steps = [("step", k, None) for k in range(1, 7)]
    after_epoch = [("epoch", 4, 4), ("evaluate", 4, 4)]
    assert recording.told == [*steps[:4], *after_epoch, *steps[4:], ("evaluate", 6, 6), ("end", 6, 6)]
    assert [(event.kind, event.step) for event in seen.events[:2]] == [("start", 0), ("step", 1)]


class Counter(NamedTuple):
    step: int


@pytest.mark.parametrize("begun", [0, 7])
def test_a_long_history_is_averaged_to_a_bounded_number_of_points(begun: int) -> None:
    def count(state: Counter, batch: Any) -> tuple[Counter, dict[str, float]]:
        return Counter(state.step + 1), {"loss": float(state.step)}

    history = px.fit(Counter(begun), count, [0], steps=begun + 1500, progress=False).history
    assert history.stride == 4
    assert [record.step for record in history.steps] == [begun + 4 * k for k in range(1, 376)]
    assert [record.metrics["loss"] for record in history.steps] == [begun + 4 * k + 1.5 for k in range(375)]


def test_on_several_devices_the_numbers_are_the_same() -> None:
    one = px.fit(start(), step, data(), epochs=2, progress=False)
    axis = axis_on(8, 1, "batch")
    many = px.fit(
        start(), px.train_step(loss, axis=axis), px.loader(arrays(), 16, axis=axis, seed=1), epochs=2, progress=False
    )
    assert len(many.state.params["w"].sharding.device_set) == 8
    np.testing.assert_allclose(many.state.params["w"], one.state.params["w"], rtol=1e-5)
    for found, expected in zip(many.history.epochs, one.history.epochs, strict=True):
        np.testing.assert_allclose(found.metrics["loss"], expected.metrics["loss"], rtol=1e-5)


def _generator() -> Iterator[int]:
    yield 1


class Misspelt:
    def on_epochs(self, event: px.train.Event) -> None: ...


class Broken:
    def on_step(self, event: px.train.Event) -> None:
        if event.step == 2:
            raise KeyError("mine")


def _raising(state: int, batch: int) -> Any:
    if state == 2:
        raise ZeroDivisionError("here")
    return state + 1, 0.0


def _breaking() -> Iterator[int]:
    yield from (0, 1, 2)
    raise OSError("the disk is gone")


def _ok(state: int, batch: int) -> Any:
    return state + 1, {"loss": 1.0}


wrongly: Any = px.fit
evaluation: Any = px.Evaluate


def test_a_state_that_was_given_away_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    state = start()
    step(state, batches(data(), [0])[0])
    words = r"px.fit: the arrays of this state were donated .*continue with the state that it returned"
    with pytest.raises(px.StateError, match=words):
        px.fit(state, step, data(), steps=2, checkpoint=tmp_path / "run", log=tmp_path / "log", progress=False)
    assert list(tmp_path.iterdir()) == []


def be_rank(process: int, *, of: int, launcher: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the environment variables that ``paraxis launch`` sets; without a launcher, those that one may set by hand."""
    monkeypatch.setenv("PARAXIS_COORDINATOR", "127.0.0.1:5000")
    monkeypatch.setenv("PARAXIS_NUM_PROCESSES", str(of))
    monkeypatch.setenv("PARAXIS_PROCESS", str(process))
    if launcher is not None:
        monkeypatch.setenv("PARAXIS_LAUNCHER", str(launcher))


@pytest.mark.parametrize("launched", [False, True])
def test_a_rank_that_has_not_joined_the_others_is_refused(
    launched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_rank(2, of=4, launcher=os.getppid() if launched else None, monkeypatch=monkeypatch)
    words = (
        r"rank 2 of 4 of paraxis launch, but px.initialize\(\) was not called, .*; write px.initialize\(\) at the start"
    )
    with pytest.raises(px.StateError, match=f"px.fit: this process is {words}"):
        px.fit(start(), step, data(), steps=2, checkpoint=tmp_path / "run", log=tmp_path / "log", progress=False)
    with pytest.raises(px.StateError, match=f"px.Checkpoints: this process is {words}"):
        px.Checkpoints(tmp_path / "run").save(1, {"w": np.ones(3)})
    assert list(tmp_path.iterdir()) == []


def test_an_nnx_module_is_trained_as_by_hand() -> None:
    nnx = pytest.importorskip("flax.nnx")
    found = batches(data(), range(5))

    def error(model: Any, batch: Any) -> jax.Array:
        return (model(batch["x"])[:, 0] - batch["y"]) ** 2

    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    fitted = px.fit(
        px.TrainState.create(model, optax.sgd(0.1)), px.train_step(error, axis=ONE), found, epochs=1, progress=False
    )
    kernel, bias = np.asarray(model.kernel[...], np.float64), np.asarray(model.bias[...], np.float64)
    for batch in found:
        wrong_by = batch["x"] @ kernel[:, 0] + bias - batch["y"]
        kernel = kernel - 0.1 * 2 * (batch["x"].T @ wrong_by / len(wrong_by))[:, None]
        bias = bias - 0.1 * 2 * wrong_by.mean()
    np.testing.assert_allclose(fitted.state.model().kernel[...], kernel, rtol=1e-4, atol=1e-6)


def _after_steps(number: int) -> px.TrainState:
    return start().replace(step=jnp.int32(number))


def test_the_state_that_a_run_begins_with_stays_as_it_is() -> None:
    state = start()
    before = bits(state)
    px.fit(state, step, data(), steps=2, progress=False)
    assert bits(state) == before


ERRORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "neither": (lambda: wrongly(0, _ok, [0]), px.DataError, "either epochs or steps, got neither"),
    "generator": (lambda: wrongly(0, _ok, _generator(), steps=1), px.DataError, "does not give batches anew"),
    "one batch": (lambda: wrongly(0, _ok, {"x": 1}, steps=1), px.DataError, r"data is a dict, .*px.loader"),
    "arrays": (lambda: wrongly(0, _ok, (np.ones(6), np.ones(6)), steps=1), px.DataError, r"one tuple.*px.loader"),
    "a scalar": (lambda: px.fit(start(), lambda s, b: jnp.ones(()), data(), steps=1), px.StateError, "train_step"),
    "evaluation": (lambda: wrongly(start(), px.eval_step(loss), data(), steps=1), px.StateError, "returned a dict"),
    "no batches": (lambda: wrongly(0, _ok, list, steps=1), px.DataError, "data has no batches in epoch 1"),
    "rows": (lambda: wrongly(0, lambda s, b: (s, np.ones(3)), [0], steps=1), px.ShapeError, "'loss' is an array"),
    "two names": (
        lambda: wrongly(0, _ok, [0], steps=1, evaluate=[evaluation(_ok, [0]), evaluation(_ok, [1])]),
        px.DataError,
        "two evaluations have one name",
    ),
    "a step": (lambda: evaluation(step, [0]), px.DataError, "step is a training step"),
    "misspelt": (lambda: wrongly(0, _ok, [0], steps=1, callbacks=Misspelt()), px.DataError, "on_epochs"),
    "callback": (lambda: wrongly(0, _ok, [0], steps=9, callbacks=Broken()), KeyError, "Broken.on_step, after step 2"),
    "in a step": (lambda: wrongly(0, _raising, [0, 1], steps=9), ZeroDivisionError, r"raised by step 3 \(number 1 of"),
    "in data": (lambda: wrongly(0, _ok, _breaking, steps=9), OSError, "data: raised when batch number 4 of epoch 1"),
    "in an evaluation": (
        lambda: wrongly(0, _ok, [0], steps=1, evaluate=evaluation(lambda s, b: 1 / 0, [0], name="dev")),
        ZeroDivisionError,
        "raised by evaluation 'dev', after step 1",
    ),
    "unknown length": (
        lambda: wrongly(_after_steps(3), step, lambda: iter([0]), steps=5),
        px.DataError,
        "it is not known with which one a state after 3 steps continues",
    ),
    "not ok": (
        lambda: wrongly(start().replace(ok=jnp.array(False)), step, data(), steps=1),
        px.StateError,
        "this state met a loss or a gradient that was not finite",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_cannot_be_done_is_refused_and_errors_say_where_they_come_from(case: str) -> None:
    call, kind, words = ERRORS[case]
    with pytest.raises(kind, match=words):
        call()
