"""No public face: no command can be made to need no iterations, or to have errors that are not finite, at will."""

from pathlib import Path

import numpy as np
import pytest

import paraxis as px
from paraxis.cli.fit._display import draw


@pytest.mark.sampled(3)
@pytest.mark.parametrize("errors", [[], [0.5], [1.0, np.inf, np.nan], [0.0, 0.0]], ids=str)
@pytest.mark.parametrize("smooth", [True, False])
def test_a_curve_of_any_iterations_is_drawn(errors: list[float], smooth: bool, tmp_path: Path) -> None:
    history = [px.solve.Iteration(i + 1, -error, error, 1.0, 2 * i) for i, error in enumerate(errors)]
    draw(history, smooth, tmp_path / "fit.png")
    assert (tmp_path / "fit.png").read_bytes().startswith(b"\x89PNG")
