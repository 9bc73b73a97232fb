"""Where the rows lie never changes the optimum, and a step communicates as little as it promises."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from sklearn.linear_model import PoissonRegressor

import paraxis as px
from paraxis.solve import objective
from paraxis.testing import assert_communication
from tests._modules import mesh_of
from tests._problems import labelled, softmax

L2 = 1e-2
FUNCTIONS = {
    "softmax": objective.l2_multiclass_logreg,
    "softmax with intercept": objective.l2_multiclass_logreg_with_intercept,
    "logistic with intercept": objective.glm("logistic", intercept=True, l2=True),
    "poisson": objective.glm("poisson", l2=True),
}


def _data(name: str, size: int, dtype: str) -> tuple[Any, np.ndarray, np.ndarray]:
    """Where to start, rows and targets."""
    x, y = labelled(size, 5, 3)
    many = name.startswith("softmax")
    y = y if many else y.clip(0, 1)
    return FUNCTIONS[name].init(5, 3 if many else None, dtype=dtype), x.astype(dtype), y


@pytest.mark.sampled(1)
@pytest.mark.parametrize("in_force", [True, False])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_lbfgs_takes_rows_that_the_user_put_on_a_mesh(kind: AxisType, in_force: bool) -> None:
    start, x, y = _data("poisson", 48, "float32")
    solver = px.solve.LBFGS(FUNCTIONS["poisson"], tol=1e-6)
    coef = PoissonRegressor(alpha=L2, fit_intercept=False, tol=1e-9).fit(x.astype(float), y).coef_
    expected = np.mean(np.exp(x @ coef) - y * (x @ coef)) + L2 / 2 * coef @ coef
    mesh = mesh_of(8, "data", kind)
    spread = jax.device_put((x, y, np.full(48, 2.0, "float32")), NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh) if in_force else contextlib.nullcontext():
        state = solver.run(start, L2, spread[:2] if in_force else spread).state
    np.testing.assert_allclose(float(state.value), expected, rtol=1e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "kind"), [("softmax with intercept", AxisType.Auto), ("poisson", AxisType.Explicit)])
def test_lbfgs_sums_the_gradient_and_three_scalars_a_step_over_the_devices(name: str, kind: AxisType) -> None:
    start, x, y = _data(name, 48, "float32")
    data = jax.device_put((x, y, np.ones(48, "float32")), NamedSharding(mesh_of(8, "data", kind), P("data")))
    solver = px.solve.LBFGS(FUNCTIONS[name])
    state = solver.init_state(start, L2, data)
    assert_communication(jax.jit(solver.update), start, state, L2, data, all_reduce=2, all_gather=0)


# Rows, columns and outputs: pieces as they are wanted; none, as the rows are a prime.
SHAPES = {"two": (12000, 256, 3), "many": (9000, 256, 0), "no": (4003, 300, 0)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize(("name", "devices"), [("many", 8), ("no", 1), ("many", 3), ("two", 8)])
def test_lbfgs_leaves_rows_that_the_user_put_on_a_mesh_where_they_are(name: str, devices: int, kind: AxisType) -> None:
    n, d, k = SHAPES[name]
    draw = np.random.default_rng(n)
    x, y = draw.normal(size=(n, d)).astype(np.float32), draw.integers(0, k or 2, n).astype(np.int32)
    coef = draw.normal(size=(d, k) if k else d) / 20
    fun = px.solve.objective.glm("softmax" if k else "logistic", l2=True)
    mesh = mesh_of(devices, "rows", kind)
    data = jax.device_put((x, y), NamedSharding(mesh, P("rows")))
    given, solver = jnp.asarray(coef, jnp.float32), px.solve.LBFGS(fun, precondition=None)
    state = solver.init_state(given, 0.1, data)
    z = x.astype(float) @ coef
    residual = softmax(z) - np.eye(k)[y] if k else 1 / (1 + np.exp(-z)) - y
    np.testing.assert_allclose(state.grad, x.astype(float).T @ residual / n + 0.1 * coef, rtol=0, atol=2e-6)
    text = jax.jit(solver.update).lower(given, state, 0.1, data).compile().as_text() or ""
    for operation in ("all-gather", "all-to-all", "collective-permute"):
        assert operation not in text
