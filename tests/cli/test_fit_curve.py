"""No public face: no command can be made to need no iterations, or to have errors that are not finite, at will."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paraxis as px
from paraxis.cli.fit._display import Figure, draw


@pytest.mark.sampled(3)
@pytest.mark.parametrize("errors", [[], [0.5], [1.0, np.inf, np.nan], [0.0, 0.0]], ids=str)
@pytest.mark.parametrize("smooth", [True, False])
def test_a_curve_of_any_iterations_is_drawn(errors: list[float], smooth: bool, tmp_path: Path) -> None:
    history = [px.solve.Iteration(i + 1, -error, error, 1.0, 2 * i) for i, error in enumerate(errors)]
    draw(history, smooth, tmp_path / "fit.png")
    assert (tmp_path / "fit.png").read_bytes().startswith(b"\x89PNG")


def test_both_plots_have_the_same_iterations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: figures.append(self))
    # The last value is no distance from itself, and cannot be drawn where heights are logarithms.
    draw([px.solve.Iteration(i, 2.0**-i, 2.0**-i, 1.0, i) for i in range(1, 6)], True, tmp_path / "fit.png")
    left, right = figures[0].axes
    assert left.get_xlim() == right.get_xlim()
    assert left.get_xlim()[1] >= 5
