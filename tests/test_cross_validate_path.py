"""Folds on rows that are laid out once are scikit-learn's fits fold by fold."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.model_selection import GridSearchCV, KFold

from paraxis import solve
from tests.test_estimators import CASES, WEIGHT, X, new, on

GRID = [0.1, 10.0, 1.0]  # in no order


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("case", "devices"),
    [("lasso", 2), ("counts", 1), ("three classes", 2), ("ridge", 3), ("ridge, two targets", 1), ("balanced", 1)],
)
def test_cross_validate_path_fits_all_folds_as_fold_by_fold(case: str, devices: int) -> None:
    ours, theirs, y = CASES[case]
    found = solve.cross_validate_path(on(devices, ours), X, y, GRID, folds=3)
    search = GridSearchCV(new(theirs), {ours.strength_name: GRID}, cv=3).fit(X, y)
    results: Any = search.cv_results_
    expected = np.stack([results[f"split{fold}_test_score"] for fold in range(3)], 1)
    np.testing.assert_allclose(found.scores, expected, rtol=1e-5, atol=1e-7)
    assert found.best == search.best_params_[ours.strength_name]
    np.testing.assert_allclose(found.estimator.coef_, search.best_estimator_.coef_, rtol=1e-5, atol=1e-6)


def test_cross_validate_path_takes_weights_and_a_splitter_of_ones_own() -> None:
    ours, theirs, y = CASES["balanced"]
    splitter = KFold(3, shuffle=True, random_state=0)
    named = pd.DataFrame(X, columns=list("abcd"))  # without a warning of names
    found = solve.cross_validate_path(on(1, ours), named, y, GRID, splitter, sample_weight=WEIGHT)
    for row, strength in enumerate(GRID):
        for fold, (train, test) in enumerate(splitter.split(X)):
            model = new(theirs, **{ours.strength_name: strength}).fit(X[train], y[train], WEIGHT[train])
            expected = model.score(X[test], y[test], WEIGHT[test])
            np.testing.assert_allclose(found.scores[row, fold], expected, rtol=1e-8)
    assert found.best == GRID[found.scores.mean(1).argmax()]
