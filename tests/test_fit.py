"""px.fit is the loop that one would write by hand, and nothing is waited for in it."""

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from paraxis.train import StopEarly
from tests._fits import PER_EPOCH, Steps, arrays, batches, by_hand, data, evaluate_step, start, step
from tests._support import bits


def fit(*args: Any, **options: Any) -> px.train.Fitted:
    return px.fit(*args, progress=False, **options)


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_fit_is_the_loop_by_hand_bit_for_bit(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, the numbers of a step come as one array."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    events: list[px.train.Event] = []
    fitted = fit(start(), step, data(), epochs=3, callbacks=events.append)
    expected, rows = list(by_hand(batches(data(), range(3 * PER_EPOCH)))), [16, 16, 16, 8]
    assert bits((fitted.state.params, fitted.state.opt_state)) == bits(expected[-1][:2])
    told = [(e.step, e.epoch, e.rows, e.metrics["loss"]) for e in events if e.kind == "step"]
    assert told == [(k + 1, k // 4, rows[k % 4], expected[k][2]) for k in range(12)]
    # An epoch's average weighs each row the same.
    averages = [np.average([x[2] for x in expected[k : k + 4]], weights=rows) for k in (0, 4, 8)]
    np.testing.assert_allclose([record.metrics["loss"] for record in fitted.history.epochs], averages, rtol=1e-15)
    assert [(record.step, record.epoch) for record in fitted.history.epochs] == [(4, 0), (8, 1), (12, 2)]


def test_fit_goes_on_from_the_steps_that_its_state_has_done_and_leaves_it_as_it_is() -> None:
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


def test_fit_fetches_metrics_when_four_later_steps_are_under_way() -> None:
    order: list[tuple[str, int]] = []

    def own_step(state: int, batch: int) -> Any:
        order.append(("begun", state))
        return state + 1, {"loss": Fetched(state, order)}

    fit(0, own_step, [0, 1, 2], steps=50)
    for k in range(45):
        assert order.index(("begun", k + 4)) < order.index(("fetched", k)) < order.index(("begun", k + 5))
    assert [number for kind, number in order if kind == "fetched"] == list(range(50))


def test_fit_evaluates_the_mean_over_all_rows_on_schedule_and_at_the_end() -> None:
    test_rows = {name: x[:21] for name, x in arrays().items()}
    uneven = [{name: x[part] for name, x in test_rows.items()} for part in (slice(0, 10), slice(10, 20), slice(20, 21))]
    number = lambda state, batch: {"loss": float(evaluate_step(state, batch)["loss"])}  # noqa: E731
    evaluations = [px.Evaluate(evaluate_step, uneven, every=3), px.Evaluate(evaluate_step, [test_rows], name="whole")]
    evaluations.append(px.Evaluate(number, uneven, every=3, name="number"))
    history = fit(start(), step, data(), steps=10, evaluate=evaluations).history
    after = [params for params, _, _ in by_hand(batches(data(), range(10)))]

    def expected(step: int) -> float:
        w, b = np.asarray(after[step - 1]["w"], np.float64), float(after[step - 1]["b"])
        return float(np.mean((test_rows["x"] @ w + b - test_rows["y"]) ** 2))

    for name, steps in (("test/loss", [3, 6, 9, 10]), ("whole/loss", [4, 8, 10]), ("number/loss", [3, 6, 9, 10])):
        found, values = history.curve(name)
        assert found.tolist() == steps
        np.testing.assert_allclose(values, [expected(k) for k in steps], rtol=1e-5)


def test_fit_tells_callbacks_in_order_with_the_state_where_it_is_known() -> None:
    told, again = list[tuple[str, int, int | None]](), list[px.train.Event]()

    def tell(event: px.train.Event) -> None:
        told.append((event.kind, event.step, None if event.state is None else int(event.state.step)))

    fit(start(), step, data(), steps=6, evaluate=px.Evaluate(evaluate_step, [arrays()]), callbacks=[tell, again.append])
    steps = [("step", k, None) for k in range(1, 7)]
    after_epoch, end = [("epoch", 4, 4), ("evaluate", 4, 4)], [("evaluate", 6, 6), ("end", 6, 6)]
    assert told == [("start", 0, 0), *steps[:4], *after_epoch, *steps[4:], *end]
    assert [(event.kind, event.step) for event in again] == [event[:2] for event in told]


@pytest.mark.parametrize("begun", [0, 7])
def test_fit_averages_a_long_history_to_a_bounded_number_of_points(begun: int) -> None:
    def count(state: Steps, batch: Any) -> tuple[Steps, dict[str, float]]:
        return Steps(state.step + 1), {"loss": float(state.step)}

    history = fit(Steps(begun), count, [0], steps=begun + 1500).history
    assert history.stride == 4
    assert [record.step for record in history.steps] == [begun + 4 * k for k in range(1, 376)]
    assert [record.metrics["loss"] for record in history.steps] == [begun + 4 * k + 1.5 for k in range(375)]


@pytest.mark.parametrize("launched", [None, False, True])
def test_fit_refuses_before_it_writes(launched: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, words = start(), r"PROCESS=2 and PARAXIS_NUM_PROCESSES=4 say .* px.initialize\(\) was not called"
    if launched is None:
        step(state, arrays())
        words = "px.fit: the arrays of this state were donated"
    else:
        there = {"PARAXIS_COORDINATOR": "127.0.0.1:5000", "PARAXIS_NUM_PROCESSES": "4", "PARAXIS_PROCESS": "2"}
        for name, value in (there | ({"PARAXIS_LAUNCHER": f"{os.getppid()}"} if launched else {})).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(px.StateError, match=words):
            px.Checkpoints(tmp_path / "run").save(1, {"w": np.ones(3)})
    with pytest.raises(px.StateError, match=words):
        fit(state, step, data(), steps=2, checkpoint=tmp_path / "run", log=tmp_path / "log")
    assert list(tmp_path.iterdir()) == []


def test_fit_tells_once_that_another_launcher_s_processes_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "2")
    with pytest.warns(UserWarning, match=r"PMI_RANK=1 and PMI_SIZE=2 .* or unset PMI_SIZE if each is alone"):
        fit(start(), step, data(), steps=1)


def _raising(state: int, batch: int) -> Any:
    return state + 1, 1 / (2 - state)


def _breaking() -> Iterator[int]:
    yield from (0, 1, 2)
    raise OSError("the disk is gone")


def _ok(state: int, batch: int) -> Any:
    return state + 1, {"loss": 1.0}


def run(data: Any, step: Any = _ok, state: Any = 0, **options: Any) -> Callable[[], Any]:
    return lambda: fit(state, step, data, **({"steps": 9} | options))


def dev(step: Any, **options: Any) -> px.Evaluate:
    return px.Evaluate(step, [0], name="dev", **options)


NOT_OK = start().replace(ok=jnp.array(False))
NO_DEV = "names 'test/loss', but there is 'loss'; write one, or evaluate="
ERRORS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (run(jax.random.PRNGKey(0)), px.DataError, "does not give batches anew.*without data, give a key: jax.random.key"),
    (run({"x": 1}), px.DataError, r"data is a dict, .*px.loader"),
    (run((np.ones(6), np.ones(6))), px.DataError, r"data is a tuple.*px.loader"),
    (run([0], lambda s, b: {"loss": 1.0, "norm": 2.0}), px.StateError, r"step returned a dict; write return state"),
    (run(list), px.DataError, "data has no batches in epoch 1"),
    (run([0], evaluate=[dev(_ok), dev(_ok)]), px.DataError, "two evaluations have one name"),
    (run([0], lambda model, x: model(x)), TypeError, r"raised by step 1 .*if it is a loss function, write px\.train_s"),
    (run([0], evaluate=dev(lambda model, x: model(x))), TypeError, r"by evaluation 'dev'.* write px\.eval_step"),
    (run([0], evaluate=dev(_ok), stop_early=StopEarly("test/loss")), px.DataError, NO_DEV),
    (run([0], lambda s, b: (s, {"dev/a": 1.0}), evaluate=dev(lambda s, b: {"a": 1.0})), px.DataError, "called 'dev/a'"),
    (run(jax.random.key(0), steps=None, epochs=1), px.DataError, "a random key, which has no epochs; write steps="),
    (lambda: px.train.History((), 1, (), ()).curve("loss"), px.DataError, "must be one of none, as nothing was rec"),
    (run([0, 1], _raising), ZeroDivisionError, r"raised by step 3 \(number 1 of"),
    (run(_breaking), OSError, "data: raised when batch number 4 of epoch 1"),
    (run(lambda: iter([0]), step, start().replace(step=jnp.int32(3))), px.DataError, "a state after 3 steps continues"),
    (run(data(), step, NOT_OK), px.StateError, "has met NaN or infinity"),
]


@pytest.mark.parametrize(("call", "kind", "words"), ERRORS)
def test_fit_refuses_mistakes_and_locates_errors(call: Callable[[], Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        call()


def stopped_early(values: list[float], rule: StopEarly, **options: Any) -> px.train.Fitted:
    """An evaluation after each step has these values in turn."""
    test = px.Evaluate(lambda state, batch: {"loss": values[state - 1]}, [0], every=1)
    options = {"evaluate": test, "stop_early": rule, "steps": len(values), "progress": False} | options
    return px.fit(0, lambda state, batch: (state + 1, 1.0), [0], **options)


@pytest.mark.parametrize(
    ("values", "options", "steps", "best"),
    [
        ([5, 4, 3, 3, 3, 9], {"patience": 2}, 5, 3),
        ([1, 2, 3, 3, 2, 1, 1], {"patience": 3, "mode": "max"}, 6, 3),
        ([5, 4.5, 4.1, 3.9, 3.5, 3], {"patience": 3, "min_change": 1.0}, 6, 4),
        ([5, 4.5, 4.1, 4.0, 3.5, 3], {"patience": 3, "min_change": 1.0}, 4, 1),
        ([5, np.nan, np.nan, 1], {"patience": 2}, 3, 1),
        ([np.inf, 4, 5, 5, 5], {"patience": 2}, 4, 2),
    ],
)
def test_stop_early_ends_a_run_whose_metric_was_no_better(values: Any, options: Any, steps: int, best: int) -> None:
    fitted = stopped_early(values, StopEarly("test/loss", **options))
    words = f"test/loss was not better than {values[best - 1]:.6g}, its best, of step {best}"
    assert (fitted.state, fitted.last, bool(fitted.active)) == (best, steps, steps == len(values))
    assert fitted.best == px.train.Record(best, best - 1, {"test/loss": values[best - 1]}, "test")
    assert words in fitted.stopped if fitted.stopped else steps == len(values)


def test_stop_early_watches_the_average_of_an_epoch() -> None:
    losses = [4.0, 2.0, 3.0, 1.0, 2.0, 2.0, 9.0]  # epochs of two steps: 3, 2, 2, …
    rule = StopEarly("loss", patience=1)
    fitted = fit(0, lambda s, b: (s + 1, losses[s]), [0, 0], epochs=9, stop_early=rule)
    assert (fitted.state, fitted.best and fitted.best.step, fitted.last) == (4, 4, 6)


def test_fit_knows_evaluations_and_metrics_whatever_their_names(tmp_path: Path) -> None:
    """A name may begin with another one, and a metric's may have slashes: nothing is read out of a name."""
    even = lambda state, batch: {"hard/loss": float(state % 2), "acc/top1": float(state)}  # noqa: E731
    evaluate = [px.Evaluate(even, [0], every=1, name=name) for name in ("test/more", "test")]
    step = lambda state, batch: (state + 1, {"err/l1": 9.0 - state})  # noqa: E731
    for metric, mode in (("test/acc/top1", "max"), ("test/more/acc/top1", "max"), ("err/l1", "min")):
        best = px.Checkpoints(tmp_path / metric, every=9, best=(metric, mode))  # type: ignore[arg-type]
        rule = StopEarly(metric, 2, mode)  # type: ignore[arg-type]
        fitted = fit(0, step, [0], steps=3, evaluate=evaluate, stop_early=rule, checkpoint=best)
        assert fitted.best is not None
        assert (fitted.state, fitted.best.metrics[metric], best.best) == (3, 7.0 if "l1" in metric else 3.0, 3)
    told = [(record.step, record.evaluation) for record in fitted.history.evaluations]
    assert told[:4] == [*itertools.product((1, 2), ("test/more", "test"))]


def test_fit_without_data_gives_each_step_a_key_and_goes_on_with_its_own() -> None:
    noise = lambda state, key: (state + jax.random.normal(key), {"loss": 0.0})  # noqa: E731
    key = jax.random.key(3)
    expected = np.cumsum([jax.random.normal(jax.random.fold_in(key, k)) for k in range(6)], dtype="f")[-1]
    found = fit(jnp.zeros(()), noise, key, steps=6)
    np.testing.assert_allclose(found.state, expected, rtol=1e-6)
    count = lambda state, key: (Steps(state.step + 1), {"first": jax.random.bits(key)})  # noqa: E731
    first = fit(Steps(4), count, key, steps=5).history.steps[0].metrics["first"]
    assert first == jax.random.bits(jax.random.fold_in(key, 4))


class EveryThird:
    def should_save(self, step: int) -> bool:
        return step % 3 == 1


def test_fit_saves_when_an_object_says_so(tmp_path: Path) -> None:
    checkpoints = px.Checkpoints(tmp_path, every=EveryThird(), keep=None)
    fit(0, _ok, [0], steps=9, checkpoint=checkpoints)
    assert checkpoints.steps == (1, 4, 7, 9)
