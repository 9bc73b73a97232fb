"""Lasso: time to a duality gap, beside scikit-learn's coordinate descent.

Both stop by the same gap, relative to the targets' mean square, 1e-4, scikit-learn's own. Timed is a fit, from arrays
of NumPy to coefficients. Columns are correlated, a twentieth of them are in the truth, and the noise is a third of the
signal. Rivals take turns, and the least of many turns counts: what others do on the machine makes no turn shorter. On
one device, epochs are scikit-learn's; on more, there is a Gram matrix, or, of 5,000 columns, there are proximal steps.
"""

import time
import warnings
from typing import Any

import harness
import numpy as np
import sklearn.linear_model

import paraxis as px

SHAPES = (400, 200), (30_000, 200), (2_000, 5_000)
PARTS = 0.1, 0.01, 0.001  # of the strength at which the first coefficient is not zero
GAP, SECONDS = 1e-4, 8  # for all turns of a case


def run(devices: int, repeats: int) -> harness.Tables:
    tables: harness.Tables = {}
    for num_rows, num_columns in SHAPES:
        for dtype in (np.float64, np.float32):
            X, y = (x.astype(dtype) for x in draw(num_rows, num_columns))
            tables[f"{num_rows:,} × {num_columns:,}, {np.dtype(dtype).name}"] = {
                f"alpha / largest = {part:g}": compare(X, y, part, devices, repeats) for part in PARTS
            }
    return tables


def draw(num_rows: int, num_columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Columns correlated with their neighbours, centred, and targets of variance 1."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((num_rows, num_columns))
    for column in range(1, num_columns):
        X[:, column] = 0.5 * X[:, column - 1] + 0.75**0.5 * X[:, column]
    truth = np.zeros(num_columns)
    truth[rng.choice(num_columns, num_columns // 20, replace=False)] = rng.standard_normal(num_columns // 20)
    y = X @ truth
    y += 0.3 * y.std() * rng.standard_normal(num_rows)
    return X - X.mean(0), (y - y.mean()) / y.std()


def compare(X: np.ndarray, y: np.ndarray, part: float, devices: int, repeats: int) -> dict[str, Any]:
    alpha = float(part * np.abs(X.T @ y).max() / len(X))
    ours = px.solve.Lasso(alpha, tol=GAP, devices=devices)
    theirs = sklearn.linear_model.Lasso(alpha, tol=GAP, max_iter=3000)
    rivals = [lambda: ours.fit(X, y), lambda: theirs.fit(X, y)]
    times: list[list[float]] = [[] for _ in rivals]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rivals[0]()
        start = time.perf_counter()
        for turn in range(3 * repeats):
            for index in np.random.default_rng(turn).permutation(len(rivals)):
                begin = time.perf_counter()
                rivals[index]()
                times[index].append(time.perf_counter() - begin)
            if time.perf_counter() - start > SECONDS:
                break
    mine, other = (1e3 * min(taken) for taken in times)
    used = int(np.count_nonzero(ours.coef_))
    return {"not zero": used, "ms": mine, "scikit-learn, ms": other, "theirs / ours": other / mine}


if __name__ == "__main__":
    harness.main(run, __doc__, devices=(1, 2))
