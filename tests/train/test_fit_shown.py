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
from tests.train._points import events


def test_the_log_has_a_line_for_the_start_each_step_epoch_and_evaluation(tmp_path: Path) -> None:
    seen: list[px.train.Event] = []
    path = tmp_path / "a" / "log.jsonl"
    test = px.Evaluate(evaluate_step, [arrays()])
    px.fit(start(), step, data(), epochs=2, evaluate=test, log=path, callbacks=seen.append, progress=False)
    first, *rest = lines(path)
    assert first["event"] == "start"
    assert (first["parameters"], first["batches of an epoch"], first["epochs"], first["steps"]) == (4, 4, 2, None)
    assert first["data"]["seed"] == 1
    assert {"jax", "jaxlib", "device kind", "number of devices", "number of processes"} <= first.keys()
    told = [event for event in seen if event.kind in ("step", "epoch", "evaluate")]
    assert [(line["event"], line["step"], line["epoch"], line["metrics"]) for line in rest] == [
        (event.kind, event.step, event.epoch, event.metrics) for event in told
    ]
    assert [line["rows"] for line in rest if line["event"] == "step"] == [16, 16, 16, 8] * 2
    assert len(rest) == 8 + 2 + 2


def test_what_is_no_number_in_json_is_null(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    px.fit(0, lambda s, b: (s + 1, {"loss": 1.0, "acc": np.nan}), [0], steps=1, log=path, progress=False)
    assert json.loads(path.read_text().splitlines()[1])["metrics"] == {"loss": 1.0, "acc": None}


class Steps(NamedTuple):
    step: int


def counted(state: Steps, batch: Any) -> tuple[Steps, dict[str, float]]:
    return Steps(state.step + 1), {"loss": 0.5}


def test_a_log_is_cut_after_the_step_and_where_a_line_is_not_whole(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"

    def write(start: int, last: int) -> None:
        px.fit(Steps(start), counted, [0] * 9, steps=last, log=path, progress=False)

    write(0, 4)
    whole = path.read_bytes()
    path.chmod(0o640)
    write(2, 4)
    assert [line.get("step") for line in lines(path)] == [None, 1, 2, 3, 4]
    assert path.stat().st_mode & 0o777 == 0o640
    path.write_bytes(whole[:-20])  # killed inside a line
    write(4, 5)
    assert [line.get("step") for line in lines(path)] == [None, 1, 2, 3, 5]
    path.write_bytes(whole[:10])
    write(4, 5)
    assert [line.get("step") for line in lines(path)] == [None, 5]
    write(0, 1)
    assert [line.get("step") for line in lines(path)] == [None, 1]


def test_tensorboard_s_files_have_the_metrics(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    seen: list[px.train.Event] = []
    test = px.Evaluate(evaluate_step, [arrays()])
    options: dict[str, Any] = {"evaluate": test, "tensorboard": tmp_path / "board", "progress": False}
    px.fit(start(), step, data(), epochs=2, callbacks=seen.append, checkpoint=tmp_path / "runs", **options)
    values = {
        (value.tag, message.step): value.simple_value
        for file in sorted((tmp_path / "board").iterdir())
        for message in events(file)
        for value in message.summary.value
    }
    prefix = {"step": "train/", "epoch": "epoch/", "evaluate": ""}
    expected = {(prefix[told.kind] + name, told.step): value for told in seen for name, value in told.metrics.items()}
    assert values.keys() == expected.keys()
    np.testing.assert_allclose([values[key] for key in expected], list(expected.values()), rtol=1e-6)
    px.fit(start(), step, data(), epochs=3, checkpoint=tmp_path / "runs", **options)
    files = sorted((tmp_path / "board").iterdir())
    starts = [message.step for file in files for message in events(file) if message.HasField("session_log")]
    assert sorted(starts) == [1, 9]  # TensorBoard leaves out older values from there on


def test_in_a_pipe_there_are_plain_lines(capfd: pytest.CaptureFixture[str]) -> None:
    px.fit(start(), step, data(), epochs=2, evaluate=px.Evaluate(evaluate_step, [arrays()], every=4))
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "\x1b" not in captured.err
    first, second = captured.err.splitlines()
    assert first.startswith("step 4 of 8, epoch 1 of 2  loss ")
    assert second.startswith("step 8 of 8, epoch 2 of 2  loss ")
    assert "test/loss" in first


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
    assert str(History((Record(3, 0, {"loss": 9.0}),), 1, (), ())).splitlines() == [
        "step  epoch  loss",
        "   3      1     9",
    ]
    assert str(History((), 1, (), ())) == "step  epoch"


def test_curves_are_drawn_to_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    history = px.fit(
        start(), step, data(), epochs=2, evaluate=px.Evaluate(evaluate_step, [arrays()]), progress=False
    ).history
    history.plot(tmp_path / "plots" / "curves.png")
    assert (tmp_path / "plots" / "curves.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    history.plot(tmp_path / "curves.pdf")
    assert (tmp_path / "curves.pdf").read_bytes().startswith(b"%PDF")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_one_line_that_changes_and_evaluations_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    test = px.Evaluate(lambda state, batch: {"accuracy": 0.125}, [0])
    px.fit(Steps(0), counted, [0] * 10, epochs=1, evaluate=test)
    assert "step 10 of 10, epoch 1 of 1  loss 0.5  test/accuracy 0.125\n" in stream.getvalue()
    assert "\r\x1b[2Kstep 10 of 10, epoch 1 of 1  loss 0.5" in stream.getvalue()
