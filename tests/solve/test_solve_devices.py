"""Where the rows lie never changes the optimum, and a step communicates as little as it promises."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import paraxis as px
from paraxis.solve import Status, objective
from paraxis.testing import assert_communication
from tests._support import axis_on, table
from tests.solve._problems import labelled

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


def _mesh(devices: int, kind: AxisType = AxisType.Auto, name: str = "data") -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]), (name,), axis_types=(kind,))


def _optimum(name: str, size: int) -> float:
    """By SciPy, in float64."""
    with jax.enable_x64(True):
        start, x, y = _data(name, size, "float64")
        flat, back = ravel_pytree(start)
        value_and_grad = jax.jit(jax.value_and_grad(lambda flat: FUNCTIONS[name](back(flat), L2, (x, y))))
        options = {"maxiter": 10_000, "gtol": 1e-11, "ftol": 0.0}
        found = scipy.optimize.minimize(value_and_grad, flat, jac=True, method="L-BFGS-B", options=options)
    assert np.linalg.norm(found.jac) < 1e-8, found.message
    return float(found.fun)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "size", "devices"),
    table(
        [("softmax with intercept", 5, (8,)), ("poisson", 64, (8,))],
        itertools.product(FUNCTIONS, (5, 64), [(1, 2, 3, 8)]),
    ),
)
def test_any_number_of_devices_finds_the_same_in_float32(name: str, size: int, devices: tuple[int, ...]) -> None:
    start, x, y = _data(name, size, "float32")
    expected = _optimum(name, size)
    solver = px.solve.LBFGS(FUNCTIONS[name], tol=1e-6)
    for number in devices:
        data = px.solve.rows(x, y, axis=axis_on(number, size))
        params, state = solver.run(start, L2, data)
        where = f"{number} devices: {state.reason}"
        assert int(state.status) in (Status.CONVERGED, Status.PRECISION), where
        assert float(state.error) <= 5e-6, where
        np.testing.assert_allclose(float(state.value), expected, rtol=1e-6, err_msg=where)
        assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, start)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_rows_that_the_user_put_on_a_mesh(kind: AxisType) -> None:
    start, x, y = _data("poisson", 48, "float32")
    expected = _optimum("poisson", 48)
    solver = px.solve.LBFGS(FUNCTIONS["poisson"], tol=1e-6)
    mesh = _mesh(8, kind)
    spread = jax.device_put((x, y, np.full(48, 2.0, "float32")), NamedSharding(mesh, P("data")))
    states = [solver.run(start, L2, spread).state]
    with jax.set_mesh(mesh):
        states.append(solver.run(start, L2, spread[:2]).state)
    params, state = start, solver.init_state(start, L2, spread)
    update = jax.jit(solver.update)
    for _ in range(30):
        params, state = update(params, state, L2, spread)
    np.testing.assert_allclose([float(one.value) for one in (*states, state)], expected, rtol=1e-6)


@pytest.mark.parametrize(("name", "kind"), [("softmax with intercept", AxisType.Auto), ("poisson", AxisType.Explicit)])
def test_a_step_sums_the_gradient_and_three_scalars_over_the_devices(name: str, kind: AxisType) -> None:
    start, x, y = _data(name, 48, "float32")
    data = jax.device_put((x, y, np.ones(48, "float32")), NamedSharding(_mesh(8, kind), P("data")))
    solver = px.solve.LBFGS(FUNCTIONS[name])
    state = solver.init_state(start, L2, data)
    assert_communication(jax.jit(solver.update), start, state, L2, data, all_reduce=2, all_gather=0)
