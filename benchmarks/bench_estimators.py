"""Estimators beside their own solvers: what ``fit`` costs that the solver's ``run`` does not.

``run`` is the solver with the estimator's data laid out before, to the estimator's own tolerance; ``rows and run`` lays
them out as well, as ``fit`` must. All are compiled before, and take turns; ratios are of medians. An estimator also
checks its input and describes what was found.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import make_classification

import paraxis as px
from paraxis.solve import objective

ROWS, FEATURES, CLASSES = 50_000, 784, 10


@dataclasses.dataclass(frozen=True)
class Work:
    """An estimator and the same problem for its solver: ``fun``, parameters to begin with, strength, data."""

    name: str
    estimator: Any
    fun: Any
    params: Any
    strength: float
    X: np.ndarray
    y: np.ndarray


def works(devices: int) -> list[Work]:
    X, y = make_classification(ROWS, FEATURES, n_classes=CLASSES, n_informative=50, random_state=0)
    X, y = np.asarray(X, np.float32), np.asarray(y, np.int32)
    target = (X @ np.random.default_rng(0).standard_normal(FEATURES) / 28).astype(np.float32) + y
    logistic = {"C": 1.0, "fit_intercept": False, "devices": devices}
    start = jnp.zeros((FEATURES, CLASSES))
    return [
        Work(
            f"LogisticRegression, {ROWS:,} × {FEATURES} × {CLASSES}, tol=1e-3",
            px.solve.LogisticRegression(tol=1e-3, **logistic),
            objective.l2_multiclass_logreg,
            start,
            1 / ROWS,
            X,
            y,
        ),
        Work(
            f"LogisticRegression, {ROWS:,} × {FEATURES} × {CLASSES}, tol=1e-6",
            px.solve.LogisticRegression(tol=1e-6, **logistic),
            objective.l2_multiclass_logreg,
            start,
            1 / ROWS,
            X,
            y,
        ),
        Work(
            f"Ridge, {ROWS:,} × {FEATURES}, tol=1e-5",
            px.solve.Ridge(alpha=1.0, fit_intercept=False, tol=1e-5, devices=devices),
            objective.ridge,
            jnp.zeros(FEATURES),
            1 / ROWS,
            X,
            target,
        ),
    ]


def run(devices: int, repeats: int) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("rows",))
    axis = px.Axis("rows", ROWS, mesh=mesh)
    for work in works(devices):
        data = px.solve.rows(work.X, work.y, axis=axis)
        tol = work.estimator.tol
        solver = px.solve.LBFGS(work.fun, tol=tol, maxiter=1000)
        steps: dict[str, Any] = {}

        def fit(work: Work = work, steps: dict[str, Any] = steps) -> None:
            steps["fit"] = int(np.max(work.estimator.fit(work.X, work.y).n_iter_))

        def solve(data: Any = data, work: Work = work, solver: Any = solver, steps: dict[str, Any] = steps) -> None:
            found = jax.block_until_ready(solver.run(work.params, work.strength, data))
            steps["run"] = int(found.state.iter_num)

        def laid_out(work: Work = work, solve: Callable[..., None] = solve) -> None:
            solve(px.solve.rows(work.X, work.y, axis=axis))

        rivals = {"run": solve, "rows and run": laid_out, "fit": fit}
        times: dict[str, list[float]] = {name: [] for name in rivals}
        for rival in rivals.values():
            rival()
        for _ in range(repeats):
            for name, rival in rivals.items():
                begin = time.perf_counter()
                rival()
                times[name].append(time.perf_counter() - begin)
        took = {name: statistics.median(values) for name, values in times.items()}
        print(f"\n{work.name}, {devices} device{'s' * (devices > 1)}")
        print(f"{'':16}{'iterations':>12}{'s':>8}{'of run':>8}{'of both':>9}")
        for name, seconds in took.items():
            count = steps["fit" if name == "fit" else "run"]
            print(
                f"  {name:14}{count:12d}{seconds:8.2f}{seconds / took['run']:8.2f}{seconds / took['rows and run']:9.2f}"
            )


if __name__ == "__main__":
    harness.main(run, __doc__, devices=(1, 2))
