"""Training in several processes is that in one."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import paraxis as px
from tests import _fits as fits
from tests._steps import assert_near, by_hand, of_nnx, rows
from tests.processes._support import running

pytestmark = pytest.mark.slow


def results(directory: Path) -> list[dict[str, Any]]:
    return [json.loads((directory / f"result-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("unbroken")
    with running(directory, "-n", "2", "--devices", "2", "-m", "tests.processes._ranks", str(directory)) as run:
        assert run.end() == 0, run.error
    return directory


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


def test_train_step_gives_each_process_the_whole_model_of_divided_parameters(unbroken: Path) -> None:
    params = next(by_hand(of_nnx(), optax.adam(1e-2), [rows(13)]))[0]
    found = [result["divided"] for result in results(unbroken)]
    assert [parts for parts, _ in found] == [[[1, 16]] * 2] * 2
    for model in found[1][1]:
        assert_near(jax.tree.map(np.asarray, model, is_leaf=lambda x: isinstance(x, list)), params)


def test_ensemble_fit_trains_in_two_processes_as_in_one(unbroken: Path) -> None:
    alone = fits.members(2)
    for result in results(unbroken):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), result["members"], alone)


def test_checkpoints_of_several_processes_are_restored_by_one(unbroken: Path) -> None:
    checkpoints = px.Checkpoints(unbroken / "saved")
    target = {"rows": jax.ShapeDtypeStruct((8, 3000), "float32"), "own": np.zeros((), "float32")}
    tree = checkpoints.restore({**target, "n": np.zeros(3, int), "k": 0}).tree
    np.testing.assert_array_equal(tree["rows"], np.arange(24_000).reshape(8, 3000))
    assert (tree["own"], tree["n"].tolist(), tree["k"], checkpoints.steps) == (2.5, [0, 1, 2], 7, (2,))
    assert (unbroken / "saved" / "damaged-3").is_dir()


def test_fit_names_in_each_process_its_own_rows_of_a_value_that_is_not_finite(unbroken: Path) -> None:
    row = px.loader(fits.arrays(), fits.BATCH, seed=1).rows(1)[-1]
    reasons = "All values of the batch are finite", f"batch['x'] in rows {row}. Mend"
    for found, reason in zip(results(unbroken), reasons, strict=True):
        for words in ("the loss is not finite in step 2, number 2 of epoch 1 (loss nan)", reason):
            assert words in found["nan"]
    assert px.Checkpoints(unbroken / "bad").steps == (1,)
