"""A function given as ``verbose`` is told of each iteration."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from tests._support import compilations

X = np.random.default_rng(0).normal(size=(30, 3))
Y = X @ np.array([1.0, 2.0, 3.0]) + np.random.default_rng(1).normal(size=30)
FUN = px.solve.objective.ridge


def solvers() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    return {
        "LBFGS": (px.solve.LBFGS, ()),
        "NewtonCG": (px.solve.NewtonCG, ()),
        "GradientDescent": (px.solve.GradientDescent, ()),
        "ProximalGradient": (px.solve.ProximalGradient, (None,)),
    }


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", solvers())
def test_each_iteration_is_told_in_pythons_numbers(name: str) -> None:
    solver, hyperparams = solvers()[name]
    seen: list[px.solve.Iteration] = []
    data = (jnp.asarray(X, jnp.float32), jnp.asarray(Y, jnp.float32))
    _, state = solver(FUN, verbose=seen.append, tol=1e-3, maxiter=40).run(jnp.zeros(3), *hyperparams, 0.1, data)
    jax.effects_barrier()
    assert sorted(one.iter_num for one in seen) == list(range(1, int(state.iter_num) + 1))
    assert {type(number) for one in seen for number in one} == {int, float}
    last = max(seen, key=lambda one: one.iter_num)
    np.testing.assert_allclose(last.value, float(state.value), rtol=1e-5)
    assert 0 < last.data_passes <= int(state.data_passes)


def test_a_fit_that_another_function_watches_is_not_compiled_anew() -> None:
    seen: dict[str, list[px.solve.Iteration]] = {"one": [], "another": []}

    def fit(name: str) -> Any:
        return px.solve.Ridge(verbose=lambda told: seen[name].append(told), devices=1).fit(X, Y)

    with compilations() as first:
        fit("one")
    with compilations() as second:
        model = fit("another")
    assert (len(first) > 0, second) == (True, [])
    assert [len(seen["one"]), len(seen["another"])] == [model.n_iter_] * 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", [1, 3])
def test_an_estimator_tells_once_whatever_the_devices(devices: int) -> None:
    seen: list[px.solve.Iteration] = []
    model = px.solve.Ridge(verbose=seen.append, devices=devices).fit(X, Y)
    jax.effects_barrier()
    assert sorted(one.iter_num for one in seen) == list(range(1, model.n_iter_ + 1))


@pytest.mark.slow
def test_a_fit_whose_watch_fails_ends_and_the_next_one_is_told() -> None:
    def failing(told: px.solve.Iteration) -> None:
        raise ValueError("no more")

    seen: list[px.solve.Iteration] = []
    with pytest.raises(Exception, match="no more"):
        px.solve.Ridge(verbose=failing, devices=1).fit(X, Y)
    model = px.solve.Ridge(verbose=seen.append, devices=1).fit(X, Y)
    assert len(seen) == model.n_iter_
