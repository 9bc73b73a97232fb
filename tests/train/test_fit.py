"""px.fit is the loop that one would write by hand, and nothing is waited for in it."""

import collections
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from tests._support import axis_on
from tests.train._fits import PER_EPOCH, arrays, batches, bits, by_hand, data, evaluate_step, loss, start, step


def fit(*args: Any, **options: Any) -> px.train.Fitted:
    return px.fit(*args, progress=False, **options)


def test_a_run_is_the_hand_written_loop_bit_for_bit() -> None:
    events: list[px.train.Event] = []
    fitted = fit(start(), step, data(), epochs=3, callbacks=events.append)
    expected = list(by_hand(batches(data(), range(3 * PER_EPOCH))))
    assert bits((fitted.state.params, fitted.state.opt_state)) == bits(expected[-1][:2])
    told = [(e.step, e.epoch, e.rows, e.metrics["loss"]) for e in events if e.kind == "step"]
    assert told == [(k + 1, k // 4, [16, 16, 16, 8][k % 4], expected[k][2]) for k in range(12)]


def test_an_epoch_s_average_weighs_each_row_the_same() -> None:
    fitted = fit(start(), step, data(), epochs=2)
    losses, rows = [loss for _, _, loss in by_hand(batches(data(), range(8)))], [16, 16, 16, 8]
    expected = [np.average(losses[k : k + 4], weights=rows) for k in (0, 4)]
    np.testing.assert_allclose([record.metrics["loss"] for record in fitted.history.epochs], expected, rtol=1e-15)
    assert [(record.step, record.epoch) for record in fitted.history.epochs] == [(4, 0), (8, 1)]


FIRST, SECOND = batches(data(), range(4)), batches(data(), range(4, 8))


@pytest.mark.parametrize(
    ("source", "length", "in_order"),
    [
        (FIRST, {"epochs": 2}, FIRST + FIRST),
        (collections.deque(FIRST), {"epochs": 2}, FIRST + FIRST),
        (lambda: iter(FIRST), {"steps": 6}, FIRST + FIRST[:2]),
        (lambda epoch: (FIRST, SECOND)[epoch], {"epochs": 2}, FIRST + SECOND),
        (lambda epoch: FIRST[: epoch + 1], {"epochs": 3}, FIRST[:1] + FIRST[:2] + FIRST[:3]),
    ],
)
def test_any_batches_will_do_that_can_be_gone_through_again(source: Any, length: Any, in_order: list[Any]) -> None:
    fitted = fit(start(), step, source, **length)
    assert bits((fitted.state.params, fitted.state.opt_state)) == bits(list(by_hand(in_order))[-1][:2])


def test_a_run_goes_on_from_the_steps_that_its_state_has_done_and_leaves_it_as_it_is() -> None:
    whole, state = fit(start(), step, data(), steps=9), fit(start(), step, data(), steps=5).state
    before = bits(state)
    rest = fit(state, step, data(), steps=9)
    assert (bits(rest.state), bits(state)) == (bits(whole.state), before)
    assert fit(rest.state, step, data(), steps=9).state is rest.state


class Fetched:
    """A metric that notes when it is fetched."""

    def __init__(self, number: int, order: list[tuple[str, int]]) -> None:
        self._number, self._order = number, order

    def __float__(self) -> float:
        self._order.append(("fetched", self._number))
        return 1.0


def test_metrics_are_fetched_when_later_steps_are_under_way_and_few_wait() -> None:
    order: list[tuple[str, int]] = []

    def own_step(state: int, batch: int) -> Any:
        order.append(("begun", state))
        return state + 1, {"loss": Fetched(state, order)}

    fit(0, own_step, [0, 1, 2], steps=50)
    for number in range(45):
        assert (
            order.index(("begun", number + 4)) < order.index(("fetched", number)) < order.index(("begun", number + 5))
        )
    assert [number for kind, number in order if kind == "fetched"] == list(range(50))


def test_a_step_of_one_s_own_needs_no_train_state() -> None:
    fitted = fit({"w": 0.0}, lambda state, batch: ({"w": state["w"] + batch}, state["w"]), [1.0, 2.0], epochs=2)
    assert fitted.state == {"w": 6.0}
    assert [record.metrics for record in fitted.history.steps] == [{"loss": x} for x in (0.0, 1.0, 3.0, 4.0)]


def test_an_evaluation_is_the_mean_over_all_rows_on_its_schedule_and_at_the_end() -> None:
    test_rows = {name: x[:21] for name, x in arrays().items()}
    uneven = [{name: x[part] for name, x in test_rows.items()} for part in (slice(0, 10), slice(10, 20), slice(20, 21))]
    evaluations = [px.Evaluate(evaluate_step, uneven, every=3), px.Evaluate(evaluate_step, [test_rows], name="whole")]
    history = fit(start(), step, data(), steps=10, evaluate=evaluations).history
    after = [params for params, _, _ in by_hand(batches(data(), range(10)))]

    def expected(step: int) -> float:
        w, b = np.asarray(after[step - 1]["w"], np.float64), float(after[step - 1]["b"])
        return float(np.mean((test_rows["x"] @ w + b - test_rows["y"]) ** 2))

    for name, steps in (("test/loss", [3, 6, 9, 10]), ("whole/loss", [4, 8, 10])):
        found, values = history.curve(name)
        assert found.tolist() == steps
        np.testing.assert_allclose(values, [expected(k) for k in steps], rtol=1e-5)
    with pytest.raises(px.DataError, match=r"one of 'grad_norm', 'loss', .*got 'tset/loss'"):
        history.curve("tset/loss")


class Recording:
    def __init__(self) -> None:
        self.told: list[tuple[str, int, int | None]] = []

    def on_step(self, event: px.train.Event) -> None:
        steps = None if event.state is None else int(event.state.step)
        self.told.append((event.kind, event.step, steps))

    on_start = on_epoch = on_evaluate = on_end = on_step


def test_callbacks_are_told_in_order_with_the_state_where_it_is_known() -> None:
    recording, events = Recording(), list[px.train.Event]()
    test = px.Evaluate(evaluate_step, [arrays()])
    fit(start(), step, data(), steps=6, evaluate=test, callbacks=[recording, events.append])
    steps = [("step", k, None) for k in range(1, 7)]
    after_epoch, end = [("epoch", 4, 4), ("evaluate", 4, 4)], [("evaluate", 6, 6), ("end", 6, 6)]
    assert recording.told == [("start", 0, 0), *steps[:4], *after_epoch, *steps[4:], *end]
    assert [(event.kind, event.step) for event in events] == [told[:2] for told in recording.told]


class Counter(NamedTuple):
    step: int


@pytest.mark.parametrize("begun", [0, 7])
def test_a_long_history_is_averaged_to_a_bounded_number_of_points(begun: int) -> None:
    def count(state: Counter, batch: Any) -> tuple[Counter, dict[str, float]]:
        return Counter(state.step + 1), {"loss": float(state.step)}

    history = fit(Counter(begun), count, [0], steps=begun + 1500).history
    assert history.stride == 4
    assert [record.step for record in history.steps] == [begun + 4 * k for k in range(1, 376)]
    assert [record.metrics["loss"] for record in history.steps] == [begun + 4 * k + 1.5 for k in range(375)]


def test_on_several_devices_the_numbers_are_the_same() -> None:
    one, axis = fit(start(), step, data(), epochs=2), axis_on(8, 1, "batch")
    many = fit(start(), px.train_step(loss, axis=axis), px.loader(arrays(), 16, axis=axis, seed=1), epochs=2)
    assert len(many.state.params["w"].sharding.device_set) == 8
    np.testing.assert_allclose(many.state.params["w"], one.state.params["w"], rtol=1e-5)
    losses = [[record.metrics["loss"] for record in run.history.epochs] for run in (many, one)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_a_state_that_was_given_away_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    state = start()
    step(state, FIRST[0])
    with pytest.raises(px.StateError, match=r"px.fit: the arrays of this state were donated"):
        fit(state, step, data(), steps=2, checkpoint=tmp_path / "run", log=tmp_path / "log")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("launched", [False, True])
def test_a_rank_that_has_not_joined_the_others_is_refused(
    launched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {"PARAXIS_COORDINATOR": "127.0.0.1:5000", "PARAXIS_NUM_PROCESSES": "4", "PARAXIS_PROCESS": "2"}
    for name, value in (there | ({"PARAXIS_LAUNCHER": f"{os.getppid()}"} if launched else {})).items():
        monkeypatch.setenv(name, value)
    words = r"rank 2 of 4 of paraxis launch, but px.initialize\(\) was not called, .*; write px.initialize\(\)"
    with pytest.raises(px.StateError, match=f"px.fit: this process is {words}"):
        fit(start(), step, data(), steps=2, checkpoint=tmp_path / "run", log=tmp_path / "log")
    with pytest.raises(px.StateError, match=f"px.Checkpoints: this process is {words}"):
        px.Checkpoints(tmp_path / "run").save(1, {"w": np.ones(3)})
    assert list(tmp_path.iterdir()) == []


class Misspelt:
    def on_epochs(self, event: px.train.Event) -> None: ...


class Broken:
    def on_step(self, event: px.train.Event) -> None:
        if event.step == 2:
            raise KeyError("mine")


def _raising(state: int, batch: int) -> Any:
    return state + 1, 1 / (2 - state)


def _breaking() -> Iterator[int]:
    yield from (0, 1, 2)
    raise OSError("the disk is gone")


def _ok(state: int, batch: int) -> Any:
    return state + 1, {"loss": 1.0}


def run(data: Any, step: Any = _ok, state: Any = 0, **options: Any) -> Callable[[], Any]:
    return lambda: fit(state, step, data, **({"steps": 9} | options))


def dev(step: Any) -> px.Evaluate:
    return px.Evaluate(step, [0], name="dev")


TWICE, EVAL = [dev(_ok), dev(_ok)], px.eval_step(loss)
ERRORS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (run([0], steps=None), px.DataError, "either epochs or steps, got neither"),
    (run(iter([1])), px.DataError, "does not give batches anew"),
    (run({"x": 1}), px.DataError, r"data is a dict, .*px.loader"),
    (run((np.ones(6), np.ones(6))), px.DataError, r"one tuple.*px.loader"),
    (run(data(), lambda s, b: jnp.ones(()), start()), px.StateError, "train_step"),
    (run(data(), EVAL, start()), px.StateError, "returned a dict"),
    (run(list), px.DataError, "data has no batches in epoch 1"),
    (run([0], lambda s, b: (s, np.ones(3))), px.DataError, "'loss' is an array"),
    (run([0], evaluate=TWICE), px.DataError, "two evaluations have one name"),
    (lambda: px.Evaluate(step, [0]), px.DataError, "step is a training step"),
    (run([0], callbacks=Misspelt()), px.DataError, "on_epochs"),
    (run([0], callbacks=Broken()), KeyError, "Broken.on_step, after step 2"),
    (run([0, 1], _raising), ZeroDivisionError, r"raised by step 3 \(number 1 of"),
    (run(_breaking), OSError, "data: raised when batch number 4 of epoch 1"),
    (run([0], evaluate=dev(lambda s, b: 1 / 0)), ZeroDivisionError, "raised by evaluation 'dev', after step 1"),
    (run(lambda: iter([0]), step, start().replace(step=jnp.int32(3))), px.DataError, "a state after 3 steps continues"),
    (run(data(), step, start().replace(ok=jnp.array(False))), px.StateError, "a gradient that was not finite"),
]


@pytest.mark.parametrize(("call", "kind", "words"), ERRORS)
def test_what_cannot_be_done_is_refused_and_errors_say_where_they_come_from(
    call: Callable[[], Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        call()
