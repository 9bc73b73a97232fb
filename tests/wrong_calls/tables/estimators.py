"""Calls of the estimators."""

import functools
from typing import Any

import numpy as np

import paraxis as px
from tests.wrong_calls._calls import Call
from tests.wrong_calls._values import (
    Kind,
    array,
    count,
    either,
    flag,
    function,
    instance,
    none,
    number,
    one_of,
    optional,
)

solve = px.solve
X = np.array([[0.0], [1.0], [2.0]])
Y = {"LogisticRegression": np.array([0, 1, 1])}
MANY = np.linspace(-1, 1, 8)[:, None]
positive = number(above=0)


def y_of(name: str) -> np.ndarray:
    return Y.get(name, np.array([1.0, 2.0, 4.0]))


def finite(kind: Kind) -> Kind:
    return lambda v: kind(v) and bool(np.all(np.isfinite(np.asarray(v, float))))


def not_negative(v: Any) -> bool:
    return bool(np.all(np.asarray(v) >= 0))


def weights(v: Any) -> bool:
    """One for each row, or one for all."""
    one = number(above=0, most=1e30)(v) or v is True
    return one or (finite(array(3, dtypes="biuf"))(v) and not_negative(v) and bool(np.any(np.asarray(v) > 0)))


STRENGTH = {"LogisticRegression": ("C", positive)}
SHARED = {
    "fit_intercept": (True, flag),
    "tol": (1e-3, positive),
    "max_iter": (100, count()),
    "warm_start": (False, flag),
    "devices": (1, optional(count(1, 8))),
    "solver": ("auto", one_of("auto", "lbfgs", "newton-cg", "working-set", "proximal-gradient")),
    "verbose": (0, either(flag, count(0), function)),
}
OWN = {
    "LogisticRegression": {
        "l1_ratio": (0.0, number(0, 1)),
        "class_weight": (None, either(one_of(None, "balanced"), lambda v: isinstance(v, dict) and not v)),
    },
    "ElasticNet": {"l1_ratio": (0.5, number(0, 1))},
}
NAMES = ["ElasticNet", "Lasso", "LogisticRegression", "PoissonRegressor", "Ridge"]


def estimator(name: str, **options: Any) -> Any:
    return getattr(solve, name)(**{"tol": 1e-3, "max_iter": 100, "devices": 1, **options})


@functools.cache
def fitted(name: str) -> Any:
    return estimator(name).fit(X, y_of(name))


def options_of(name: str) -> Any:
    strength, kind = STRENGTH.get(name, ("alpha", number(0, 1e300)))
    return {strength: (1.0, kind), **OWN.get(name, {}), **SHARED}


def data(name: str) -> Any:
    labels = array(3, dtypes="biufU") if name == "LogisticRegression" else finite(array(3, dtypes="biuf"))
    return {"X": (X, finite(array(3, None, dtypes="biuf"))), "y": (y_of(name), labels)}


FIT = {name: {**data(name), "sample_weight": (np.ones(3), optional(weights))} for name in NAMES}
GRID = finite(array(None, dtypes="iuf"))
ROWS = finite(array(None, 1, dtypes="biuf"))
PREDICTIONS = ["decision_function", "predict", "predict_log_proba", "predict_proba"]
CALLS = [
    *(
        Call(
            f"solve.{name}",
            getattr(solve, name),
            functools.partial(options_of, name),
            lambda made, name=name: made.fit(X, y_of(name)),
        )
        for name in NAMES
    ),
    *(
        Call(f"{name}.fit", lambda *a, name=name, **k: estimator(name).fit(*a, **k), lambda name=name: FIT[name])
        for name in NAMES
    ),
    *(
        Call(
            f"{name}.path",
            lambda *a, name=name, **k: estimator(name).path(*a, **k),
            lambda name=name: {
                **FIT[name],
                "strengths": ([0.1, 1.0], lambda v: GRID(v) and not_negative(v) and len(v) > 0),
            },
        )
        for name in ["LogisticRegression", "Ridge"]
    ),
    *(
        Call(
            f"LogisticRegression.{name}",
            lambda X, name=name: getattr(fitted("LogisticRegression"), name)(X),
            lambda: {"X": (X, ROWS)},
        )
        for name in PREDICTIONS
    ),
    *(
        Call(
            f"{name}.predict",
            lambda X, name=name: fitted(name).predict(X),
            lambda: {"X": (X, ROWS)},
        )
        for name in ["Ridge", "PoissonRegressor"]
    ),
    *(
        Call(f"{name}.score", lambda *a, name=name, **k: fitted(name).score(*a, **k), lambda name=name: FIT[name])
        for name in ["LogisticRegression", "PoissonRegressor", "Ridge"]
    ),
    Call(
        "solve.cross_validate_path",
        solve.cross_validate_path,
        lambda: {
            "estimator": (estimator("Lasso", solver="proximal-gradient"), instance(solve.Lasso)),  # compiled soonest
            "X": (MANY, none),
            "y": (MANY[:, 0], none),
            "grid": ([0.1, 1.0], lambda v: GRID(v) and not_negative(v) and len(v) > 0),
            "folds": (2, count(2, 8)),
            "sample_weight": (np.ones(8), optional(number(above=0, most=1e30))),
        },
    ),
]
