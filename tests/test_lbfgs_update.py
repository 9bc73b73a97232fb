"""A loop of ``update`` makes the same steps wherever the rows lie; with given step sizes, those that anyone would."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import paraxis as px
from paraxis.solve import objective
from tests._problems import in_float64, labelled, softmax
from tests._support import axis_on

L2 = 1e-2
FUN = objective.l2_multiclass_logreg
# Rows, and how many of them count: the Gram matrix takes 30 of these, and no others on eight devices, which hold more.
ROWS = [(199, 199, AxisType.Auto), (209, 209, AxisType.Auto), (209, 150, AxisType.Explicit)]


def _errors(data: Any, compiled: Any) -> list[float]:
    params, solver = jnp.zeros((5, 3)), px.solve.LBFGS(FUN, precondition="gram")
    state = compiled(solver.init_state)(params, L2, data)
    update, found = jax.jit(solver.update), []
    for _ in range(3):
        params, state = update(params, state, L2, data)
        found.append(float(state.error))
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("compiled", [lambda fn: fn, jax.jit], ids=["here", "in jit"])
@pytest.mark.parametrize(("size", "count", "kind"), ROWS)
@in_float64
def test_lbfgs_update_makes_the_same_steps_wherever_the_rows_lie(
    compiled: Any, size: int, count: int, kind: AxisType
) -> None:
    x, y = labelled(size, 5, 3)
    expected = _errors((x[:count], y[:count]), jax.jit)
    assert len(set(expected)) == 3
    data = px.solve.rows(x, y, 1.0 * (np.arange(size) < count), axis=axis_on(8, size))
    mesh = Mesh(np.array(jax.devices()), ("rows",), axis_types=(kind,))
    found = _errors(jax.device_put(data, NamedSharding(mesh, P("rows"))), compiled)
    np.testing.assert_allclose(found, expected, rtol=1e-8)


def _gradient(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return x.T @ (softmax(x @ w) - np.eye(3)[y]) / len(x) + L2 * w


Schedule = float | Callable[[Any], Any]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stepsize", [0.1, lambda i: 0.1 / (i + 1)], ids=["a number", "a function"])
@in_float64
def test_lbfgs_update_with_a_step_size_steps_along_the_gradient(stepsize: Schedule) -> None:
    x, y = labelled(40, 5, 3)
    x = 20 * x  # the gradient is long
    plain = px.solve.ProximalGradient(FUN, stepsize=stepsize, acceleration=False)
    for solver, given, count in ((px.solve.LBFGS(FUN, stepsize=stepsize), (), 1), (plain, (None,), 3)):
        params, w = jnp.zeros((5, 3)), np.zeros((5, 3))
        state, update = jax.jit(solver.init_state)(params, *given, L2, (x, y)), jax.jit(solver.update)
        assert np.linalg.norm(_gradient(w, x, y)) > 1
        for i in range(count):
            params, state = update(params, state, *given, L2, (x, y))
            w = w - (stepsize(i) if callable(stepsize) else stepsize) * _gradient(w, x, y)
            np.testing.assert_allclose(params, w, rtol=1e-10, atol=1e-12)
