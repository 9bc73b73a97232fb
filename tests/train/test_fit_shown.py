"""What a run writes and shows: a log, event files, a picture, and lines."""

import io
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import paraxis as px
from paraxis.train import History, Record
from tests.train._fits import arrays, data, evaluate_step, lines, start, step
from tests.train._points import events, points

TEST = px.Evaluate(evaluate_step, [arrays()])


def test_the_log_and_tensorboard_have_each_step_epoch_and_evaluation(tmp_path: Path) -> None:
    seen: list[px.train.Event] = []
    paths: dict[str, Any] = {"log": tmp_path / "a" / "log", "tensorboard": tmp_path / "board"}
    options: dict[str, Any] = {"evaluate": TEST, "checkpoint": tmp_path / "runs", "progress": False}
    px.fit(start(), step, data(), epochs=2, callbacks=seen.append, **paths, **options)
    first, *rest = lines(paths["log"])
    facts = [first[name] for name in ("event", "parameters", "batches of an epoch", "epochs", "steps")]
    assert facts == ["start", 4, 4, 2, None]
    assert {"jax", "jaxlib", "device kind", "number of devices", "number of processes"} <= first.keys()
    told = [event for event in seen if event.kind in ("step", "epoch", "evaluate")]
    expected = [(event.kind, event.step, event.epoch, event.metrics) for event in told]
    assert [(line["event"], line["step"], line["epoch"], line["metrics"]) for line in rest] == expected
    assert [line["rows"] for line in rest if line["event"] == "step"] == [16, 16, 16, 8] * 2
    prefix, found = {"step": "train/", "epoch": "epoch/", "evaluate": ""}, points(paths["tensorboard"])
    for event in told:
        values = [found[prefix[event.kind] + name].pop(event.step) for name in event.metrics]
        np.testing.assert_allclose(values, list(event.metrics.values()), rtol=1e-6)
    assert not any(found.values())
    px.fit(start(), step, data(), epochs=3, **paths, **options)
    starts = [e.step for file in paths["tensorboard"].iterdir() for e in events(file) if e.HasField("session_log")]
    assert sorted(starts) == [1, 9]  # TensorBoard leaves out older values from there on


class Steps(NamedTuple):
    step: int


def counted(state: Steps, batch: Any) -> tuple[Steps, dict[str, float]]:
    return Steps(state.step + 1), {"loss": 0.5, "nan": np.nan}


def test_a_log_is_cut_after_the_step_and_where_a_line_is_not_whole(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"

    def steps_after(start: int, last: int) -> list[int | None]:
        px.fit(Steps(start), counted, [0] * 9, steps=last, log=path, progress=False)
        return [line.get("step") for line in lines(path)]

    steps_after(0, 4)
    whole = path.read_bytes()
    assert json.loads(whole.splitlines()[1])["metrics"] == {"loss": 0.5, "nan": None}  # JSON has no NaN
    assert steps_after(2, 4) == [None, 1, 2, 3, 4]
    path.write_bytes(whole[:-20])  # killed inside a line
    assert steps_after(4, 5) == [None, 1, 2, 3, 5]
    path.write_bytes(whole[:10])
    assert steps_after(4, 5) == [None, 5]
    assert steps_after(0, 1) == [None, 1]


def test_in_a_pipe_there_are_plain_lines(capfd: pytest.CaptureFixture[str]) -> None:
    px.fit(start(), step, data(), epochs=2, evaluate=TEST)
    captured = capfd.readouterr()
    assert (captured.out, "\x1b" in captured.err) == ("", False)
    for k, line in enumerate(captured.err.splitlines(), 1):
        assert line.startswith(f"step {4 * k} of 8, epoch {k} of 2  loss ")
        assert "test/loss" in line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_one_line_that_changes_and_evaluations_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    test = px.Evaluate(lambda state, batch: {"accuracy": 0.125}, [0])
    px.fit(Steps(0), lambda s, b: (Steps(s.step + 1), {"loss": 0.5}), [0] * 10, epochs=1, evaluate=test)
    assert "step 10 of 10, epoch 1 of 1  loss 0.5  test/accuracy 0.125\n" in stream.getvalue()
    assert "\r\x1b[2Kstep 10 of 10, epoch 1 of 1  loss 0.5" in stream.getvalue()


def test_a_history_is_a_table_with_a_line_for_each_epoch_and_evaluation() -> None:
    epochs = Record(4, 0, {"accuracy": 0.5, "loss": 12.34567}), Record(8, 1, {"accuracy": 0.75, "loss": 1e-7})
    tests = Record(6, 1, {"test/loss": 2.0}), Record(8, 1, {"test/loss": 1.0}), Record(8, 1, {"dev/loss": np.nan})
    history = History((Record(3, 0, {"loss": 9.0}),), 1, epochs, tests)
    assert str(history).splitlines() == [
        "step  epoch   loss  accuracy  test/loss  dev/loss",
        "   4      1  12.35       0.5                     ",
        "   6      2                           2          ",
        "   8      2  1e-07      0.75          1       nan",
    ]
    assert repr(history) == "History(8 steps, 2 epochs, 3 evaluations)"
    assert str(History((Record(3, 0, {"loss": 9.0}),), 1, (), ())) == "step  epoch  loss\n   3      1     9"
    assert str(History((), 1, (), ())) == "step  epoch"


@pytest.mark.parametrize(("name", "beginning"), [("curves.png", b"\x89PNG\r\n\x1a\n"), ("curves.pdf", b"%PDF")])
def test_curves_are_drawn_to_a_picture(name: str, beginning: bytes, tmp_path: Path) -> None:
    history = px.fit(start(), step, data(), epochs=2, evaluate=TEST, progress=False).history
    history.plot(tmp_path / "plots" / name)
    assert (tmp_path / "plots" / name).read_bytes().startswith(beginning)
