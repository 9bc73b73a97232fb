"""A function given as ``verbose`` is told of each iteration."""

import concurrent.futures
import subprocess
import sys
import threading
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
        model = px.solve.Ridge(verbose=lambda told: seen[name].append(told), devices=1)
        return model.fit(X[:-1], Y[:-1])  # of a size that no other test has compiled

    with compilations() as first:
        fit("one")
    with compilations() as second:
        model = fit("another")
    assert sum("jaxpr_as_fun" in name for name in first) == 2  # where it starts, and one for all iterations
    assert second == []
    assert [len(seen["one"]), len(seen["another"])] == [model.n_iter_] * 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", [1, 3])
def test_an_estimator_tells_once_whatever_the_devices(devices: int) -> None:
    seen: list[px.solve.Iteration] = []
    model = px.solve.Ridge(verbose=seen.append, devices=devices).fit(X, Y)
    jax.effects_barrier()
    assert sorted(one.iter_num for one in seen) == list(range(1, model.n_iter_ + 1))


class MineError(Exception):
    pass


def at(number: int, error: type[BaseException] = MineError) -> Any:
    def watch(seen: px.solve.Iteration) -> None:
        if seen.iter_num == number:
            raise error(f"in iteration {seen.iter_num}")

    return watch


def quartic(params: jax.Array, *_: Any) -> jax.Array:
    return jnp.sum((params - 1) ** 4 + params**2)


def stepped(watch: Any) -> None:
    solver = px.solve.LBFGS(quartic, verbose=watch)
    params, state = jnp.zeros(3), solver.init_state(jnp.zeros(3))
    for _ in range(3):
        params, state = solver.update(params, state)


def on_devices(watch: Any) -> None:
    data = px.solve.rows(X.astype("float32"), Y.astype("float32"))
    px.solve.GradientDescent(FUN, tol=0, maxiter=9, verbose=watch).run(jnp.zeros(3), 0.1, data)


def side_by_side(watch: Any) -> None:
    jax.vmap(px.solve.GradientDescent(quartic, verbose=watch).run)(jnp.zeros((2, 3)))


def in_a_thread(watch: Any) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(px.solve.GradientDescent(quartic, verbose=watch).run, jnp.zeros(3)).result()


RUNS: dict[str, Any] = {
    "NewtonCG": lambda watch: px.solve.NewtonCG(quartic, verbose=watch).run(jnp.zeros(3)),
    "ProximalGradient": lambda watch: px.solve.ProximalGradient(quartic, verbose=watch).run(jnp.zeros(3), None),
    "update": stepped,
    "eight devices": on_devices,
    "vmap": side_by_side,
    "a thread": in_a_thread,
    "Ridge": lambda watch: px.solve.Ridge(verbose=watch, tol=1e-12).fit(X, Y),
    "Lasso": lambda watch: px.solve.Lasso(alpha=1e-3, verbose=watch, tol=1e-12, devices=1).fit(X, Y),
    "folds": lambda watch: px.solve.cross_validate_path(px.solve.Ridge(verbose=watch, devices=1), X, Y, [1.0, 2.0]),
}


SLOW = ("folds", "update", "vmap", "NewtonCG", "Ridge")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in RUNS])
def test_what_it_raises_is_raised_by_the_run(name: str) -> None:
    number = 1 if name in ("Lasso", "folds", "Ridge") else 2
    with pytest.raises(MineError, match=f"in iteration {number}") as caught:
        RUNS[name](at(number))
    assert caught.traceback[-1].name == "watch"  # where it was raised
    RUNS[name](lambda seen: None)  # nothing of it is left


def test_to_raise_keyboard_interrupt_ends_a_run_with_what_was_found() -> None:
    seen: list[px.solve.Iteration] = []

    def enough(iteration: px.solve.Iteration) -> None:
        seen.append(iteration)
        if iteration.iter_num == 2:
            raise KeyboardInterrupt

    start = jnp.zeros(3)
    with pytest.raises(px.solve.Interrupted) as caught:
        px.solve.GradientDescent(quartic, tol=0, verbose=enough).run(start)
    assert int(caught.value.state.status) == px.solve.Status.INTERRUPTED
    assert quartic(caught.value.params) < quartic(start)
    assert [one.iter_num for one in seen] == [1, 2]
    with pytest.raises(px.solve.Interrupted) as of_fit:
        px.solve.Ridge(verbose=at(1, KeyboardInterrupt), tol=1e-12, devices=1).fit(X, Y)
    assert of_fit.value.estimator.coef_.shape == (3,)


def test_within_jit_it_is_shown_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", shown.append)
    _, state = jax.jit(px.solve.GradientDescent(quartic, tol=1e-3, verbose=at(2)).run)(jnp.zeros(3))
    jax.effects_barrier()
    assert int(state.status) == px.solve.Status.CONVERGED
    assert [(one.exc_type, str(one.exc_value)) for one in shown] == [(MineError, "in iteration 2")]


def test_what_arrives_after_the_end_of_a_run_is_still_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", shown.append)

    def ending(iteration: px.solve.Iteration) -> None:
        if iteration.iter_num >= 5:
            raise KeyboardInterrupt

    data = px.solve.rows(X, (Y > 0).astype(np.int32))

    def run(watch: Any, tol: float) -> None:
        objective = px.solve.objective.multiclass_logreg
        px.solve.LBFGS(objective, tol=tol, verbose=watch).run(jnp.zeros((3, 2)), data)

    run(lambda seen: None, 1e-3)  # an iteration's time is known: the next run is one program, not waited for
    for _ in range(4):
        with pytest.raises(px.solve.Interrupted):
            run(ending, 0.0)
        jax.effects_barrier()
    assert shown == []


COMPUTES = """
import faulthandler, sys
import jax.numpy as jnp, numpy as np
import paraxis as px

rng = np.random.default_rng(0)
X = rng.normal(size=(30, 3))
Y = X @ np.array([1.0, 2.0, 3.0]) + rng.normal(size=30)
rows = px.Axis("rows", 30)
seen = []

def total(number):
    return float(px.reduce_sum(px.map_fn(lambda x: x + number, jnp.ones(30), rows), rows))

def watch(one):
    faulthandler.dump_traceback_later(5, exit=True)  # it is compiled: it takes some milliseconds, or for ever
    seen.append((one.iter_num, total(one.iter_num)))
    faulthandler.cancel_dump_traceback_later()

total(1)
data, engine = (px.Table.of_arrays(X, Y),), px.Stream(at_once=2)
model = px.solve.Ridge(verbose=watch, tol=1e-12)
model.fit(X, Y) if sys.argv[1] == "in memory" else model.fit(*data, engine=engine)
assert seen == [(number, 30.0 + 30 * number) for number in range(1, model.n_iter_ + 1)], seen
print("computed", len(seen))
"""


@pytest.mark.parametrize("where", ["in memory", "on disk"])
def test_it_may_compute_on_the_devices_of_the_run(where: str) -> None:
    """Called from within the program, it would wait for devices that wait for it; so it is a process that waits."""
    command = [sys.executable, "-c", COMPUTES, where]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("computed ")
