"""A function given as ``verbose`` is told of each iteration, and may end the run, as Ctrl-C does."""

import os
import signal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from paraxis.solve import Status

X = np.random.default_rng(0).normal(size=(30, 3))
Y = X @ np.array([1.0, 2.0, 3.0]) + np.random.default_rng(1).normal(size=30)
ROWS = px.Axis("rows", 30)
TOTAL = jax.jit(lambda number: px.reduce_sum(px.map_fn(lambda x: x + number, jnp.ones(30), ROWS), ROWS))


def quartic(params: jax.Array, *_: Any) -> jax.Array:
    return jnp.sum((params - 1) ** 4 + params**2)


RUNS: dict[str, Any] = {
    "LBFGS": lambda watch: px.solve.LBFGS(quartic, verbose=watch).run(jnp.zeros(3)),
    "ProximalGradient": lambda watch: px.solve.ProximalGradient(quartic, verbose=watch).run(jnp.zeros(3)),
    "a table": lambda watch: px.solve.PoissonRegressor(verbose=watch).fit(
        px.Table.of_arrays(X, Y**2), engine=px.Stream(at_once=2)
    ),
    "a model": lambda watch: px.solve.LogisticRegression(verbose=watch, devices=2).fit(X, Y > 0),
    "least squares": lambda watch: px.solve.Lasso(alpha=1e-3, verbose=watch).fit(X, Y),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", RUNS)
def test_lbfgs_tells_each_iteration_in_pythons_numbers_and_raises_the_callbacks_errors(name: str) -> None:
    seen: list[px.solve.Iteration] = []

    def watch(one: px.solve.Iteration) -> None:
        seen.append(one)
        assert TOTAL(one.iter_num) == 30 + 30 * one.iter_num  # it may compute, on the same devices

    RUNS[name](watch)
    assert [one.iter_num for one in seen] == list(range(1, len(seen) + 1))
    assert {type(number) for one in seen for number in one} == {int, float}
    assert seen[-1].data_passes > 0

    def failing(one: px.solve.Iteration) -> None:
        raise ArithmeticError(f"in iteration {one.iter_num}")

    with pytest.raises(ArithmeticError, match="in iteration 1") as caught:
        RUNS[name](failing)
    assert caught.traceback[-1].name == "failing"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("by", ["a callback", "Ctrl-C"])
def test_lbfgs_that_was_interrupted_has_what_was_found(by: str) -> None:
    def watch(one: px.solve.Iteration) -> None:
        if one.iter_num == 2 and by == "a callback":
            raise KeyboardInterrupt
        if one.iter_num == 2:
            os.kill(os.getpid(), signal.SIGINT)

    start = jnp.zeros(3)
    with pytest.raises(px.solve.Interrupted) as caught:
        px.solve.LBFGS(quartic, tol=0, maxiter=1000, verbose=watch).run(start)
    params, state = caught.value.params, caught.value.state
    assert 1 <= int(state.iter_num) <= 3
    assert int(state.status) == Status.INTERRUPTED
    assert quartic(params) < quartic(start)


def test_estimators_that_were_interrupted_are_as_they_were() -> None:
    def stop(_: px.solve.Iteration) -> None:
        raise KeyboardInterrupt

    model = px.solve.LogisticRegression(C=1e6, verbose=stop)
    with pytest.raises(KeyboardInterrupt):
        model.fit(X, Y > 0)
    assert not {"coef_", "classes_"} & {*vars(model)}
