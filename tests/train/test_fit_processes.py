"""A run of several processes is that of one: as it is, told to stop, and with a rank that is killed."""

import json
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paraxis as px
from tests.launch._support import Running, running
from tests.train._fit_ranks import BATCH, STEPS, Rows, loss, start

pytestmark = pytest.mark.slow
OPTIONS = ("-n", "2", "--devices", "1")
SCRIPT = ("-m", "tests.train._fit_ranks")


def ended(directory: Path, *words: str, options: tuple[str, ...] = ()) -> Running:
    """A launch that has come to its end, with status 0."""
    with running(directory, *OPTIONS, *options, *SCRIPT, str(directory), *words) as run:
        assert run.end() == 0, run.error
    return run


def results(directory: Path) -> list[dict[str, Any]]:
    return [json.loads((directory / f"result-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("unbroken")
    ended(directory, "nan")
    return directory


def test_two_processes_come_to_what_one_does_by_the_same_rows(unbroken: Path) -> None:
    first, second = results(unbroken)
    alone = px.loader(Rows(), BATCH, seed=1)
    expected = px.fit(start(), px.train_step(loss), alone, steps=STEPS, progress=False)
    losses = [record.metrics["loss"] for record in expected.history.epochs]
    for found in (first, second):
        np.testing.assert_allclose(found["w"], expected.state.params["w"], rtol=1e-4)
        np.testing.assert_allclose(found["losses"], losses, rtol=1e-4)
    for number in range(STEPS):
        assert first["asked"][number] + second["asked"][number] == alone.rows(number).tolist()


def test_a_value_that_is_not_finite_is_an_error_in_all_and_each_names_its_own_rows(unbroken: Path) -> None:
    row = px.loader(Rows(), BATCH, seed=1).rows(1)[-1]
    reasons = "All values of the batch are finite", f"batch['x'] in rows {row}. Mend"
    for found, reason in zip(results(unbroken), reasons, strict=True):
        for words in ("the loss is not finite in step 2, number 2 of epoch 1 (loss nan)", reason):
            assert words in found["error"]
    assert px.Checkpoints(unbroken / "bad").steps == (1,)


def test_an_error_in_one_after_a_checkpoint_ends_all_and_is_shown(tmp_path: Path) -> None:
    """The others are in the next step by then, and cannot be asked how their part of a checkpoint went."""
    with running(tmp_path, *OPTIONS, *SCRIPT, str(tmp_path), "raises") as run:
        assert run.end() != 0
    assert "LookupError: an error of the user's own" in run.error
    assert px.Checkpoints(tmp_path / "checkpoints").latest == 70


def test_told_to_stop_and_killed_it_comes_to_the_same_bits(unbroken: Path, tmp_path: Path) -> None:
    with running(tmp_path, *OPTIONS, *SCRIPT, str(tmp_path), "slow") as run:
        run.wait_for("five steps", times=2)
        run.process.send_signal(signal.SIGTERM)
        assert run.end() == 0, run.error
    done = px.Checkpoints(tmp_path / "checkpoints").latest or 0
    assert 5 <= done < 100
    assert f"px.fit: SIGTERM: stopped after step {done}, saved in {tmp_path}/checkpoints/{done}; the same" in run.error
    run = ended(tmp_path, "kill", options=("--restarts", "1"))
    assert re.search(r"rank 1 .*SIGKILL", run.error), run.error
    begun = [int(step) for step in re.findall(r"from step (\d+)", run.out)]
    assert begun[:2] == [done, done]
    assert done < begun[2] == begun[3] <= 104
    for found, expected in zip(results(tmp_path), results(unbroken), strict=True):
        assert (found["bits"], found["losses"]) == (expected["bits"], expected["losses"])


def test_told_to_stop_in_an_evaluation_they_save_at_once_and_evaluate_when_they_go_on(tmp_path: Path) -> None:
    words = "evaluate", "slow-evaluation"
    with running(tmp_path, *OPTIONS, "--grace", "20", *SCRIPT, str(tmp_path), *words) as run:
        run.wait_for("a batch is evaluated", times=2)
        run.process.send_signal(signal.SIGTERM)
        assert run.end() == 0, run.error
    assert run.out.count("a batch is evaluated") < 2 * 14
    assert px.Checkpoints(tmp_path / "checkpoints").latest == 50
    run = ended(tmp_path, "evaluate")
    assert run.out.count("a batch is evaluated") == 3 * 2 * 14
    assert [found["evaluated"] for found in results(tmp_path)] == [[50, 100, STEPS]] * 2
