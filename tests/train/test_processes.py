"""Training in several processes is that in one: as it is, told to stop, and with a rank that is killed."""

import json
import re
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import paraxis as px
from tests.launch._support import Running, running
from tests.train import _fits as fits
from tests.train._models import assert_near, by_hand, of_nnx, rows

pytestmark = pytest.mark.slow
SCRIPT = "-m", "tests.train._ranks"


def ended(directory: Path, *words: str, status: int = 0, stop_at: str = "", options: tuple[str, ...] = ()) -> Running:
    """A launch that has come to its end; told to stop when both ranks have printed a text."""
    with running(directory, "-n", "2", "--devices", "2", *options, *SCRIPT, str(directory), *words) as run:
        if stop_at:
            run.wait_for(stop_at, times=2)
            run.process.send_signal(signal.SIGTERM)
        assert run.end() == status, run.error
    return run


def results(directory: Path) -> list[dict[str, Any]]:
    return [json.loads((directory / f"result-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("unbroken")
    ended(directory, "more")
    return directory


def test_fit_in_two_processes_is_that_in_one(unbroken: Path) -> None:
    data = px.loader(fits.arrays(), fits.BATCH, seed=1)
    expected = px.fit(fits.start(), px.train_step(fits.loss), data, steps=80, progress=False)
    for found in results(unbroken):
        np.testing.assert_allclose(found["w"], expected.state.params["w"], rtol=1e-4)
        losses = [record.metrics["loss"] for record in expected.history.epochs]
        np.testing.assert_allclose(found["losses"], losses, rtol=1e-4)


def test_loader_reads_in_each_process_the_rows_of_its_devices(unbroken: Path) -> None:
    first, second = (found["read"] for found in results(unbroken))
    alone = px.loader(np.arange(12), 8, seed=1, transform=fits.noisy)
    for k, (mine, theirs, batch) in enumerate(zip(first[0], second[0], alone.epoch(1), strict=True)):
        rows = alone.rows(2 + k).tolist()
        half, block = len(rows) // 2, len(rows) // 4
        assert (mine["asked"], theirs["asked"]) == (rows[:half], rows[half:])
        for name in ("number", "noise"):
            values = np.asarray(batch[name]).tolist()
            there = {int(start): found for start, found in (mine[name] | theirs[name]).items()}
            assert there == {start: values[start : start + block] for start in range(0, len(rows), block)}
    assert first[1] == [[0, 1, 2, 3, 4], {"0": [4], "1": [5]}, True]
    assert second[1] == [[0, 1, 2, 3, 4], {"2": [6], "3": [7]}, True]


def test_each_process_has_the_whole_model_of_divided_parameters(unbroken: Path) -> None:
    params = by_hand(of_nnx(), optax.adam(1e-2), [rows(13)])[0]
    found = [result["divided"] for result in results(unbroken)]
    assert [parts for parts, _ in found] == [[[1, 16]] * 2] * 2
    for model in found[1][1]:
        assert_near(jax.tree.map(np.asarray, model, is_leaf=lambda x: isinstance(x, list)), params)


def test_one_process_restores_what_several_have_saved(unbroken: Path) -> None:
    checkpoints = px.Checkpoints(unbroken / "saved")
    target = {"rows": jax.ShapeDtypeStruct((8, 3000), "float32"), "own": np.zeros((), "float32")}
    tree = checkpoints.restore({**target, "n": np.zeros(3, int), "k": 0}).tree
    np.testing.assert_array_equal(tree["rows"], np.arange(24_000).reshape(8, 3000))
    assert (tree["own"], tree["n"].tolist(), tree["k"], checkpoints.steps) == (2.5, [0, 1, 2], 7, (2,))
    assert (unbroken / "saved" / "damaged-3").is_dir()


def test_a_value_that_is_not_finite_is_an_error_in_all_and_each_names_its_own_rows(unbroken: Path) -> None:
    row = px.loader(fits.arrays(), fits.BATCH, seed=1).rows(1)[-1]
    reasons = "All values of the batch are finite", f"batch['x'] in rows {row}. Mend"
    for found, reason in zip(results(unbroken), reasons, strict=True):
        for words in ("the loss is not finite in step 2, number 2 of epoch 1 (loss nan)", reason):
            assert words in found["nan"]
    assert px.Checkpoints(unbroken / "bad").steps == (1,)


def test_an_error_in_one_process_after_a_checkpoint_ends_all_and_is_shown(tmp_path: Path) -> None:
    """The others are in the next step by then, and cannot be asked how their part of a checkpoint went."""
    run = ended(tmp_path, "raises", status=1)
    assert "LookupError: an error of the user's own" in run.error
    assert px.Checkpoints(tmp_path / "checkpoints").latest == 40


def test_fit_in_two_processes_comes_to_the_same_bits_when_told_to_stop_and_killed(
    unbroken: Path, tmp_path: Path
) -> None:
    run = ended(tmp_path, "slow", stop_at="step at 5")
    done = px.Checkpoints(tmp_path / "checkpoints").latest or 0
    assert 5 <= done < 60
    assert f"px.fit: SIGTERM: stopped after step {done}, saved in {tmp_path}/checkpoints/{done}; the same" in run.error
    run = ended(tmp_path, "kill", options=("--restarts", "1"))
    assert re.search(r"rank 1 .*SIGKILL", run.error), run.error
    begun = [int(step) for step in re.findall(r"start at (\d+)", run.out)]
    assert begun[:2] == [done, done]
    assert done < begun[2] == begun[3] <= 64
    for found, expected in zip(results(tmp_path), results(unbroken), strict=True):
        assert (found["bits"], found["losses"]) == (expected["bits"], expected["losses"])


def test_fit_in_two_processes_gives_up_an_evaluation_when_told_to_stop(tmp_path: Path) -> None:
    run = ended(tmp_path, "evaluate", "slow-evaluation", stop_at="a batch is evaluated", options=("--grace", "20"))
    assert run.out.count("a batch is evaluated") < 2 * 14
    assert px.Checkpoints(tmp_path / "checkpoints").latest == 30
    run = ended(tmp_path, "evaluate")
    assert run.out.count("a batch is evaluated") == 3 * 2 * 14
    assert [found["evaluated"] for found in results(tmp_path)] == [[30, 60, 80]] * 2
