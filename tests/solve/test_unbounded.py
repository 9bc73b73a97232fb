"""A fit without a penalty that has no finite solution says so: a linear program is the judge of that.

Four columns and at most 64 rows, as in ``test_estimators.py``: fits of the same kind are then one program.
"""

import itertools
import warnings

import numpy as np
import pytest
from scipy.optimize import linprog
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import Ridge

import paraxis as px

WORDS = px.solve.Status.UNBOUNDED.words


def separates(X: np.ndarray, signs: np.ndarray, pinned: np.ndarray) -> bool:
    """Whether some direction leaves pinned rows as they are and moves others, but none against its sign."""
    A = np.column_stack([X, np.ones(len(X))])
    moved = signs[:, None] * A
    found = linprog(
        -moved[~pinned].sum(0) if (~pinned).any() else np.zeros(A.shape[1]),
        A_ub=-moved[~pinned] if (~pinned).any() else None,
        b_ub=np.zeros(int((~pinned).sum())) if (~pinned).any() else None,
        A_eq=A[pinned] if pinned.any() else None,
        b_eq=np.zeros(int(pinned.sum())) if pinned.any() else None,
        bounds=(-1, 1),
    )
    return bool(-found.fun > 1e-6)


def classes(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Some can be told apart, some but for ties, some not; with columns on other scales, and rows far off."""
    rng = np.random.default_rng(seed)
    X = np.column_stack([rng.normal(size=(40, 2)), rng.integers(0, 2, 40), rng.normal(size=40)])
    noise = [0.0, 1.0, 1.0, 3.0][seed % 4]
    y = X[:, 0] - X[:, 1] + noise * rng.normal(size=40) > 0
    if seed % 4 == 1:
        y |= X[:, 2] > 0  # an indicator of rows that are all of one class
    if seed % 8 >= 4:
        X = X * [1e3, 1e-2, 1, 1] + [50, 0, -3, 0]
    if seed % 3 == 0:
        X[0, :2] *= 30
    return X, y


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(60))
def test_classes_that_can_be_told_apart_have_no_finite_solution(seed: int) -> None:
    X, y = classes(seed)
    model = px.solve.LogisticRegression(C=np.inf, devices=1)
    expected = separates(X, np.where(y, 1, -1), np.zeros(len(y), bool))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model.fit(X, y)
    assert (model.status_ == WORDS) == expected
    told = [str(one.message) for one in warned if issubclass(one.category, ConvergenceWarning)]
    assert any(f"{WORDS}; write LogisticRegression(C=1.0)" in text for text in told) == expected
    weight = np.ones(len(y))
    weight[:3] = 0  # rows that do not count say nothing
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(X, y, weight)
    assert (model.status_ == WORDS) == separates(X[3:], np.where(y, 1, -1)[3:], np.zeros(len(y) - 3, bool))


def some_apart(X: np.ndarray, y: np.ndarray) -> bool:
    """Whether in some direction no row's class loses ground to another one, and some row's class gains some."""
    n, k = len(X), int(y.max()) + 1
    pairs = np.zeros((n, k, k))  # each row, each other class, and the factor of each class's prediction in their lead
    pairs[np.arange(n), :, y] += 1
    pairs[:, np.arange(k), np.arange(k)] -= 1
    A = np.einsum("nd,njk->njkd", np.column_stack([X, np.ones(n)]), pairs).reshape(n * k, -1)
    found = linprog(-A.sum(0), A_ub=-A, b_ub=np.zeros(len(A)), bounds=(-1, 1))
    return bool(-found.fun > 1e-6)


def several_classes(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """One apart from others that are mixed, or apart but for ties; all apart; pairs that are mixed, apart; none."""
    rng = np.random.default_rng(seed)
    kind = seed % 5
    y = np.arange(60) % (3 if seed < 10 else 5)
    X = rng.normal(size=(len(y), 2))
    if kind == 0:
        X[:, 0] += 12 * (y == 0)
    if kind == 1:
        X[:, 1] = (y == 0) * rng.integers(0, 2, len(y))
    if kind == 2:
        X[:, 0] += 12 * y
    if kind == 3:
        X[:, 0] += 12 * (y // 2)
    if seed % 2:
        X = X * [1e3, 1e-2] + [50, 0]
    return np.column_stack([X, X[:, 0] - X[:, 1], np.zeros(len(y))]), y


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(50))
def test_several_classes_of_which_some_can_be_told_apart_have_no_finite_solution(seed: int) -> None:
    X, y = several_classes(seed)
    model = px.solve.LogisticRegression(C=np.inf, devices=1)
    expected = some_apart(X, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(X, y)
    assert (model.status_ == WORDS) == expected == (seed % 5 < 4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("empty", [True, False])
def test_counts_of_a_group_that_has_none_have_no_finite_solution(empty: bool) -> None:
    rng = np.random.default_rng(0)
    group = np.arange(40) % 4 == 0
    X = np.column_stack([rng.normal(size=(40, 2)), group, ~group])
    y = np.where(group, 0 if empty else 1, 1) * rng.poisson(np.exp(X[:, 0])) + (~group)
    assert separates(X, np.full(40, -1), y > 0) == empty
    model = px.solve.PoissonRegressor(alpha=0.0, fit_intercept=False, devices=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(X, y)
    assert (model.status_ == WORDS) == empty


@pytest.mark.slow
def test_of_several_classes_and_along_a_path_it_is_told_too() -> None:
    X = np.random.default_rng(0).normal(size=(60, 2))
    cut = [-0.5, 0.5]
    apart, mixed = np.digitize(X[:, 0], cut), np.digitize(X[:, 0] + np.random.default_rng(1).normal(size=60), cut)
    model = px.solve.LogisticRegression(devices=1)
    with pytest.warns(ConvergenceWarning, match=WORDS):
        path = model.path(X, apart, [1.0, np.inf])
    assert [status == WORDS for status in path.status] == [False, True]
    assert px.solve.Status.CONVERGED.words in set(model.path(X, mixed, [1.0, np.inf]).status)
    assert WORDS not in model.path(X, mixed, [np.inf]).status


@pytest.mark.sampled(1)
@pytest.mark.parametrize("alpha", [0.0, 2.0])
def test_a_target_of_one_column_is_one_target(alpha: float) -> None:
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(30, 4)), rng.normal(size=(30, 1))
    ours, theirs = px.solve.Ridge(alpha, devices=1).fit(X, y), Ridge(alpha).fit(X, y)
    one = px.solve.Ridge(alpha, devices=1).fit(X, y[:, 0])
    assert ours.coef_.shape == theirs.coef_.shape == (4,)
    assert ours.predict(X).shape == theirs.predict(X).shape == (30,)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, rtol=1e-9)
    np.testing.assert_array_equal(ours.coef_, one.coef_)
    for a, b in itertools.pairwise([ours.score(X, y), theirs.score(X, y), one.score(X, y[:, 0])]):
        np.testing.assert_allclose(a, b, rtol=1e-9)
