"""Least squares with an L1 penalty ends where no coefficient can move, whatever the columns are like."""

import itertools
from typing import Any

import numpy as np
import pytest
from sklearn import linear_model as oracle

import paraxis as px


def _columns(rng: np.random.Generator, kind: str, n: int, d: int) -> np.ndarray:
    X = rng.standard_normal((n, d))
    if kind == "correlated":
        X = 0.1 * X + rng.standard_normal((n, 3)) @ rng.standard_normal((3, d))
    elif kind == "duplicated":
        X[:, d // 2 :] = X[:, : d - d // 2]
    elif kind == "degenerate":
        X[:, ::3], X[:, 1::3] = 0, 5
    elif kind == "scaled":
        X *= np.logspace(-3, 3, d)
    return X


def _violation(model: Any, X: np.ndarray, y: np.ndarray, weight: np.ndarray, l1: float, l2: float) -> float:
    """How far a fit is from the conditions of a minimum, relative to the penalty."""
    w, share = model.coef_.astype(float), weight / weight.sum()
    residual = y - X @ w - float(model.intercept_)
    slope = X.T @ (share * residual) - l2 * w
    free = np.where(w != 0, np.abs(slope - l1 * np.sign(w)), np.maximum(np.abs(slope) - l1, 0))
    return max(free.max(), abs(share @ residual)) / l1


_KINDS = "plain", "correlated", "duplicated", "degenerate", "scaled"


@pytest.mark.parametrize(
    ("num_columns", "kinds", "parts"),
    [
        (400, ("duplicated", "scaled"), (0.03,)),
        *(pytest.param(num, _KINDS, (0.3, 0.03, 3e-3), marks=pytest.mark.slow) for num in (40, 400)),
    ],
)
def test_no_coefficient_can_move(num_columns: int, kinds: tuple[str, ...], parts: tuple[float, ...]) -> None:
    rng = np.random.default_rng(11)
    n, d = 100, num_columns
    for kind, part, ratio in itertools.product(kinds, parts, (1.0, 0.5)):
        X = _columns(rng, kind, n, d)
        y = 3 + X[:, :5] @ np.arange(1.0, 6) / np.abs(X).max() + rng.standard_normal(n)
        weight = rng.integers(0, 3, n) * 1.0
        share = weight / weight.sum()
        alpha = part * np.abs((X - share @ X).T @ (share * (y - share @ y))).max() / ratio
        model = px.solve.ElasticNet(alpha, l1_ratio=ratio, devices=2, tol=1e-14).fit(X, y, weight)
        violation = _violation(model, X, y, weight, alpha * ratio, alpha * (1 - ratio))
        assert violation < 1e-5, (kind, part, ratio, violation, model.status_)


@pytest.mark.slow
def test_the_number_of_devices_and_the_solver_change_nothing() -> None:
    rng = np.random.default_rng(11)
    X = _columns(rng, "correlated", 100, 40)
    y = X[:, 0] + rng.standard_normal(100)
    one, three = px.solve.Lasso(0.05, devices=1, tol=1e-9), px.solve.Lasso(0.05, devices=3, tol=1e-9)
    other = px.solve.Lasso(0.05, devices=1, solver="proximal-gradient", tol=1e-9)
    fits = [model.fit(X, y) for model in (one, three, other)]
    expected = oracle.Lasso(0.05, tol=1e-14, max_iter=10**6).fit(X, y)
    for fit, atol in zip(fits, (1e-7, 1e-7, 1e-6), strict=True):  # of the last, rounding may leave no more
        np.testing.assert_allclose(fit.coef_, expected.coef_, rtol=0, atol=atol)
        np.testing.assert_allclose(fit.intercept_, expected.intercept_, rtol=0, atol=atol)
    assert fits[0].data_passes_ < fits[2].data_passes_


@pytest.mark.slow
def test_the_bound_of_the_error_is_kept() -> None:
    """The error is a duality gap: no further above the minimum than tol, in units of the targets' variance."""
    rng = np.random.default_rng(11)
    X = _columns(rng, "correlated", 100, 40)
    y = X @ rng.standard_normal(40) + rng.standard_normal(100)
    y = (y - y.mean()) / y.std()

    def value(w: np.ndarray) -> float:
        return float(0.5 * np.mean((y - X @ w) ** 2) + 0.01 * np.abs(w).sum())

    least = value(oracle.Lasso(0.01, fit_intercept=False, tol=1e-15, max_iter=10**6).fit(X, y).coef_)
    for tol in (1e-2, 1e-5, 1e-8):
        model = px.solve.Lasso(0.01, fit_intercept=False, devices=1, tol=tol).fit(X, y)
        assert model.status_ == px.solve.Status.CONVERGED.words
        assert value(model.coef_) - least < tol


@pytest.mark.slow
def test_nothing_is_chosen_above_the_largest_strength_and_zero_strength_is_least_squares() -> None:
    rng = np.random.default_rng(11)
    X = _columns(rng, "plain", 100, 40)
    y = X[:, 0] + 0.1 * rng.standard_normal(100)
    largest = np.abs((X - X.mean(0)).T @ (y - y.mean())).max() / 100
    path = px.solve.Lasso(devices=1).path(X, y, [1.001 * largest, 0.999 * largest, 0.0])
    assert [int((coef != 0).sum()) for coef in path.coef] == [0, 1, 40]
    np.testing.assert_allclose(path.coef[2], oracle.LinearRegression().fit(X, y).coef_, atol=1e-8)


@pytest.mark.slow
def test_float32_ends_when_it_can_do_no_more_without_a_warning() -> None:
    rng = np.random.default_rng(11)
    X = _columns(rng, "correlated", 100, 40).astype(np.float32)
    y = X[:, 0] + rng.standard_normal(100).astype(np.float32)
    expected = oracle.Lasso(0.02, tol=1e-14, max_iter=10**6).fit(X.astype(float), y.astype(float))
    found = px.solve.Lasso(0.02, devices=1).fit(X, y)
    assert found.coef_.dtype == np.float32
    assert found.n_iter_ < 20
    np.testing.assert_allclose(found.predict(X), expected.predict(X.astype(float)), atol=1e-4)


@pytest.mark.parametrize("part", [0.1, 0.003])
def test_a_working_set_of_many_columns_of_which_few_are_not_zero(part: float) -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(300, 1500))
    X[:, 1:] += 0.5 * X[:, :-1]
    X -= X.mean(0)
    y = X @ (rng.normal(size=1500) * (rng.uniform(size=1500) < 0.05)) + 3 * rng.normal(size=300)
    y -= y.mean()
    alpha = part * np.abs(X.T @ y).max() / len(X)
    theirs = oracle.Lasso(alpha, tol=1e-9, max_iter=100_000).fit(X, y)
    ours = px.solve.Lasso(alpha, tol=1e-9, devices=2).fit(X, y)

    def whole(w: np.ndarray) -> float:
        return float(np.mean((X @ w - y) ** 2) / 2 + alpha * np.abs(w).sum())

    assert whole(ours.coef_) <= whole(theirs.coef_) + 1e-9 * np.var(y)
    np.testing.assert_allclose(X @ ours.coef_, X @ theirs.coef_, atol=1e-4 * y.std())
    assert ours.n_iter_ <= 15  # with steps of Newton's that lead nowhere, it takes 39 sets
