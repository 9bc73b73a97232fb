"""What a run writes, when it cannot be written, when it is somebody else's, and when the run may be killed."""

import contextlib
import resource
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import paraxis as px
from tests.train._fits import arrays, bits, data, evaluate_step, lines, start, step

NUM_STEPS = 12
pytest.importorskip("tensorboardX")
# Orbax closes its event loop at the first error; what is still being written then says that it is closed.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def everything(directory: Path) -> dict[str, Any]:
    return {
        "log": directory / "log.jsonl",
        "tensorboard": directory / "board",
        "checkpoint": px.Checkpoints(directory / "checkpoints", every=2, best=("test/loss", "min")),
        "evaluate": px.Evaluate(evaluate_step, [arrays()], every=4),
        "progress": False,
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    directory = tmp_path_factory.mktemp("undisturbed")
    return px.fit(start(), step, data(), steps=NUM_STEPS, **everything(directory)), directory


class Disk:
    """A disk that is full from some step on, until some later one: no file can grow, but for half a line of the log."""

    def __init__(self, first: int, last: int, then: Callable[[], None] = lambda: None, log: Path | None = None) -> None:
        self._first, self._last, self._then, self._log = first, last, then, log

    def __call__(self, event: px.train.Event) -> None:
        if event.kind == "step" and event.step == self._first:
            _limit(0 if self._log is None else self._log.stat().st_size + 50)
            self._then()
        if event.kind == "step" and event.step == self._last:
            _limit(resource.RLIM_INFINITY)

    def __enter__(self) -> "Disk":
        return self

    def __exit__(self, *_: object) -> None:
        _limit(resource.RLIM_INFINITY)


def _limit(size: int) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size if most == resource.RLIM_INFINITY else min(size, most), most))


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found += [str(warning.message) for warning in caught if str(warning.message).startswith("px.fit: ")]


def test_on_a_disk_that_stays_full_the_state_is_returned_and_each_loss_is_named(
    tmp_path: Path, undisturbed: tuple[Any, Path]
) -> None:
    expected, whole = undisturbed
    with Disk(7, -1) as disk, heard() as said:
        fitted = px.fit(start(), step, data(), steps=NUM_STEPS, callbacks=disk, **everything(tmp_path))
    assert bits(fitted.state) == bits(expected.state)
    assert fitted.history == expected.history
    for words in (
        f"log: {tmp_path}/log.jsonl cannot be written: ",
        "the checkpoint of step 8 could not be written",
        "the checkpoint of step 12 could not be written",
        "in what px.fit returns",
    ):
        assert any(words in message for message in said), (words, said)
    # When there is room again, the same command goes on from the last one that was written.
    assert px.Checkpoints(tmp_path / "checkpoints").latest in (4, 6)  # the last one may still have been on its way
    again = px.fit(start(), step, data(), steps=NUM_STEPS, **everything(tmp_path))
    assert bits(again.state) == bits(expected.state)
    assert lines(tmp_path / "log.jsonl") == lines(whole / "log.jsonl")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no such device here")
def test_progress_that_cannot_be_shown_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.suppress(OSError), open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stderr", full)
        test = px.Evaluate(evaluate_step, [arrays()])
        assert int(px.fit(start(), step, data(), epochs=2, evaluate=test).state.step) == 8


def test_a_file_that_is_no_log_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    for content in (b"notes\n", b'{"event": "other"}\n', b"\x89PNG"):
        file.write_bytes(content)
        with pytest.raises(px.DataError, match=f"{file} is not a log of px.fit"):
            px.fit(start(), step, data(), steps=1, log=file, progress=False)
        assert file.read_bytes() == content
