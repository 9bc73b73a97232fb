"""What a run writes, shows, and says: log, TensorBoard, pictures, lines, full disks, values that are not finite."""

import io
import json
import re
import resource
import sys
import warnings
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import paraxis as px
from tests import _fits as fits
from tests._fits import Steps, arrays, data, evaluate_step, lines, start, step
from tests._support import axis_on, bits

# Orbax closes its event loop at the first error; what is still being written then says that it is closed.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
TEST = px.Evaluate(evaluate_step, [arrays()])


def test_fit_writes_each_step_epoch_and_evaluation_to_log_and_tensorboard(tmp_path: Path) -> None:
    seen: list[px.train.Event] = []
    paths: dict[str, Any] = {"log": tmp_path / "a" / "log", "tensorboard": tmp_path / "board"}
    tests = [TEST, px.Evaluate(fits.evaluate_step, data(), name="train")]
    options: dict[str, Any] = {"evaluate": tests, "checkpoint": tmp_path / "runs", "progress": False}
    fitted = px.fit(start(), step, data(), epochs=2, callbacks=seen.append, **paths, **options)
    fitted.history.plot(tmp_path / "plots" / "curves.png")
    assert (tmp_path / "plots" / "curves.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    first, *rest = lines(paths["log"])
    assert [first[name] for name in ("event", "epochs", "steps")] == ["start", 2, None]
    told = [event for event in seen if event.kind in ("step", "epoch", "evaluate")]
    expected = [(event.kind, event.step, event.epoch, event.metrics) for event in told]
    assert [(line["event"], line["step"], line["epoch"], line["metrics"]) for line in rest] == expected
    assert [line["rows"] for line in rest if line["event"] == "step"] == [16, 16, 16, 8] * 2
    prefix, found = {"step": "train/", "epoch": "epoch/", "evaluate": ""}, fits.points(paths["tensorboard"])
    for event in told:
        apart = "evaluate/" if event.kind == "evaluate" and "train/loss" in event.metrics else prefix[event.kind]
        values = [found[apart + name].pop(event.step) for name in event.metrics]
        np.testing.assert_allclose(values, list(event.metrics.values()), rtol=1e-6)
    assert not any(found.values())
    px.fit(start(), step, data(), epochs=3, **paths, **options)
    starts = [e.step for file in paths["tensorboard"].iterdir() for e in fits.events(file) if e.HasField("session_log")]
    assert sorted(starts) == [1, 9]  # TensorBoard leaves out older values from there on


def test_fit_shows_in_tensorboard_the_later_run_of_one_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1e9)
    for number, loss in ((9999, 0.5), (10000, 0.25)):
        monkeypatch.setattr("os.getpid", lambda number=number: number)
        step = lambda s, batch, loss=loss: (Steps(s.step + 1), {"loss": loss})  # noqa: E731
        px.fit(Steps(0), step, [0], steps=2, tensorboard=tmp_path, progress=False)
    assert fits.points(tmp_path)["train/loss"] == {1: 0.25, 2: 0.25}


def test_fit_cuts_a_log_after_the_step_and_where_a_line_is_not_whole(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"

    def steps_after(start: int, last: int) -> list[int | None]:
        counted = lambda s, batch: (Steps(s.step + 1), {"loss": 0.5, "nan": np.nan})  # noqa: E731
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


@pytest.mark.parametrize("argument", ["log", "tensorboard"])
def test_fit_refuses_a_log_that_another_run_writes(
    argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    where: Any = {argument: tmp_path / "there", "progress": False}

    def another(event: px.train.Event) -> None:
        if event.kind == "start":
            with pytest.raises(BlockingIOError, match=f"another run saves there: {tmp_path}"):
                px.fit(start(), step, data(), steps=1, **where)

    px.fit(start(), step, data(), steps=1, callbacks=another, **where)
    px.fit(start(), step, data(), steps=1, **where)  # it has ended


@pytest.mark.parametrize("content", [b"notes\n", b'{"event": "other"}\n', b"\x89PNG"])
def test_fit_leaves_a_file_that_is_no_log_as_it_is(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_bytes(content)
    with pytest.raises(px.DataError, match=f"{file} is not a log of px.fit"):
        px.fit(start(), step, data(), steps=1, log=file, progress=False)
    assert file.read_bytes() == content


@pytest.mark.parametrize("is_terminal", [True, False])
def test_fit_shows_progress_in_one_line_on_a_terminal_only(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream: Any = io.StringIO()
    stream.isatty = lambda: is_terminal
    monkeypatch.setattr(sys, "stderr", stream)
    test = px.Evaluate(lambda state, batch: {"accuracy": 0.125}, [0])
    px.fit(Steps(0), lambda s, b: (Steps(s.step + 1), {"loss": 0.5}), [0] * 10, epochs=1, evaluate=test)
    assert "step 10 of 10, epoch 1 of 1  loss 0.5  test/accuracy 0.125\n" in stream.getvalue()
    assert ("\r\x1b[2Kstep 10 of 10, epoch 1 of 1  loss 0.5" in stream.getvalue()) == is_terminal
    assert ("\x1b" in stream.getvalue()) == is_terminal


def run(directory: Path, **options: Any) -> px.train.Fitted:
    test = px.Evaluate(evaluate_step, [arrays()], every=4)
    checkpoints = px.Checkpoints(directory / "checkpoints", every=2, best=("test/loss", "min"))
    paths = {"log": directory / "log.jsonl", "tensorboard": directory / "board", "checkpoint": checkpoints}
    return px.fit(start(), step, data(), steps=12, evaluate=test, progress=False, **paths, **options)


def fill_the_disk(event: px.train.Event) -> None:
    """From step 7 on, no file can grow."""
    if event.kind == "step" and event.step == 7:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def test_fit_returns_the_state_on_a_full_disk_and_names_what_is_lost(tmp_path: Path) -> None:
    expected, limit = run(tmp_path / "undisturbed"), resource.getrlimit(resource.RLIMIT_FSIZE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            fitted = run(tmp_path, callbacks=fill_the_disk)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert (bits(fitted.state), fitted.history) == (bits(expected.state), expected.history)
    said = "\n".join(str(warning.message) for warning in caught)
    assert f"log: {tmp_path}/log.jsonl cannot be written: " in said
    for number in (8, 12):
        assert f"the checkpoint of step {number} could not be written" in said
    # When there is room again, the same command goes on from the last one that was written.
    assert px.Checkpoints(tmp_path / "checkpoints").latest in (4, 6)  # the last one may still have been on its way
    assert bits(run(tmp_path).state) == bits(expected.state)
    assert lines(tmp_path / "log.jsonl") == lines(tmp_path / "undisturbed" / "log.jsonl")


def spoilt(rows: Any) -> dict[str, np.ndarray]:
    found = arrays()
    found["x"][rows, 1] = np.nan
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", [1, 8])
def test_fit_names_the_step_batch_and_rows_of_a_loss_that_is_not_finite(devices: int, tmp_path: Path) -> None:
    """The fourth batch has half as many rows; started again, it meets the same, and with better data it goes on."""
    axis, rows = axis_on(devices, 1, "batch"), data().rows(3)
    own, bad = px.train_step(fits.loss, axis=axis), px.loader(spoilt(rows[0]), 16, axis=axis, seed=1)
    paths: dict[str, Any] = {"checkpoint": tmp_path / "runs", "log": tmp_path / "log", "progress": False}
    listed = re.escape(f"(loss nan), of rows {', '.join(map(str, rows))}: data.rows(3).")
    found: Any = None
    for _ in range(2):
        words = rf"in step 4, number 4 of epoch 1 {listed} .*batch\['x'\] in rows {rows[0]}\. Mend"
        with pytest.raises(px.NonFiniteError, match=words) as caught:
            px.fit(start(), own, bad, steps=9, **paths)
        assert [line["step"] for line in lines(tmp_path / "log")[1:]] == [1, 2, 3]
        found = caught.value
    expected = list(fits.by_hand(fits.batches(data(), range(3))))[-1]
    state = found.state
    assert (int(state.step), bool(state.ok), px.Checkpoints(tmp_path / "runs").steps) == (3, True, (3,))
    np.testing.assert_allclose(state.params["w"], expected[0]["w"], rtol=1e-5)
    assert bits(px.Checkpoints(tmp_path / "runs").restore(start()).tree) == bits(state)
    np.testing.assert_array_equal(found.batch["x"], spoilt(rows[0])["x"][rows])
    better = px.loader(arrays(), 16, axis=axis, seed=1)
    whole = px.fit(start(), own, better, steps=9, progress=False)
    assert bits(px.fit(start(), own, better, steps=9, **paths).state) == bits(whole.state)


def test_fit_catches_a_gradient_that_is_not_finite_though_the_loss_is() -> None:
    def root(params: Any, batch: Any) -> Any:
        return jnp.sqrt(jnp.sum((params["w"] * batch["x"]) ** 2))

    ones, zeros = {"x": np.ones((4, 3), np.float32)}, {"x": np.zeros((4, 3), np.float32)}
    state = px.TrainState.create({"w": jnp.ones(3)}, optax.sgd(0.01))
    words = r"the gradient is not finite in step 3, .* \(loss 0\).* All values of the batch are finite"
    with pytest.raises(px.NonFiniteError, match=words) as caught:
        px.fit(state, px.train_step(root), [ones, ones, zeros, ones], epochs=3, progress=False)
    # d/dw sqrt(12 w²) is sqrt(12) in the direction of w, three times 2 / sqrt(3): 0.01 of that, twice.
    np.testing.assert_allclose(caught.value.state.params["w"], 1 - 0.01 * 2 * np.full(3, 2 / np.sqrt(3)), rtol=1e-5)
    assert caught.value.batch is zeros


def test_fit_names_the_rows_whose_values_are_not_finite() -> None:
    x = np.ones((30, 2, 2))
    x[[3, 7], 1] = [np.inf, np.nan]
    y = jnp.ones(30, jnp.bfloat16).at[jnp.arange(1, 26)].set(-jnp.inf)
    batch = {"x": x, "y": y, "z": np.ones(30), "n": np.arange(30), "scale": np.float32(np.nan), "name": np.array("a")}
    listed = ", ".join(map(str, range(1, 21)))
    words = f"batch['scale']; batch['x'] in rows 3, 7 of the batch; batch['y'] in rows {listed}, … (25 in all) of the"
    with pytest.raises(px.NonFiniteError, match=re.escape(words)):
        px.fit(0, lambda state, batch: (state + 1, {"loss": np.nan}), [batch], epochs=1, progress=False)
