"""Ctrl-C ends a run soon, with what was found until then; the parts that a run is made of for it change no bit."""

import os
import signal
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from paraxis.solve import Status
from tests.solve._problems import labelled

SOLVERS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "LBFGS": (px.solve.LBFGS, ()),
    "ProximalGradient": (px.solve.ProximalGradient, (None,)),
}


def _slow_bowl(p: jax.Array) -> tuple[jax.Array, jax.Array]:
    def sleep(x: np.ndarray) -> np.ndarray:
        time.sleep(0.01)
        return np.zeros_like(x)

    value = jnp.sum(p**2)
    return value + jax.pure_callback(sleep, value, value), 2 * p


@pytest.mark.parametrize("name", SOLVERS)
def test_ctrl_c_ends_a_run_within_two_seconds_with_what_was_found(name: str) -> None:
    solver, hyperparams = SOLVERS[name]
    told, sent = [], []

    def send() -> None:
        sent.append(told[-1])
        os.kill(os.getpid(), signal.SIGINT)

    def watch(one: px.solve.Iteration) -> None:
        told.append(one.iter_num)
        if one.iter_num == 20:
            threading.Timer(0.1, send).start()

    slow = solver(_slow_bowl, value_and_grad=True, stepsize=1e-6, tol=0, maxiter=2_000, verbose=watch)
    with pytest.raises(px.solve.Interrupted, match=r"stopped\.params") as caught:
        slow.run(jnp.ones(3), *hyperparams)
    params, state = caught.value.params, caught.value.state
    assert int(state.iter_num) - sent[0] < 200  # which sleep for two seconds; on a loaded machine they take longer
    assert int(state.status) == Status.INTERRUPTED
    assert "Ctrl-C" in state.reason
    assert 20 <= int(state.iter_num) < 2_000
    assert 0 < float(params[0]) < 1  # it has moved
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.slow
def test_the_parts_of_a_run_change_no_bit() -> None:
    x, y = labelled(60, 4, 3)
    data = px.solve.rows(x.astype("float32"), y)
    solver = px.solve.LBFGS(px.solve.objective.l2_multiclass_logreg, tol=1e-6)
    start = data.shared(jnp.zeros((4, 3)))
    first, second = (solver.run(start, 0.01, data) for _ in range(2))  # the first is timed, in parts of an iteration
    assert int(first.state.iter_num) > 4
    jax.tree.map(np.testing.assert_array_equal, first, second)
    elsewhere = []
    thread = threading.Thread(target=lambda: elsewhere.append(solver.run(start, 0.01, data)))  # in one part
    thread.start()
    thread.join()
    jax.tree.map(np.testing.assert_array_equal, first, elsewhere[0])


def test_a_handler_of_the_users_is_called_and_the_run_goes_on() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        solver = px.solve.LBFGS(
            lambda p: jnp.sum((p - 1) ** 4), verbose=lambda one: os.kill(os.getpid(), signal.SIGINT), tol=1e-3
        )
        state = solver.run(jnp.zeros(3)).state
        jax.effects_barrier()
        assert int(state.status) == Status.CONVERGED
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen


@pytest.mark.slow
def test_an_estimator_that_was_interrupted_is_as_it_was_and_gives_a_fitted_copy() -> None:
    x, y = labelled(60, 4, 3)
    model = px.solve.LogisticRegression(
        C=1e6, verbose=lambda one: os.kill(os.getpid(), signal.SIGINT) if one.iter_num == 2 else None
    )
    with pytest.raises(px.solve.Interrupted) as caught:
        model.fit(x, y)
    assert not hasattr(model, "coef_")
    copy = caught.value.estimator
    assert copy.predict(x).shape == (60,)
    assert copy.score(x, y) > 0.5
    assert copy.status_ in (Status.INTERRUPTED.words, Status.CONVERGED.words)


def _interrupting(at: int) -> Any:
    """Ctrl-C, once a run has made so many iterations."""
    return lambda one: os.kill(os.getpid(), signal.SIGINT) if one.iter_num == at else None


def _interrupted(call: Any) -> Any:
    with pytest.raises(px.solve.Interrupted) as caught:
        call()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert caught.value.state is not None
    return caught.value


def _wide() -> tuple[np.ndarray, np.ndarray]:
    """More columns than a working set begins with, so that there are several."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 400))
    return x, x[:, :40] @ rng.normal(size=40) + 3 + rng.normal(size=200)


def test_by_working_sets_too() -> None:
    x, y = _wide()
    model = px.solve.Lasso(alpha=1e-3, devices=1, verbose=_interrupting(1))
    copy = _interrupted(lambda: model.fit(x, y)).estimator
    assert not hasattr(model, "coef_")
    assert copy.status_ == Status.INTERRUPTED.words
    assert copy.n_iter_ == 1
    assert copy.score(x, y) > 0.5


def test_of_a_path_what_was_found_is_told_in_the_order_of_the_grid() -> None:
    x, y = _wide()
    seen: list[int] = []

    def watch(one: px.solve.Iteration) -> None:
        seen.append(one.iter_num)
        if seen.count(1) == 2:  # in the second run
            os.kill(os.getpid(), signal.SIGINT)
            seen.clear()

    model = px.solve.Lasso(alpha=7.0, devices=1, verbose=watch)
    stopped = _interrupted(lambda: model.path(x, y, [1e-3, 0.5, 1e-4]))
    np.testing.assert_array_equal(stopped.found.strengths, [1e-3, 0.5])
    assert stopped.found.status == [Status.INTERRUPTED.words, Status.CONVERGED.words]
    np.testing.assert_array_equal(stopped.found.coef[0], stopped.estimator.coef_)
    assert stopped.estimator.alpha == 1e-3
    assert model.alpha == 7.0
    assert not hasattr(model, "coef_")


@pytest.mark.slow
@pytest.mark.parametrize("begun", [1, 2])
def test_of_a_cross_validation_the_strengths_that_were_scored_and_a_model_are_told(begun: int) -> None:
    x, y = labelled(60, 4, 3)
    runs, is_sent = 0, False

    def watch(one: px.solve.Iteration) -> None:
        nonlocal runs, is_sent
        runs += one.iter_num == 1
        if runs > 3 * (begun - 1) and one.iter_num == 2 and not is_sent:  # of a strength, one per fold
            is_sent = True  # a second one would end this process
            os.kill(os.getpid(), signal.SIGINT)

    model = px.solve.LogisticRegression(devices=2, verbose=watch)
    stopped = _interrupted(lambda: px.solve.cross_validate_path(model, x, y, [10.0, 0.1], folds=3))
    assert stopped.found.scores.shape == (begun - 1, 3)
    np.testing.assert_array_equal(stopped.found.strengths, [0.1][: begun - 1])
    assert stopped.found.best == 0.1
    assert stopped.estimator.C == 0.1
    assert stopped.estimator is stopped.found.estimator
    assert stopped.estimator.score(x, y) > 0.5
