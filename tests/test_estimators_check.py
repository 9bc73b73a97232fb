"""scikit-learn's own suite for estimators passes for each of ours."""

from collections.abc import Callable
from typing import Any

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from paraxis import solve

# One device: what the suite asks for does not depend on the number, and each of its shapes is compiled.
ESTIMATORS = [
    solve.LogisticRegression(devices=1),
    solve.LogisticRegression(l1_ratio=0.5, devices=1),
    solve.Ridge(devices=1),
    solve.LinearRegression(devices=1),
    solve.PoissonRegressor(devices=1),
    solve.Lasso(devices=1),
    solve.ElasticNet(devices=1),
]


@pytest.mark.slow
@parametrize_with_checks(ESTIMATORS)
def test_estimators_pass_scikit_learn_s_checks(estimator: Any, check: Callable[[Any], None]) -> None:
    check(estimator)
