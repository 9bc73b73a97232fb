"""What a run writes and shows: a log, event files, a picture, and lines."""

import io
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import paraxis as px
from paraxis.train import History, Record
from tests.train._fits import arrays, data, evaluate_step, lines, start, step


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


def test_log_every_leaves_steps_out(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    px.fit(start(), step, data(), steps=10, log=path, log_every=3, progress=False)
    assert [line["step"] for line in lines(path) if line["event"] == "step"] == [3, 6, 9]


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


def test_lines_of_a_log_are_whole_while_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"

    def look(_: px.train.Event) -> None:
        content = path.read_bytes()
        assert content.endswith(b"\n")
        assert [json.loads(line) for line in content.splitlines()]

    px.fit(start(), step, data(), epochs=2, log=path, callbacks=look, progress=False)


def test_a_directory_is_no_log(tmp_path: Path) -> None:
    with pytest.raises(
        px.DataError, match=f"log: {tmp_path} is a directory; name a file in it: log='{tmp_path}/log.jsonl"
    ):
        px.fit(start(), step, data(), steps=1, log=tmp_path, progress=False)


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
    with pytest.raises(px.DataError, match=rf"{words}{argument}='{Path(name).name}'$"):
        px.fit(start(), _never, data(), steps=1, progress=False, **options)
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
    seen: list[px.train.Event] = []
    test = px.Evaluate(evaluate_step, [arrays()])
    options: dict[str, Any] = {"evaluate": test, "tensorboard": tmp_path / "board", "progress": False}
    px.fit(start(), step, data(), epochs=2, callbacks=seen.append, checkpoint=tmp_path / "runs", **options)
    values = {
        (value.tag, message.step): value.simple_value
        for message in events_of(tmp_path / "board")
        for value in message.summary.value
    }
    prefix = {"step": "train/", "epoch": "epoch/", "evaluate": ""}
    expected = {(prefix[told.kind] + name, told.step): value for told in seen for name, value in told.metrics.items()}
    assert values.keys() == expected.keys()
    np.testing.assert_allclose([values[key] for key in expected], list(expected.values()), rtol=1e-6)
    px.fit(start(), step, data(), epochs=3, checkpoint=tmp_path / "runs", **options)
    starts = [message.step for message in events_of(tmp_path / "board") if message.HasField("session_log")]
    assert sorted(starts) == [1, 9]  # TensorBoard leaves out older values from there on


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plots" / "curves.png"
    px.fit(start(), step, data(), epochs=2, evaluate=px.Evaluate(evaluate_step, [arrays()]), plot=path, progress=False)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert [other.name for other in path.parent.iterdir()] == ["curves.png"]


@pytest.mark.parametrize(
    ("module", "option", "words"),
    [
        ("tensorboardX", "tensorboard", r"px.fit: tensorboard= needs tensorboardX, .* pip install .*\[train\]"),
        ("matplotlib.figure", "plot", r"px.fit: plot= needs matplotlib, .* pip install .*\[train\]"),
        ("rich.console", "progress", r"px.fit: progress=True needs rich, .* pip install .*\[train\].*, or leave prog"),
    ],
)
def test_a_missing_package_is_named_before_anything_is_done(
    module: str, option: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    value: Any = True if option == "progress" else tmp_path / "x"
    options: Any = {option: value, "log": tmp_path / "log.jsonl"}
    with pytest.raises(ModuleNotFoundError, match=words):
        px.fit(start(), step, data(), steps=1, **options)
    assert list(tmp_path.iterdir()) == []


def test_in_a_pipe_there_are_plain_lines(capfd: pytest.CaptureFixture[str]) -> None:
    px.fit(start(), step, data(), epochs=2, evaluate=px.Evaluate(evaluate_step, [arrays()], every=4))
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
    several = [px.Evaluate(evaluate_step, [arrays()], name=name) for name in names]
    px.fit(start(), step, data(), epochs=1, evaluate=several, progress=True)
    shown = capfd.readouterr().err
    first, *others = shown.splitlines()
    assert first.startswith("step 4 of 4, epoch 1 of 1  loss ")
    value = first.partition("dev/loss ")[2].split()[0]
    assert others == [f"step 4 of 4, epoch 1 of 1  {name}/loss {value}" for name in names[1:]]
    assert "\x1b" not in shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> Terminal:
    """In the place of standard error; not a fixture, since pytest puts its own there before each test."""
    pytest.importorskip("rich.console")
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    return stream


def test_on_a_terminal_each_evaluation_stays_above_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = terminal(monkeypatch, columns=60)
    several = [px.Evaluate(lambda s, b: {"a-long-name-of-a-metric": 0.125}, [0], name=name) for name in ("dev", "test")]
    px.fit(Steps(0), counted, [0] * 10, epochs=1, evaluate=several)
    for name in ("dev", "test"):
        assert f"step 10 of 10, epoch 1 of 1  {name}/a-long-name-of-a-metric 0.125\n" in stream.getvalue()


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
    px.fit(start(), step, data(), epochs=2, progress=False)
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


class Clock:
    """In the place of ``time.monotonic``. It is also a loss, with which it goes on when it is fetched to be shown."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.count = 0

    def __call__(self) -> float:
        return self.count * self.seconds

    def __float__(self) -> float:
        self.count += 1
        return 0.5

    def step(self, state: Steps, batch: Any) -> tuple[Steps, dict[str, Any]]:
        return Steps(state.step + 1), {"loss": self}


class BrokenOffError(Exception):
    pass


def test_lines_come_by_time_and_less_and_less_often(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(event: px.train.Event) -> None:
        if event.step == 3000:
            raise BrokenOffError

    clock = Clock(0.1)
    monkeypatch.setattr("time.monotonic", clock)
    with pytest.raises(BrokenOffError):
        px.fit(Steps(0), clock.step, [np.zeros(4)] * 5000, steps=100_000, callbacks=stop)
    shown = capfd.readouterr().err
    steps = [int(line.split()[1].replace(",", "")) for line in shown.splitlines()]
    gaps = np.diff([0, *steps]) / 10
    np.testing.assert_allclose(gaps[:6], [2, 4, 8, 16, 32, 60], atol=0.2)
    assert "40 rows/s  10 steps/s" in shown
    assert "left" in shown.splitlines()[-1]


def test_the_time_that_is_left_is_that_of_the_steps_that_are(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(0.5)
    monkeypatch.setattr("time.monotonic", clock)
    test = px.Evaluate(lambda state, batch: {"loss": 1.0}, [0], every=101)
    px.fit(Steps(0), clock.step, [np.zeros(4)] * 250, epochs=4, evaluate=test)
    rate = "8 rows/s  2 steps/s  0:07:29 left"  # 899 steps
    expected = f"step 101 of 1,000, epoch 1 of 4  loss 0.5  test/loss 1  {rate}"
    assert expected in capfd.readouterr().err.splitlines()


def test_a_terminal_gets_one_line_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stream = Clock(0.2), terminal(monkeypatch, columns=120)
    monkeypatch.setattr("time.monotonic", clock)
    test = px.Evaluate(lambda state, batch: {"something else [not markup]": 1.0}, [0])
    px.fit(Steps(0), clock.step, [np.zeros(4)] * 10, epochs=1, evaluate=test)
    assert "step 10 of 10, epoch 1 of 1" in stream.getvalue()
    assert "something else [not markup]" in stream.getvalue()
    assert "\x1b[?25h" in stream.getvalue()  # the cursor is shown again


def test_a_plot_is_a_png_and_no_other(tmp_path: Path) -> None:
    with pytest.raises(
        px.DataError, match=r"plot must be the path of a PNG, got .*curves.pdf'; write plot='curves.png'"
    ):
        px.fit(start(), step, data(), steps=1, plot=tmp_path / "curves.pdf", progress=False)
    (tmp_path / "curves.png").mkdir()
    with pytest.raises(px.DataError, match=r"plot: .*curves.png is a directory; .*: plot='.*curves.png/curves.png'"):
        px.fit(start(), _never, data(), steps=1, plot=tmp_path / "curves.png", progress=False)
