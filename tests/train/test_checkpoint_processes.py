"""Several processes save together; one restores what they saved."""

from pathlib import Path

import jax
import numpy as np
import pytest

import paraxis as px
from tests.train._checkpoint_processes import NUM_PROCESSES, values
from tests.train._processes import outputs_of


@pytest.mark.slow
def test_several_processes_save_and_one_restores(tmp_path: Path) -> None:
    """Each restores what it saved; and of a damaged one, all use the one before."""
    outputs_of(NUM_PROCESSES, "-m", "tests.train._checkpoint_processes", tmp_path, devices=1)
    target = {"rows": jax.ShapeDtypeStruct((8, 3000), "float32"), "all": np.zeros((2, 3000), "float32")}
    checkpoints = px.Checkpoints(tmp_path)
    restored = checkpoints.restore({**target, "own": np.zeros((), "float32"), "n": np.zeros(3, int), "k": 0})
    np.testing.assert_array_equal(restored.tree["rows"], values())
    np.testing.assert_array_equal(restored.tree["all"], values()[:2])
    assert (restored.tree["own"], restored.tree["n"].tolist(), restored.tree["k"]) == (2.5, [0, 1, 2], 7)
    assert checkpoints.steps == (2,)
    assert (tmp_path / "damaged-3").is_dir()
