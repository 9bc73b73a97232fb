"""Gradients of rows that are larger than a cache, which are computed in pieces, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import paraxis as px
from tests._problems import softmax

# Rows, columns and outputs: pieces as they are wanted; none, as the rows are a prime.
SHAPES = {"two": (12000, 256, 3), "many": (9000, 256, 0), "no": (4003, 300, 0)}


def _grad(x: np.ndarray, y: np.ndarray, coef: np.ndarray) -> np.ndarray:
    z = x @ coef
    r = softmax(z) - np.eye(coef.shape[1])[y] if coef.ndim == 2 else 1 / (1 + np.exp(-z)) - y
    return x.T @ r / len(y) + 0.1 * coef


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize(("name", "devices"), [("two", 8), ("many", 8), ("many", 3), ("no", 1)])
def test_lbfgs_leaves_rows_that_the_user_put_on_a_mesh_where_they_are(name: str, devices: int, kind: AxisType) -> None:
    n, d, k = SHAPES[name]
    draw = np.random.default_rng(n)
    x, y = draw.normal(size=(n, d)).astype(np.float32), draw.integers(0, k or 2, n).astype(np.int32)
    coef = draw.normal(size=(d, k) if k else d) / 20
    fun = px.solve.objective.glm("softmax" if k else "logistic", l2=True)
    mesh = Mesh(jax.devices()[:devices], ("rows",), axis_types=(kind,))
    data = jax.device_put((x, y), NamedSharding(mesh, P("rows")))
    given, solver = jnp.asarray(coef, jnp.float32), px.solve.LBFGS(fun, precondition=None)
    state = solver.init_state(given, 0.1, data)
    expected = _grad(x.astype(float), y, coef)
    np.testing.assert_allclose(state.grad, expected, rtol=0, atol=2e-6)
    text = jax.jit(solver.update).lower(given, state, 0.1, data).compile().as_text() or ""
    for operation in ("all-gather", "all-to-all", "collective-permute"):
        assert operation not in text
