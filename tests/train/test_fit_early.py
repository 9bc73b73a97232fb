"""A run ends when nothing gets better, and says what was best."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paraxis as px


def run(values: list[float], rule: px.train.StopEarly, **options: Any) -> px.train.Fitted:
    """An evaluation after each step has these values in turn."""
    test = px.Evaluate(lambda state, batch: {"loss": values[state - 1]}, [0], every=1)
    return px.fit(
        0, lambda state, batch: (state + 1, 1.0), [0], steps=len(values), evaluate=test, stop_early=rule, **options
    )


@pytest.mark.parametrize(
    ("values", "options", "steps", "best"),
    [
        ([5, 4, 3, 3, 3, 9], {"patience": 2}, 5, 3),
        ([5, 4, 3, 3, 2, 9], {"patience": 2}, 6, 5),
        ([5, 4, 3, 3, 9], {"patience": 1}, 4, 3),
        ([1, 2, 3, 3, 2, 1, 1], {"patience": 3, "mode": "max"}, 6, 3),
        ([5, 4.5, 4.1, 3.9, 3.5, 3], {"patience": 3, "min_change": 1.0}, 6, 4),
        ([5, 4.5, 4.1, 4.0, 3.5, 3], {"patience": 3, "min_change": 1.0}, 4, 1),
        ([5, np.nan, np.nan, 1], {"patience": 2}, 3, 1),
        ([np.inf, 4, 5, 5, 5], {"patience": 2}, 4, 2),
        ([5, 4, 3, 2, 1], {"patience": 1}, 5, 5),
    ],
)
def test_it_ends_when_the_metric_was_no_better_so_often(
    values: list[float], options: dict[str, Any], steps: int, best: int
) -> None:
    fitted = run(values, px.train.StopEarly("test/loss", **options), progress=False)
    assert fitted.state == steps
    assert fitted.best is not None
    assert (fitted.best.step, fitted.best.metrics) == (best, {"test/loss": values[best - 1]})
    if steps < len(values):
        assert fitted.stopped is not None
        assert f"test/loss was not better than {values[best - 1]:.6g}, its best, of step {best}" in fitted.stopped
    else:
        assert fitted.stopped is None


def test_the_average_of_an_epoch_can_be_watched() -> None:
    losses = [4.0, 2.0, 3.0, 1.0, 2.0, 2.0, 9.0]  # epochs of two steps: 3, 2, 2, …
    fitted = px.fit(
        0,
        lambda s, b: (s + 1, losses[s]),
        [0, 0],
        epochs=9,
        stop_early=px.train.StopEarly("loss", patience=1),
        progress=False,
    )
    assert fitted.state == 6
    assert fitted.best is not None
    assert fitted.best.step == 4


def test_patience_is_kept_over_a_resume(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    values, rule = [5.0, 3.0, 4.0, 4.0, 4.0, 9.0, 9.0], px.train.StopEarly(patience=3)

    def stop(event: px.train.Event) -> None:
        if event.kind == "evaluate" and event.step == 4:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        run(values, rule, checkpoint=px.Checkpoints(tmp_path, every=1), callbacks=stop)
    fitted = run(values, rule, checkpoint=px.Checkpoints(tmp_path, every=1))
    assert fitted.state == 5
    assert "px.fit: ended after step 5: test/loss was not better than 3, its best, of step 2, 3 times in a row" in (
        capfd.readouterr().err
    )
    assert run(values, rule, checkpoint=tmp_path, progress=False).state == 5
    assert run(values, px.train.StopEarly(patience=5), checkpoint=tmp_path, progress=False).state == 7


def test_a_metric_that_is_not_there_is_refused() -> None:
    with pytest.raises(
        px.DataError, match="metric 'dev/loss' of an evaluation 'dev', but there is 'test'; write evaluate="
    ):
        run([1.0], px.train.StopEarly("dev/loss"))
    with pytest.raises(px.DataError, match="names the metric 'test/acc', but there is 'test/loss'"):
        run([1.0], px.train.StopEarly("test/acc", mode="max"))


def test_what_else_is_evaluated_is_so_at_the_end_of_a_run_that_ends_early() -> None:
    dev = px.Evaluate(lambda state, batch: {"loss": float(state)}, [0], every=1, name="dev")
    test = px.Evaluate(lambda state, batch: {"loss": 10.0 * state}, [0], every=1000, name="test")
    fitted = px.fit(
        0,
        lambda state, batch: (state + 1, 1.0),
        [0],
        steps=50,
        evaluate=[dev, test],
        stop_early=px.train.StopEarly("dev/loss", patience=2),
        progress=False,
    )
    steps, values = fitted.history.curve("test/loss")
    assert (steps.tolist(), values.tolist()) == ([3], [30.0])
