"""Proximal operators minimise what they are defined by, and projections find the nearest point that is allowed."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

from paraxis.solve import prox
from tests._problems import in_float64


def _group_norms(z: np.ndarray) -> float:
    return float(np.linalg.norm(z.reshape(len(z), -1), axis=1).sum()) if z.ndim > 1 else float(np.linalg.norm(z))


PENALTIES: dict[str, tuple[Callable[..., Any], Any, Callable[[np.ndarray], float]]] = {
    "l1": (prox.l1, 0.7, lambda z: 0.7 * np.abs(z).sum()),
    "elastic net": (prox.elastic_net, (0.4, 1.3), lambda z: 0.4 * np.abs(z).sum() + 0.65 * (z**2).sum()),
    "group": (prox.group, 0.8, lambda z: 0.8 * _group_norms(z)),
    "none": (prox.none, None, lambda z: 0.0),
}


@pytest.mark.parametrize("shape", [(4,), (3, 2)])
@pytest.mark.parametrize("name", PENALTIES)
@in_float64
def test_prox_minimises_what_defines_it(name: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    operator, hyper, penalty = PENALTIES[name]
    x, scaling = rng.normal(size=shape) * 2, 0.6

    def defining(z: np.ndarray) -> float:
        return scaling * penalty(z.reshape(shape)) + 0.5 * float(((z.reshape(shape) - x) ** 2).sum())

    found = np.asarray(operator(jnp.asarray(x), hyper, scaling))
    best = min(
        (scipy.optimize.minimize(defining, start, method="Powell", options={"xtol": 1e-10, "ftol": 1e-14})
         for start in (x.ravel(), np.zeros(x.size))), key=lambda result: result.fun
    )  # fmt: skip
    assert defining(found.ravel()) <= best.fun + 1e-10
    np.testing.assert_allclose(found.ravel(), best.x, atol=1e-4)


def test_prox_clips_each_leaf_at_its_own_bounds() -> None:
    x = {"a": jnp.array([-3.0, 0.5, 3.0]), "b": jnp.array([-3.0, 3.0])}
    found = prox.box(x, ({"a": -1.0, "b": jnp.array([-4.0, 0.0])}, {"a": jnp.inf, "b": 1.0}))
    np.testing.assert_array_equal(found["a"], [-1, 0.5, 3])
    np.testing.assert_array_equal(found["b"], [-3, 1])
