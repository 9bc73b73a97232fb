"""No public face: no command writes a model that it has read."""

from pathlib import Path

import numpy as np
import pytest

from paraxis.cli.fit._model import load, save
from tests.cli._models import saved


@pytest.mark.parametrize("objective", ["logistic", "squared", "poisson"])
def test_what_is_loaded_is_what_was_saved(objective: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "model.npz", objective)
    model = load(path)
    save(model, tmp_path / "again.npz")
    with np.load(path) as one, np.load(tmp_path / "again.npz") as two:
        assert {name: one[name].tobytes() for name in one} == {name: two[name].tobytes() for name in two}
    assert model.target.objective == objective
