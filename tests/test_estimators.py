"""The estimators compute what scikit-learn's do, in float64 to many digits, on any number of devices."""

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sklearn.linear_model as oracle
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.estimator_checks import parametrize_with_checks

import paraxis as px
from paraxis import solve
from tests._support import table

RNG = np.random.default_rng(0)
X = RNG.normal(size=(61, 4)) * [1.0, 3.0, 0.5, 2.0] + [0.0, 5.0, -1.0, 0.0]
SIGNAL = X @ np.array([1.0, -0.5, 2.0, 0.0])
WEIGHT = RNG.uniform(0.0, 2.0, 61)
WEIGHT[:5] = 0
Y = SIGNAL + RNG.normal(size=61)
TWO = np.where(np.median(Y) < Y, "yes", "no")
THREE = np.digitize(Y, np.quantile(Y, [0.3, 0.6])) * 10
COUNTS = RNG.poisson(np.exp(0.3 * SIGNAL - SIGNAL.mean() * 0.3)).astype(float)

PRECISE: dict[str, Any] = {"tol": 1e-12, "max_iter": 10_000}
NEWTON: dict[str, Any] = {"solver": "newton-cholesky", **PRECISE}

SAGA: dict[str, Any] = {"solver": "saga", "tol": 1e-13, "max_iter": 100_000}
FINE: dict[str, Any] = {"tol": 1e-10}


def pair(name: str, y: Any, theirs: Any, ours: Any = None, **options: Any) -> tuple[Any, Any, Any]:
    """Ours and the oracle with the same options, and some of each one's own; and targets."""
    return getattr(solve, name)(**options, **(ours or {})), getattr(oracle, name)(**options, **theirs), y


CASES: dict[str, tuple[Any, Any, Any]] = {
    "two classes": pair("LogisticRegression", TWO, NEWTON, C=2.0),
    "three classes": pair("LogisticRegression", THREE, NEWTON, FINE),
    "balanced": pair("LogisticRegression", THREE, NEWTON, FINE, class_weight="balanced"),
    "class weights": pair("LogisticRegression", TWO, NEWTON, class_weight={"yes": 3.0}),
    "no intercept": pair("LogisticRegression", THREE, NEWTON, FINE, fit_intercept=False),
    "no penalty": pair("LogisticRegression", TWO, NEWTON, C=np.inf),
    "sparse classes": pair("LogisticRegression", TWO, SAGA, FINE, C=0.1, l1_ratio=0.5),
    "ridge": pair("Ridge", Y, {}, alpha=3.0),
    "ridge, two targets": pair("Ridge", np.stack([Y, 100 * SIGNAL], 1), {}, alpha=3.0),
    "ridge, no intercept": pair("Ridge", Y, {}, alpha=0.1, fit_intercept=False),
    "counts": pair("PoissonRegressor", COUNTS, NEWTON, alpha=0.1),
    "counts, no intercept": pair("PoissonRegressor", COUNTS, NEWTON, alpha=0.1, fit_intercept=False),
    "gamma": pair("GammaRegressor", np.exp(Y / 3), NEWTON, alpha=0.1),
    "claims": pair("TweedieRegressor", COUNTS, NEWTON, power=1.5),
    "normal": pair("TweedieRegressor", Y, NEWTON, alpha=0.1),
    "lasso": pair("Lasso", Y, PRECISE, alpha=0.3),
    "elastic net": pair("ElasticNet", Y, PRECISE, alpha=0.3, l1_ratio=0.7),
    "elastic net, no intercept": pair("ElasticNet", 100 * Y, PRECISE, alpha=0.3, fit_intercept=False),
}


def new(estimator: Any, **options: Any) -> Any:
    copy: Any = clone(estimator)
    return copy.set_params(**options)


def on(devices: int, estimator: Any, **options: Any) -> Any:
    return new(estimator, devices=devices, **options)


def assert_same_fit(ours: Any, theirs: Any, tolerance: float) -> None:
    scale = max(1.0, np.abs(theirs.coef_).max())
    np.testing.assert_allclose(ours.coef_, theirs.coef_, rtol=0, atol=tolerance * scale)
    np.testing.assert_allclose(ours.intercept_, theirs.intercept_, rtol=0, atol=5 * tolerance * scale)
    assert np.shape(ours.intercept_) == np.shape(theirs.intercept_) or not ours.fit_intercept


@pytest.mark.parametrize(
    ("case", "weighted"),
    table(
        [
            ("two classes", False),
            ("sparse classes", False),
            ("ridge, two targets", False),
            ("counts, no intercept", True),
            ("elastic net", True),
        ],
        itertools.product(CASES, [False, True]),
    ),
)
def test_estimators_fit_what_scikit_learn_fits(case: str, weighted: bool) -> None:
    ours, theirs, y = CASES[case]
    weight = WEIGHT if weighted else None
    found, expected = on(1, ours).fit(X, y, weight), new(theirs).fit(X, y, weight)
    assert_same_fit(found, expected, 1e-6)
    np.testing.assert_allclose(found.score(X, y, WEIGHT), expected.score(X, y, WEIGHT), rtol=1e-7)
    assert found.coef_.dtype == np.float64
    for what in ("predict_proba", "predict_log_proba", "decision_function"):
        if hasattr(expected, what):
            np.testing.assert_allclose(getattr(found, what)(X), getattr(expected, what)(X), rtol=1e-4, atol=1e-6)
    if y.dtype.kind == "U":
        np.testing.assert_array_equal(found.predict(X), expected.predict(X))
    else:
        np.testing.assert_allclose(found.predict(X), expected.predict(X), rtol=1e-5, atol=1e-4)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("devices", [2, 3])
def test_estimators_give_one_answer_on_any_devices(case: str, devices: int) -> None:
    ours, _, y = CASES[case]
    assert_same_fit(on(devices, ours).fit(X, y, WEIGHT), on(1, ours).fit(X, y, WEIGHT), 1e-6)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", [case for case in CASES if "no intercept" not in case])  # nothing is centred there
def test_estimators_keep_float32_and_are_near(case: str) -> None:
    ours, theirs, y = CASES[case]
    found = on(1, ours).fit(X.astype("float32"), y, WEIGHT)
    assert found.coef_.dtype == np.float32
    assert found.predict(X.astype("float32")).dtype == (np.float32 if y.dtype.kind == "f" else y.dtype)
    assert_same_fit(found, new(theirs).fit(X, y, WEIGHT), 1e-3 if case == "no penalty" else 1e-4)


L1 = oracle.LogisticRegression(l1_ratio=1.0, solver="liblinear", fit_intercept=False, tol=1e-10, max_iter=100_000)
COSTS: dict[Any, Any] = {  # of predictions, targets and coefficients
    "LogisticRegression": lambda z, y, w: np.logaddexp(0, -(2 * y - 1) * z).sum() + np.abs(w).sum(),
    "ElasticNet": lambda z, y, w: ((z - y) ** 2).mean() / 2 + 0.3 * (0.7 * np.abs(w).sum() + 0.15 * w @ w),
    "Ridge": lambda z, y, w: ((z - y) ** 2).sum() + 3 * w @ w,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("columns", [slice(None), slice(1)], ids=["all columns", "one"])
@pytest.mark.parametrize(
    ("ours", "theirs", "y"),
    [
        (solve.LogisticRegression(l1_ratio=1.0, fit_intercept=False), L1, TWO == "yes"),
        (solve.ElasticNet(0.3, l1_ratio=0.7), CASES["elastic net"][1], Y),
        (solve.Ridge(3.0), oracle.Ridge(3.0), Y),
    ],
)
def test_estimators_take_columns_in_any_units(ours: Any, theirs: Any, y: Any, columns: slice, dtype: Any) -> None:
    for power in (-6, -3, 2, 3, 6):
        rows = X.copy()
        rows[:, columns] *= 10.0**power
        rows = rows.astype(dtype).astype(float)
        with warnings.catch_warnings(action="error"):
            found = on(1, ours).fit(rows.astype(dtype), y)
        with warnings.catch_warnings(action="ignore"):
            expected = new(theirs).fit(rows, y)
        weights = [model.coef_.ravel().astype(float) for model in (found, expected)]
        values = [rows @ w + model.intercept_ for w, model in zip(weights, (found, expected), strict=True)]
        costs = [COSTS[type(ours).__name__](z, y, w) for z, w in zip(values, weights, strict=True)]
        np.testing.assert_allclose(*costs, rtol=1e-3, err_msg=f"columns times 1e{power}")
        np.testing.assert_allclose(*values, rtol=1e-2, atol=1e-2 * np.abs(values[1]).max())


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("fit_intercept", [True, False])
def test_least_squares_that_are_not_determined_have_the_least_norm(dtype: Any, fit_intercept: bool) -> None:
    wide = np.random.default_rng(1).normal(size=(20, 50))
    units = np.concatenate([X, np.random.default_rng(2).normal(size=(61, 3)), 1e-3 * X[:, :2].sum(1, keepdims=True)], 1)
    constant = np.concatenate([X, np.full((61, 1), 5.3), np.zeros((61, 3))], 1)  # all but the first have one shape
    for rows in (wide, units, constant, np.concatenate([X, X], 1)):
        y = Y[: len(rows)].astype(dtype)
        model = solve.Ridge(alpha=0.0, fit_intercept=fit_intercept, devices=1).fit(rows.astype(dtype), y)
        centred, y = (x - x.mean(0) * fit_intercept for x in (rows.astype(dtype).astype(float), y.astype(float)))
        expected = np.linalg.lstsq(centred, y, rcond=1e-6)[0]
        np.testing.assert_allclose(model.coef_, expected, rtol=0, atol=1e-11 if dtype is np.float64 else 1e-4)


def test_ridge_without_an_intercept_ends_soon_on_columns_far_from_zero() -> None:
    model = solve.Ridge(fit_intercept=False, devices=1).fit(X + 1e5, Y)
    expected = oracle.Ridge(fit_intercept=False).fit(X + 1e5, Y)
    np.testing.assert_allclose(model.predict(X + 1e5), expected.predict(X + 1e5), rtol=1e-4, atol=1e-4)
    assert model.data_passes_ <= 100


@pytest.mark.parametrize(("dtype", "powers"), [(np.float32, (-36, -25, 20, 36)), (np.float64, (-300, -165, 200, 300))])
def test_estimators_take_targets_as_large_or_small_as_their_dtype_allows(dtype: Any, powers: tuple[int, ...]) -> None:
    expected = oracle.Ridge().fit(X, Y).coef_
    for power in powers:
        fitted = solve.Ridge().fit(X.astype(dtype), (Y * 10.0**power).astype(dtype))
        np.testing.assert_allclose(np.asarray(fitted.coef_, np.float64) / 10.0**power, expected, rtol=1e-4, atol=1e-5)


POWERS = {"counts": 1, "claims": 1.5, "gamma": 2, "ridge": 0, "lasso": 0, "normal": 0}  # of the variance


@pytest.mark.parametrize(
    ("case", "in_table"),
    table([("counts", True), ("gamma", False), ("lasso", True)], itertools.product(POWERS, [False, True])),
)
def test_an_offset_is_what_weights_and_rates_are_to_the_oracle(case: str, in_table: bool) -> None:
    (ours, theirs, y), power, offset = CASES[case], POWERS[case], np.random.default_rng(2).uniform(-1, 1, 61)
    weight, total = (np.exp((2 - power) * offset), y * np.exp(offset)) if power else (np.ones(61), y + offset)
    given = (px.Table.of_arrays(X, total),) if in_table else (X, total)
    found = on(2, ours).fit(*given, offset=offset, engine=px.Stream(at_once=16) if in_table else None)
    assert_same_fit(found, new(theirs, alpha=theirs.alpha * 61 / weight.sum()).fit(X, y, weight), 1e-6)


def test_estimators_begin_a_warm_start_at_the_end() -> None:
    for case in ("two classes", "ridge, two targets", "elastic net"):  # which the fits above have compiled
        ours, _, y = CASES[case]
        model = on(1, ours, warm_start=True).fit(X, y, WEIGHT)
        coef, first = model.coef_, np.max(model.n_iter_)
        model.fit(X, y, WEIGHT)
        assert np.max(model.n_iter_) <= first / 2, case
        np.testing.assert_allclose(model.coef_, coef, rtol=0, atol=1e-7)
    assert not np.any(model.set_params(fit_intercept=False).fit(X, y, WEIGHT).intercept_)
    exact = oracle.Lasso(0.3, fit_intercept=False, **PRECISE).fit(X, Y)
    model = solve.Lasso(0.3, fit_intercept=False, warm_start=True, devices=2, max_iter=1)
    model.coef_ = exact.coef_
    assert_same_fit(model.fit(X, Y), exact, 1e-6)


NAMES = "LogisticRegression", "Ridge", "LinearRegression", "PoissonRegressor", "Lasso", "ElasticNet"
# On one device: what the suite asks for does not depend on the number, and each of its shapes is compiled.
CHECKED = [solve.LogisticRegression(l1_ratio=0.5, devices=1), *(getattr(solve, name)(devices=1) for name in NAMES)]


@pytest.mark.slow
@parametrize_with_checks(CHECKED)
def test_estimators_pass_scikit_learn_s_checks(estimator: Any, check: Callable[[Any], None]) -> None:
    check(estimator)


@pytest.mark.slow
def test_estimators_say_that_a_fit_was_cut_short() -> None:
    with pytest.warns(ConvergenceWarning, match=r"LogisticRegression after 3 iterations.*limit of iterations.*=6\)"):
        model = solve.LogisticRegression(max_iter=3, devices=1).fit(X, THREE)
    assert model.status_ == solve.Status.ITERATION_LIMIT.words


@pytest.mark.parametrize(
    ("estimator", "y", "weight", "match"),
    [
        (solve.LogisticRegression(), TWO, (TWO == "yes") * 1.0, r"got one class, \['yes'\], in rows of positive"),
        (solve.Ridge(), np.ma.masked_less(Y, 0), None, "Ridge: y is a MaskedArray, which leaves entries out"),
        (solve.LogisticRegression(C=-1.0), TWO, None, "LogisticRegression: C must be a number above 0, got -1.0"),
        (solve.LogisticRegression(devices=9), TWO, None, "devices must be from 1 to 8, as many as there are, got 9"),
        (solve.PoissonRegressor(), Y, None, "y must hold a number above 0 in a row of positive weight, and none"),
        (solve.GammaRegressor(), COUNTS, None, "y must be positive numbers; got 0.0"),
        (solve.TweedieRegressor(power=0.5), COUNTS, None, "power must be a number of at least 1, got 0.5"),
    ],
)
def test_estimators_name_the_culprit_of_an_error(estimator: Any, y: Any, weight: Any, match: str) -> None:
    with pytest.raises((ValueError, px.DeviceError), match=match):
        estimator.fit(X, y, weight)
