"""Cross-validation over a path of strengths: the rows of a fold are laid out once for all of them."""

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar, cast

import numpy as np
from sklearn.base import clone, is_classifier
from sklearn.model_selection import check_cv

from paraxis._core import check
from paraxis._tables import Table
from paraxis.errors import DataError
from paraxis.solve.estimators import _fitting as fitting
from paraxis.solve.estimators._base import LinearModel

_Model = TypeVar("_Model", bound=LinearModel)


class CrossValidated(NamedTuple, Generic[_Model]):
    """The result of cross-validation."""

    strengths: np.ndarray  # the grid, (num,)
    scores: np.ndarray  # of each fold's held-out rows, (num, folds)
    best: float  # the strength with the best mean score
    estimator: _Model  # fitted to all rows with that strength


def cross_validate_path(
    estimator: _Model, X: Any, y: Any, grid: Sequence[float], folds: Any = 5, *, sample_weight: Any = None
) -> CrossValidated[_Model]:
    """Choose an estimator's strength by cross-validation; a fold's rows are sent, and solvers compiled, once.

    Args:
        estimator: one of :mod:`paraxis.solve.estimators`; it is not changed.
        X, y, sample_weight: as for its ``fit``.
        grid: values of ``C``, or of ``alpha``. Each solution starts from that of the next stronger penalty.
        folds: the number of folds, stratified for classes, or a splitter of scikit-learn.

    Returns:
        Scores ``(len(grid), folds)`` by the estimator's ``score``; the best strength, the first in the grid of several
        equally good ones; and an estimator fitted to all rows with it.

    Raises:
        DataError: if a fold cannot be scored.

    Example:
        >>> import numpy as np, paraxis as px
        >>> X = np.random.default_rng(0).normal(size=(40, 3))
        >>> result = px.solve.cross_validate_path(px.solve.Ridge(), X, X @ [1.0, 2.0, 3.0], [1e-3, 1e3], folds=4)
        >>> result.best, result.scores.shape
        (0.001, (2, 4))
    """
    if not isinstance(estimator, LinearModel) or isinstance(X, Table):
        raise TypeError("cross_validate_path takes an estimator of px.solve and an array X; else use GridSearchCV")
    model, strengths = cast(_Model, clone(estimator)).set_params(warm_start=True), np.asarray(grid, np.float64)
    for strength in strengths.tolist():
        check.number("cross_validate_path", f"{model.strength_name} in grid", strength, **model.bounds)
    rows, targets, weight = model._checked(X, y, sample_weight)
    splitter: Any = check_cv(folds, targets, classifier=is_classifier(model))
    splits = [*splitter.split(rows, targets)]
    scores = np.full((len(strengths), len(splits)), np.nan)
    order = np.argsort(strengths if model.strength_name == "C" else -strengths, kind="stable")
    with fitting.precision_context(rows.dtype, model.devices):
        for fold, (train, test) in enumerate(splits):
            model.coef_, states = np.empty(0), []  # from which no fit starts
            posed = model._posed_for(rows[train], targets[train], weight[train]).placed(rows[train], model.devices)
            for index in order:
                states.append(model._solve(float(strengths[index]), posed))
                predicted = model._predicted(rows[test] @ model.coef_.T + model.intercept_)
                scores[index, fold] = model.metric(targets[test], predicted, sample_weight=weight[test])
            model._warn(*states)
    if not np.all(np.isfinite(scores)):
        raise DataError("cross_validate_path: a fold has no finite score: each must hold out two rows that count")
    best = float(strengths[scores.mean(1).argmax()])
    chosen = cast(_Model, clone(estimator)).set_params(**{model.strength_name: best})
    return CrossValidated(strengths, scores, best, chosen.fit(X, y, sample_weight))
