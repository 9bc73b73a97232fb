"""Cross-validation: a fold is a set of weights, zero on the rows that it holds out, so X is laid out once for all."""

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar, cast

import numpy as np
from sklearn.base import clone, is_classifier
from sklearn.model_selection import check_cv

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
    """Choose an estimator's strength by cross-validation; the rows are laid out, and solvers compiled, once.

    Args:
        estimator: one of :mod:`paraxis.solve.estimators`; it is not changed.
        X, y, sample_weight: as for its ``fit``.
        grid: values of ``C``, or of ``alpha``. Each solution starts from that of the next stronger penalty.
        folds: the number of folds, stratified for classes, or a splitter of scikit-learn.

    Returns:
        Scores ``(len(grid), folds)``, by the estimator's own ``score``; the best strength, or the first in the grid of
        several equally good ones; and an estimator fitted to all rows with that strength.

    Raises:
        DataError: if a fold cannot be scored.

    Communicates: the same as the fits of all folds.

    Example:
        >>> import numpy as np, paraxis as px
        >>> X = np.random.default_rng(0).normal(size=(40, 3))
        >>> found = px.solve.cross_validate_path(px.solve.Ridge(), X, X @ [1.0, 2.0, 3.0], [1e-3, 1e3], folds=4)
        >>> found.best, found.scores.shape
        (0.001, (2, 4))
    """
    if not isinstance(estimator, LinearModel):
        raise TypeError(
            f"cross_validate_path: estimator must be one of px.solve, got {type(estimator).__name__}; scale X before, "
            "or use sklearn.model_selection.GridSearchCV for a pipeline"
        )
    if isinstance(X, Table):
        raise TypeError("cross_validate_path: X must be an array, since folds need all rows in memory, got a px.Table")
    model = cast(_Model, clone(estimator))
    strengths, order = model._from_strong("grid", grid)
    rows, targets, weight = model._checked(X, y, sample_weight)
    posed = model._posed(targets, model._weighted(targets, weight), rows.dtype)
    splitter: Any = check_cv(folds, targets, classifier=is_classifier(model))
    splits = [*splitter.split(rows, targets)]
    scores = np.full((len(strengths), len(splits)), np.nan)
    with fitting.surroundings(rows.dtype, model.devices):
        whole = fitting.place(rows, posed, model.devices)
        for fold, (train, test) in enumerate(splits):
            kept = np.zeros_like(weight)
            np.add.at(kept, train, model._weighted(targets[train], weight[train]))
            placed = whole.weighted(kept)
            found = model._solved_path(strengths, order, posed, placed)
            model._warn(*found)
            for index, one in enumerate(found):
                model.coef_, model.intercept_ = model._described(one.params, posed, placed.means)
                scores[index, fold] = model.score(rows[test], targets[test], weight[test])
    if not np.all(np.isfinite(scores)):
        raise DataError(
            f"cross_validate_path: fold {int(np.argwhere(~np.isfinite(scores))[0, 1])} has no finite score; each fold "
            "must hold out at least two rows that count; write folds=5"
        )
    best = float(strengths[scores.mean(1).argmax()])
    chosen = cast(_Model, clone(estimator)).set_params(**{model.strength_name: best})
    return CrossValidated(strengths, scores, best, chosen.fit(X, y, sample_weight))
