"""A loop of ``update`` makes the same steps wherever the rows lie; with given step sizes, those that anyone would."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from paraxis.solve import objective
from tests._support import axis_on, compilations
from tests.solve._problems import in_float64, labelled, softmax

L2 = 1e-2
FUN = objective.l2_multiclass_logreg
SIZE = 199  # rows, of which the Gram matrix takes every fourth; of 200, as on eight devices, it would be every fifth


def _errors(solver: Any, data: Any, num_steps: int = 3) -> list[float]:
    params = jnp.zeros((5, 3))
    state = jax.jit(solver.init_state)(params, L2, data)
    update, found = jax.jit(solver.update), []
    for _ in range(num_steps):
        params, state = update(params, state, L2, data)
        found.append(float(state.error))
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", [8, 1])
@pytest.mark.parametrize("name", ["LBFGS", "NewtonCG", "GradientDescent"])
@in_float64
def test_steps_do_not_depend_on_where_the_rows_lie(name: str, devices: int) -> None:
    solver = {"LBFGS": px.solve.LBFGS, "NewtonCG": px.solve.NewtonCG, "GradientDescent": px.solve.GradientDescent}
    x, y = labelled(SIZE, 5, 3)
    expected = _errors(solver[name](FUN), (x, y))
    assert len(set(expected)) == 3
    found = _errors(solver[name](FUN), px.solve.rows(x, y, axis=axis_on(devices, SIZE)))
    np.testing.assert_allclose(found, expected, rtol=1e-8)


@pytest.mark.slow
def test_an_update_outside_jit_is_one_program_and_the_same_step() -> None:
    x, y = labelled(64, 5, 3)
    data = px.solve.rows(x.astype("float32"), y)
    solver = px.solve.LBFGS(FUN)
    params = data.shared(jnp.zeros((5, 3)))
    state = solver.init_state(params, L2, data)
    with compilations() as compiled:
        eager = solver.update(params, state, L2, data)
        jax.block_until_ready(eager)
    assert len(compiled) <= 2, compiled
    jitted = jax.jit(solver.update)(params, state, L2, data)
    np.testing.assert_allclose(eager.params, jitted.params, rtol=1e-6, atol=1e-7)


def test_what_a_function_reads_is_read_again_at_each_update() -> None:
    wanted = {"at": 1.0}
    solver = px.solve.LBFGS(lambda p: jnp.sum((p - wanted["at"]) ** 2), stepsize=0.5)
    params, state = jnp.zeros(2), solver.init_state(jnp.zeros(2))
    for wanted["at"] in (1.0, 3.0):
        _, new = solver.update(params, state)
        np.testing.assert_allclose(new.value, 2 * (1 - wanted["at"]) ** 2, atol=1e-6)  # the first step goes to 1


def _gradient(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return x.T @ (softmax(x @ w) - np.eye(3)[y]) / len(x) + L2 * w


Schedule = float | Callable[[Any], Any]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stepsize", [0.1, lambda i: 0.1 / (i + 1)], ids=["a number", "a function"])
@pytest.mark.parametrize("name", ["LBFGS", "GradientDescent", "GradientDescent without acceleration"])
@in_float64
def test_a_given_step_size_is_that_of_a_step_along_the_gradient(name: str, stepsize: Schedule) -> None:
    x, y = labelled(40, 5, 3)
    x = 20 * x  # the gradient is long
    solver: Any = {
        "LBFGS": px.solve.LBFGS(FUN, stepsize=stepsize),
        "GradientDescent": px.solve.GradientDescent(FUN, stepsize=stepsize),
        "GradientDescent without acceleration": px.solve.GradientDescent(FUN, stepsize=stepsize, acceleration=False),
    }[name]
    params, w = jnp.zeros((5, 3)), np.zeros((5, 3))
    state, update = jax.jit(solver.init_state)(params, L2, (x, y)), jax.jit(solver.update)
    assert np.linalg.norm(_gradient(w, x, y)) > 1
    for i in range(3 if "without" in name else 1):
        params, state = update(params, state, L2, (x, y))
        w = w - (stepsize(i) if callable(stepsize) else stepsize) * _gradient(w, x, y)
        np.testing.assert_allclose(params, w, rtol=1e-10, atol=1e-12)


SOLVERS = {
    "LBFGS": lambda fun: px.solve.LBFGS(fun, precondition="gram"),
    "NewtonCG": lambda fun: px.solve.NewtonCG(fun, precondition="gram"),
    "GradientDescent": px.solve.GradientDescent,
    "ProximalGradient": lambda fun: px.solve.ProximalGradient(fun, px.solve.prox.l1),
}
FIELDS = ["value", "progress", "cache", "preconditioner"]


def _changed(state: Any, name: str, value: Any) -> Any:
    """A state as it is unpickled with something else in a field; with nothing, without the field."""
    made = copy.copy(state)
    vars(made).pop(name) if value is None else vars(made).update({name: value})
    return pickle.loads(pickle.dumps(made))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", SOLVERS)
def test_a_state_with_another_structure_is_refused_by_the_name_of_its_part(name: str, compiled: bool) -> None:
    solver, data = SOLVERS[name](FUN), labelled(SIZE, 5, 3)
    given = (L2, data) if name != "ProximalGradient" else (0.1, L2, data)
    params = jnp.zeros((5, 3))
    state = solver.init_state(params, *given)
    update = jax.jit(solver.update) if compiled else solver.update
    cases: list[tuple[str, Any]]
    if compiled:  # a part that is missing is none of a pytree
        cases = [(field, (jnp.ones((5, 5)),) * 3) for field in FIELDS]
    else:
        cases = [(field, value) for field in FIELDS for value in (None, (jnp.ones((5, 5)),) * 3, {"odd": 1.0})]
    if name in ("LBFGS", "NewtonCG"):
        cases.append(("preconditioner", jnp.ones((5, 5))))  # as 0.2.0 had it
    cases = [(field, value) for field, value in cases if hasattr(state, field)]
    for field, value in cases:
        with pytest.raises(px.StateError, match=rf"its {field} is .*solver\.init_state\(params, …\)"):
            update(params, _changed(state, field, value), *given)
    again, _ = update(params, pickle.loads(pickle.dumps(state)), *given)
    np.testing.assert_array_equal(again, update(params, state, *given)[0])


def test_a_function_that_fails_in_an_update_is_not_told_as_a_wrong_state() -> None:
    divisors = [1]
    solver = px.solve.LBFGS(lambda p: jnp.sum(p**2) / divisors[0] + 1 / divisors[0])
    state = solver.init_state(jnp.ones(2))
    divisors[0] = 0
    with pytest.raises(ZeroDivisionError):
        solver.update(jnp.ones(2), state)
