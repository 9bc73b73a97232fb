"""Linear models on all devices and on one, and of a table with text and gaps, against scikit-learn."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from threadpoolctl import threadpool_limits

Example = Callable[[str], ModuleType]

pytestmark = pytest.mark.slow


def clouds(module: ModuleType, num_rows: int = 1_003, num_features: int = 12) -> Any:
    """Ten classes that overlap, so that there is a solution without a penalty; rows that do not divide by 8."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 10, num_rows)
    x = rng.normal(size=(10, num_features))[y] / 2 + rng.normal(size=(num_rows, num_features))
    return module.Labelled(x.astype(np.float32), y.astype(np.int32))


def by_sklearn(x: np.ndarray, y: np.ndarray, C: float, **options: Any) -> np.ndarray:
    with threadpool_limits(1):
        model = LogisticRegression(C=C, fit_intercept=False, max_iter=5_000, **options).fit(x.astype(np.float64), y)
    return model.coef_.T


def mean_loss(coef: np.ndarray, x: np.ndarray, y: np.ndarray) -> float:
    scores = np.exp(x.astype(np.float64) @ coef)
    return float(log_loss(y, scores / scores.sum(1, keepdims=True)))


@pytest.mark.parametrize("devices", [1, 3, 8])
def test_the_loop_ends_at_scikit_learns_solution(example: Example, devices: int) -> None:
    module = example("sharded_logreg")
    data = clouds(module)
    run = module.minimise(module.on_devices(data, devices), 30)
    expected = by_sklearn(*data, C=np.inf, tol=1e-10)
    assert run.values[-1] == pytest.approx(mean_loss(expected, *data), rel=1e-6)
    # Without a penalty, the same may be added to the coefficients of every class.
    centred = [coef - coef.mean(1, keepdims=True) for coef in (np.asarray(run.params), expected)]
    np.testing.assert_allclose(*centred, atol=1e-3)


def test_a_step_is_compiled_once_and_communicates_one_gradient(example: Example) -> None:
    module = example("sharded_logreg")
    many, one = (module.minimise(module.on_devices(clouds(module), n), 5) for n in (8, 1))
    for run in (many, one):
        assert run.num_compiled == 1
        assert int(run.state.data_passes) <= 2 * 5 + 2
        assert (run.seconds > 0).all()
    assert many.communicated.count["all_reduce"] == many.communicated.total_count == 2
    assert many.communicated.total_bytes == 4 * (12 * 10 + 3)  # a gradient, and three numbers of a trial
    assert one.communicated.total_count == 0


def test_a_table_with_text_and_gaps_is_fitted_as_by_scikit_learn(example: Example) -> None:
    module = example("fit_table")
    found = module.main(["--quick"])
    table = module.patients()
    y = table["sick"].to_numpy()
    train = module.train_test_split(np.arange(len(y)), test_size=0.2, random_state=0)[0]
    income = table["income"].to_numpy()
    numbers = [
        table["age"].to_numpy(),
        table["visits"].to_numpy(),
        np.where(np.isnan(income), np.nanmean(income[train]), income),
    ]
    scaled = [(x - x[train].mean()) / x[train].std() for x in numbers]
    text = [
        table[name].to_numpy() == level
        for name, level in (("smoker", "yes"), ("smoker", "no"), ("city", "Bern"), ("city", "Basel"))
    ]
    theirs = LogisticRegression(C=found["model"].C, solver="newton-cholesky", tol=1e-10).fit(
        np.transpose([*scaled, *text])[train], y[train]
    )
    names = [
        "number__age",
        "number__visits",
        "number__income",
        "text__smoker_yes",
        "text__smoker_no",
        "text__city_Bern",
        "text__city_Basel",
    ]
    np.testing.assert_allclose([found["coefficients"][name] for name in names], theirs.coef_[0], atol=1e-4)
    assert found["scores"]["the model"] > found["scores"]["no column"] + 0.2
