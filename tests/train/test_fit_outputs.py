"""What a run writes, when it cannot be written, when it is somebody else's, and when the run may be killed."""

import contextlib
import resource
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import paraxis as px
from tests.train._fits import arrays, bits, data, evaluate_step, lines, start, step

# Orbax closes its event loop at the first error; what is still being written then says that it is closed.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def run(directory: Path, **options: Any) -> px.train.Fitted:
    test = px.Evaluate(evaluate_step, [arrays()], every=4)
    checkpoints = px.Checkpoints(directory / "checkpoints", every=2, best=("test/loss", "min"))
    paths = {"log": directory / "log.jsonl", "tensorboard": directory / "board", "checkpoint": checkpoints}
    return px.fit(start(), step, data(), steps=12, evaluate=test, progress=False, **paths, **options)


def fill_the_disk(event: px.train.Event) -> None:
    """From step 7 on, no file can grow."""
    if event.kind == "step" and event.step == 7:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def test_on_a_disk_that_stays_full_the_state_is_returned_and_each_loss_is_named(tmp_path: Path) -> None:
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
    assert "in what px.fit returns" in said
    # When there is room again, the same command goes on from the last one that was written.
    assert px.Checkpoints(tmp_path / "checkpoints").latest in (4, 6)  # the last one may still have been on its way
    assert bits(run(tmp_path).state) == bits(expected.state)
    assert lines(tmp_path / "log.jsonl") == lines(tmp_path / "undisturbed" / "log.jsonl")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no such device here")
def test_progress_that_cannot_be_shown_on_a_full_disk_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.suppress(OSError), open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stderr", full)
        test = px.Evaluate(evaluate_step, [arrays()])
        assert int(px.fit(start(), step, data(), epochs=2, evaluate=test).state.step) == 8


@pytest.mark.parametrize("content", [b"notes\n", b'{"event": "other"}\n', b"\x89PNG"])
def test_a_file_that_is_no_log_stays_as_it_is(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_bytes(content)
    with pytest.raises(px.DataError, match=f"{file} is not a log of px.fit"):
        px.fit(start(), step, data(), steps=1, log=file, progress=False)
    assert file.read_bytes() == content
