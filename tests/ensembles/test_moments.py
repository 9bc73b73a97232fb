"""No public face: members weigh 0 or 1 in a prediction; means and moments take any weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paraxis._axes import placing
from paraxis.ensembles import _moments, _resident as resident
from tests._support import assert_close, axis_on, values


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("devices", "size"), [(1, 3), (8, 10)])
def test_means_and_moments_with_weights_are_numpys(devices: int, size: int) -> None:
    placement = placing.place(axis_on(devices, size))
    tree = {"x": values(size, 3), "n": jnp.arange(size)}
    weights = np.asarray(0.5 + np.arange(size), np.float32)
    mean = jax.tree.map(lambda leaf: np.average(np.asarray(leaf, np.float64), 0, weights), tree)
    square = jax.tree.map(lambda x, m: np.average((np.asarray(x) - m) ** 2, 0, weights), tree, mean)
    for rows in (resident.on_devices(tree, placement), resident.on_devices(tree, placement).as_separate()):
        assert_close(jax.tree.map(np.asarray, _moments.mean(rows, weights)), mean)
        assert_close(jax.tree.map(np.asarray, _moments.moments(rows, weights)), (mean, square))
