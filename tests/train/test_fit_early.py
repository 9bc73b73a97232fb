"""A run ends when nothing gets better, and says what was best."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paraxis as px
from paraxis.train import StopEarly


def run(values: list[float], rule: StopEarly, **options: Any) -> px.train.Fitted:
    """An evaluation after each step has these values in turn."""
    test = px.Evaluate(lambda state, batch: {"loss": values[state - 1]}, [0], every=1)
    options = {"evaluate": test, "stop_early": rule, "steps": len(values)} | options
    return px.fit(0, lambda state, batch: (state + 1, 1.0), [0], **options)


@pytest.mark.parametrize(
    ("values", "options", "steps", "best"),
    [
        ([5, 4, 3, 3, 3, 9], {"patience": 2}, 5, 3),
        ([5, 4, 3, 3, 2, 9], {"patience": 2}, 6, 5),
        ([1, 2, 3, 3, 2, 1, 1], {"patience": 3, "mode": "max"}, 6, 3),
        ([5, 4.5, 4.1, 3.9, 3.5, 3], {"patience": 3, "min_change": 1.0}, 6, 4),
        ([5, 4.5, 4.1, 4.0, 3.5, 3], {"patience": 3, "min_change": 1.0}, 4, 1),
        ([5, np.nan, np.nan, 1], {"patience": 2}, 3, 1),
        ([np.inf, 4, 5, 5, 5], {"patience": 2}, 4, 2),
        ([5, 4, 3, 2, 1], {"patience": 1}, 5, 5),
    ],
)
def test_it_ends_when_the_metric_was_no_better_so_often(values: Any, options: Any, steps: int, best: int) -> None:
    fitted = run(values, StopEarly("test/loss", **options), progress=False)
    words = f"test/loss was not better than {values[best - 1]:.6g}, its best, of step {best}"
    assert fitted.state == steps
    assert fitted.best == px.train.Record(best, best - 1, {"test/loss": values[best - 1]})
    assert words in fitted.stopped if fitted.stopped else steps == len(values)


def test_the_average_of_an_epoch_can_be_watched() -> None:
    losses = [4.0, 2.0, 3.0, 1.0, 2.0, 2.0, 9.0]  # epochs of two steps: 3, 2, 2, …
    rule = StopEarly("loss", patience=1)
    fitted = px.fit(0, lambda s, b: (s + 1, losses[s]), [0, 0], epochs=9, stop_early=rule, progress=False)
    assert (fitted.state, fitted.best and fitted.best.step) == (6, 4)


def test_patience_is_kept_over_a_resume(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    values, rule = [5.0, 3.0, 4.0, 4.0, 4.0, 9.0, 9.0], StopEarly(patience=3)

    def stop(event: px.train.Event) -> None:
        if event.kind == "evaluate" and event.step == 4:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        run(values, rule, checkpoint=px.Checkpoints(tmp_path, every=1), callbacks=stop)
    assert run(values, rule, checkpoint=px.Checkpoints(tmp_path, every=1)).state == 5
    words = "px.fit: ended after step 5: test/loss was not better than 3, its best, of step 2, 3 times in a row"
    assert words in capfd.readouterr().err
    assert run(values, rule, checkpoint=tmp_path, progress=False).state == 5
    assert run(values, StopEarly(patience=5), checkpoint=tmp_path, progress=False).state == 7


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (StopEarly("dev/loss"), "'dev/loss' of an evaluation 'dev', but there is 'test'; write evaluate="),
        (StopEarly("test/acc", mode="max"), "names the metric 'test/acc', but there is 'test/loss'"),
    ],
)
def test_a_metric_that_is_not_there_is_refused(rule: StopEarly, words: str) -> None:
    with pytest.raises(px.DataError, match=words):
        run([1.0], rule)


def test_what_else_is_evaluated_is_so_at_the_end_of_a_run_that_ends_early() -> None:
    dev = px.Evaluate(lambda state, batch: {"loss": float(state)}, [0], every=1, name="dev")
    test = px.Evaluate(lambda state, batch: {"loss": 10.0 * state}, [0], every=1000, name="test")
    fitted = run([0], StopEarly("dev/loss", patience=2), evaluate=[dev, test], steps=50, progress=False)
    assert [x.tolist() for x in fitted.history.curve("test/loss")] == [[3], [30.0]]
