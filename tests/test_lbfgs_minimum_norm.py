"""Where columns depend on each other, a run that begins at zero finds the smallest of all solutions, as NumPy does."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from paraxis.solve import objective

ROWS, COLUMNS = 60, 12


def _deficient(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a rank below the number of columns, whose scales differ; of some, a column is zero or there twice."""
    rng = np.random.default_rng(seed)
    rank = int(rng.integers(1, COLUMNS))
    x = rng.normal(size=(ROWS, rank)) @ rng.normal(size=(rank, COLUMNS))
    x *= 10 ** rng.uniform(-0.5, 0.5, COLUMNS) if seed % 2 else 1
    if seed % 3 == 0:
        x[:, seed % COLUMNS] = 0
    if seed % 3 == 1:
        x[:, 0] = x[:, 1]
    return x, rng.normal(size=ROWS) + x @ rng.normal(size=COLUMNS)


@pytest.mark.parametrize("precondition", [None, "auto"])
def test_lbfgs_finds_the_smallest_of_all_solutions(precondition: Any) -> None:
    solver = px.solve.LBFGS(objective.least_squares, tol=1e-4, precondition=precondition)
    for seed in range(4):
        x, y = (a.astype("float32") for a in _deficient(seed))
        params, state = solver.run(jnp.zeros(COLUMNS), (x, y))
        expected = np.linalg.lstsq(x.astype(float), y.astype(float), rcond=1e-5)[0]
        assert abs(np.linalg.norm(params) / np.linalg.norm(expected) - 1) < 1e-3, f"seed {seed}: {state.reason}"
