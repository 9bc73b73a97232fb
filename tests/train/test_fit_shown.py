"""What a run writes and shows: a log, event files, a picture, and lines."""

import io
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paraxis._core.errors import DataError
from paraxis.train.runs._display import Lines, Live, Status
from paraxis.train.runs._history import History, Record
from paraxis.train.runs._logs import Log
from tests.train._fits import Evaluate, Event, arrays, data, evaluate_step, fit, lines, start, step


def test_the_log_has_a_line_for_the_start_each_step_epoch_and_evaluation(tmp_path: Path) -> None:
    seen: list[Event] = []
    path = tmp_path / "a" / "log.jsonl"
    test = Evaluate(evaluate_step, [arrays()])
    fit(start(), step, data(), epochs=2, evaluate=test, log=path, callbacks=seen.append, progress=False)
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


def test_log_every_leaves_steps_out(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    fit(start(), step, data(), steps=10, log=path, log_every=3, progress=False)
    assert [line["step"] for line in lines(path) if line["event"] == "step"] == [3, 6, 9]


def test_what_is_no_number_in_json_is_null(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    fit(0, lambda s, b: (s + 1, {"loss": 1.0, "acc": np.nan}), [0], steps=1, log=path, progress=False)
    assert json.loads(path.read_text().splitlines()[1])["metrics"] == {"loss": 1.0, "acc": None}


def event(step: int) -> Event:
    return Event("step", step, 0, {"loss": 0.5}, 4)


def test_a_log_is_cut_after_the_step_and_where_a_line_is_not_whole(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"

    def write(start: int, *steps: int) -> None:
        log = Log(path, start, {"a": 1}, 1)
        for number in steps:
            log(event(number))
        log.close()

    write(0, 1, 2, 3, 4)
    whole = path.read_bytes()
    path.chmod(0o640)
    write(2, 3, 4)
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


def test_lines_of_a_log_are_whole_while_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"

    def look(_: Event) -> None:
        content = path.read_bytes()
        assert content.endswith(b"\n")
        assert [json.loads(line) for line in content.splitlines()]

    fit(start(), step, data(), epochs=2, log=path, callbacks=look, progress=False)


def test_a_directory_is_no_log(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=f"log: {tmp_path} is a directory; name a file in it: log='{tmp_path}/log.jsonl"
    ):
        fit(start(), step, data(), steps=1, log=tmp_path, progress=False)


@pytest.mark.parametrize(
    ("argument", "name"),
    [("log", "log.jsonl"), ("log", "on/log.jsonl"), ("tensorboard", "board"), ("plot", "curves.png")],
)
def test_a_place_that_cannot_be_written_to_is_named_before_the_first_step(
    argument: str, name: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    log = tmp_path / "log.jsonl"
    log.write_text("of an earlier run\n")
    options: dict[str, Any] = {"log": log} | {argument: tmp_path / "file" / name}
    words = rf"px.fit: {argument}: {tmp_path}/file/{name} cannot be written: .* directory.*; give another place: "
    with pytest.raises(DataError, match=rf"{words}{argument}='{Path(name).name}'$"):
        fit(start(), _never, data(), steps=1, progress=False, **options)
    assert argument == "tensorboard" or log.read_text() == "of an earlier run\n"


def _never(state: Any, batch: Any) -> Any:
    raise AssertionError("a step was done")


def events_of(directory: Path) -> Iterator[Any]:
    """The events in TensorBoard's files: records of a length, its checksum, the message and its checksum."""
    from tensorboardX.proto import event_pb2

    message: Any = vars(event_pb2)["Event"]
    for file in sorted(directory.iterdir()):
        content = file.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            yield message.FromString(content[12 : 12 + length])
            content = content[16 + length :]


def test_tensorboard_s_files_have_the_metrics(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    seen: list[Event] = []
    test = Evaluate(evaluate_step, [arrays()])
    options: dict[str, Any] = {"evaluate": test, "tensorboard": tmp_path / "board", "progress": False}
    fit(start(), step, data(), epochs=2, callbacks=seen.append, checkpoint=tmp_path / "runs", **options)
    values = {
        (value.tag, message.step): value.simple_value
        for message in events_of(tmp_path / "board")
        for value in message.summary.value
    }
    prefix = {"step": "train/", "epoch": "epoch/", "evaluate": ""}
    expected = {(prefix[told.kind] + name, told.step): value for told in seen for name, value in told.metrics.items()}
    assert values.keys() == expected.keys()
    np.testing.assert_allclose([values[key] for key in expected], list(expected.values()), rtol=1e-6)
    fit(start(), step, data(), epochs=3, checkpoint=tmp_path / "runs", **options)
    starts = [message.step for message in events_of(tmp_path / "board") if message.HasField("session_log")]
    assert sorted(starts) == [1, 9]  # TensorBoard leaves out older values from there on


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plots" / "curves.png"
    fit(start(), step, data(), epochs=2, evaluate=Evaluate(evaluate_step, [arrays()]), plot=path, progress=False)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert [other.name for other in path.parent.iterdir()] == ["curves.png"]


@pytest.mark.parametrize(
    ("module", "option", "words"),
    [
        (
            "tensorboardX",
            "tensorboard",
            "tensorboard= needs tensorboardX, which is not installed; write pip install tens",
        ),
        ("matplotlib.figure", "plot", "plot= needs matplotlib, which is not installed; write pip install matplotlib"),
        ("rich.console", "progress", "progress=True needs rich, which is not installed; write pip install rich"),
    ],
)
def test_a_missing_package_is_named_before_anything_is_done(
    module: str, option: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    value: Any = True if option == "progress" else tmp_path / "x"
    options: Any = {option: value, "log": tmp_path / "log.jsonl"}
    with pytest.raises(ModuleNotFoundError, match=words):
        fit(start(), step, data(), steps=1, **options)
    assert list(tmp_path.iterdir()) == []


def test_in_a_pipe_there_are_plain_lines(capfd: pytest.CaptureFixture[str]) -> None:
    fit(start(), step, data(), epochs=2, evaluate=Evaluate(evaluate_step, [arrays()], every=4))
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "\x1b" not in captured.err
    first, second = captured.err.splitlines()
    assert first.startswith("step 4 of 8, epoch 1 of 2  loss ")
    assert second.startswith("step 8 of 8, epoch 2 of 2  loss ")
    assert "test/loss" in first


def test_each_evaluation_is_named_once_and_nothing_is_cut_where_there_is_no_terminal(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # for which rich would take a pipe for a terminal
    names = ["dev", "test", "another-one-with-a-long-name-that-is-not-to-be-cut"]
    several = [Evaluate(evaluate_step, [arrays()], name=name) for name in names]
    fit(start(), step, data(), epochs=1, evaluate=several, progress=True)
    shown = capfd.readouterr().err
    first, *others = shown.splitlines()
    assert first.startswith("step 4 of 4, epoch 1 of 1  loss ")
    value = first.partition("dev/loss ")[2].split()[0]
    assert others == [f"step 4 of 4, epoch 1 of 1  {name}/loss {value}" for name in names[1:]]
    assert "\x1b" not in shown


def test_on_a_terminal_each_evaluation_stays_above_the_line() -> None:
    console = pytest.importorskip("rich.console")
    clock, stream = Clock(), io.StringIO()
    show = Live(Status(0, 10, 1, clock), console.Console(file=stream, force_terminal=True, width=60), clock)
    show(event(10))
    metrics = {f"{name}/a-long-name-of-a-metric": 0.125 for name in ("dev", "test")}
    for name, value in metrics.items():
        show(Event("evaluate", 10, 0, {name: value}))
    show.close()
    for name in metrics:
        assert f"step 10 of 10, epoch 1 of 1  {name} 0.125\n" in stream.getvalue()


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


def test_nothing_is_shown_if_that_is_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    fit(start(), step, data(), epochs=2, progress=False)
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_lines_come_by_time_and_less_and_less_often() -> None:
    clock, stream = Clock(), io.StringIO()
    show = Lines(Status(0, 100_000, None, clock), stream, clock)
    for number in range(1, 3001):
        clock.now = number * 0.1
        show(event(number))
    steps = [int(line.split()[1].replace(",", "")) for line in stream.getvalue().splitlines()]
    gaps = np.diff([0, *steps]) / 10
    np.testing.assert_allclose(gaps[:6], [2, 4, 8, 16, 32, 60], atol=0.2)
    assert "40 rows/s  10 steps/s" in stream.getvalue()
    assert "left" in stream.getvalue().splitlines()[-1]


def test_the_time_that_is_left_is_that_of_the_steps_that_are() -> None:
    clock = Clock()
    status = Status(0, 1000, 4, clock)
    for number in range(1, 102):
        clock.now = number / 2
        status(event(number))
    status.pace()
    assert status.rate() == "8 rows/s  2 steps/s  0:07:29 left"  # 899 steps
    assert status.place() == "step 101 of 1,000, epoch 1 of 4"


def test_a_terminal_gets_one_line_that_changes() -> None:
    console = pytest.importorskip("rich.console")
    clock, stream = Clock(), io.StringIO()
    show = Live(Status(0, 10, 1, clock), console.Console(file=stream, force_terminal=True, width=120), clock)
    for number in range(1, 11):
        clock.now += 0.2
        show(event(number))
    show.say("something else [not markup]")
    show(Event("end", 10, 0))
    show.close()
    assert "step 10 of 10, epoch 1 of 1" in stream.getvalue()
    assert "something else [not markup]" in stream.getvalue()
    assert "\x1b[?25h" in stream.getvalue()  # the cursor is shown again


def test_a_plot_is_a_png_and_no_other(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"plot must be the path of a PNG, got .*curves.pdf'; write plot='curves.png'"):
        fit(start(), step, data(), steps=1, plot=tmp_path / "curves.pdf", progress=False)
    (tmp_path / "curves.png").mkdir()
    with pytest.raises(DataError, match=r"plot: .*curves.png is a directory; .*: plot='.*curves.png/curves.png'"):
        fit(start(), _never, data(), steps=1, plot=tmp_path / "curves.png", progress=False)
