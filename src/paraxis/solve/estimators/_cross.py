"""Cross-validation with the folds as an axis: all folds are solved in one program, on the same rows.

A fold is a set of weights, zero on the rows that it holds out. So X lies on the devices once, whatever the number of
folds; each iteration of all folds reads it together, and the exchanges of all folds are one.
"""

import copy
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar, cast

import jax
import numpy as np
from sklearn.base import clone, is_classifier
from sklearn.model_selection import check_cv

from paraxis._calls import arguments
from paraxis._tables import Table
from paraxis.errors import DataError
from paraxis.solve._solution import Interrupted, attended
from paraxis.solve._status import Status
from paraxis.solve.estimators import _fitting as fitting
from paraxis.solve.estimators._base import LinearModel, Posed
from paraxis.solve.estimators._fitting import Penalty, Solution

_Model = TypeVar("_Model", bound=LinearModel)


class CrossValidated(NamedTuple, Generic[_Model]):
    """The result of cross-validation.

    Args:
        strengths: the grid, ``(num,)``.
        scores: the score of each fold's held-out rows, ``(num, folds)``.
        best: the strength with the best mean score.
        estimator: an estimator fitted to all rows with that strength.
    """

    strengths: np.ndarray
    scores: np.ndarray
    best: float
    estimator: _Model


def cross_validate_path(
    estimator: _Model, X: Any, y: Any, grid: Sequence[float], folds: Any = 5, *, sample_weight: Any = None
) -> CrossValidated[_Model]:
    """Choose an estimator's strength by cross-validation, all folds at once.

    Args:
        estimator: one of :mod:`paraxis.solve.estimators`; it is not changed.
        X, y, sample_weight: as for its ``fit``.
        grid: values of ``C``, or of ``alpha``. Each solution starts from that of the next stronger penalty.
        folds: the number of folds, or a splitter of scikit-learn; as there, a number means stratified folds for
            classes.

    Returns:
        Scores ``(len(grid), folds)``, by the estimator's own ``score``; the best strength, or the first in the grid of
        several equally good ones; and an estimator fitted to all rows with that strength.

    Raises:
        DataError: if a fold cannot be scored.
        ValueError: if the data, an option or a strength cannot be used; the message says why.
        TypeError: if it is a different kind of estimator.
        Interrupted: after Ctrl-C. Its ``found`` has the scores of the strengths whose folds were all solved by then,
            and the ``best`` of these; if there are none yet, the strength that was being solved. Its estimator is the
            mean of the folds' models with that strength, whose loss is at most their average, or the one that was being
            fitted to all rows.

    Communicates: the same as one fit, with messages ``folds`` times as long.

    Example:
        >>> import numpy as np, paraxis as px
        >>> X = np.random.default_rng(0).normal(size=(40, 3))
        >>> found = px.solve.cross_validate_path(px.solve.Ridge(), X, X @ [1.0, 2.0, 3.0], [1e-3, 1e3], folds=4)
        >>> found.best, found.scores.shape
        (0.001, (2, 4))
    """
    model = _unfitted(estimator)
    if isinstance(X, Table):
        raise TypeError(
            "cross_validate_path: X must be an array, since folds need all rows in memory, got a px.Table; write "
            "model.path(table, None, [0.1, 1, 10], engine=px.Stream(memory='2GB')) for a solution of each"
        )
    strengths, order = model._from_strong("grid", grid)
    X_all, targets, weight = model._checked(X, y, sample_weight)
    posed = model._posed(targets, model._weighted(targets, weight), X_all.dtype)
    splits = _splits(model, folds, X_all, targets)
    for fold, (_, test) in enumerate(splits):
        if not np.any(weight[test] > 0):
            raise DataError(f"cross_validate_path: fold {fold} holds out no row of positive weight; write folds=5")
    weights = np.stack([_held_out(model, targets, weight, train) for train, _ in splits])
    totals = weights.sum(1, dtype=np.float64)
    scores = np.full((len(strengths), len(splits)), np.nan)
    found: dict[int, Solution] = {}

    def scored() -> CrossValidated[_Model]:
        """Return the result so far, with the mean of the folds' models for an estimator."""
        there = [i for i in sorted(found) if np.isfinite(scores[i]).all()]
        best = there[int(scores[there].mean(1).argmax())] if there else [*found][-1]
        fitted = copy.copy(model).set_params(**{model.strength_name: float(strengths[best])})
        return CrossValidated(
            strengths[there], scores[there], float(strengths[best]), fitted._taking(_mean(found[best]), posed, placed)
        )

    with fitting.surroundings(X_all.dtype, model.devices), attended():
        placed = fitting.place_folds(X_all, posed.targets, weights, model.devices, centre=posed.centre)
        start = model._zeros(posed, X_all.shape[1], X_all.dtype)
        params = jax.tree.map(lambda x: np.repeat(x[None], len(splits), 0), start)
        for index in order:
            penalty = _penalties(model, float(strengths[index]), totals, posed)
            try:
                found[index], z = fitting.solve_folds(model._plan(posed), params, penalty, placed.data)
            except Interrupted as stopped:
                found[index] = fitting.solution_of(stopped)
                stopped.found = scored()
                stopped.estimator = stopped.found.estimator
                raise
            model._warn(found[index])
            params = found[index].params
            scores[index] = [
                model._score(
                    model._predicted(_original(z[fold][..., : len(X_all)], posed)[test]), targets[test], weight[test]
                )
                for fold, (_, test) in enumerate(splits)
            ]
    if not np.all(np.isfinite(scores)):
        raise DataError(
            f"cross_validate_path: fold {int(np.argwhere(~np.isfinite(scores))[0, 1])} has no finite score; each fold "
            "must hold out at least two rows that count; write folds=5"
        )
    best = float(strengths[scores.mean(1).argmax()])
    chosen = _unfitted(estimator).set_params(**{model.strength_name: best})
    try:
        return CrossValidated(strengths, scores, best, chosen.fit(X, y, sample_weight))
    except Interrupted as stopped:
        stopped.found = CrossValidated(strengths, scores, best, stopped.estimator)
        raise


def _mean(found: Solution) -> Solution:
    """Return the mean over the folds."""
    params = jax.tree.map(lambda x: x.mean(0), found.params)
    return Solution(
        params, found.iter_num.max(), np.asarray(Status.INTERRUPTED), found.error.max(), found.data_passes.max()
    )


def _unfitted(estimator: _Model) -> _Model:
    if not isinstance(estimator, LinearModel):
        raise TypeError(
            f"cross_validate_path: estimator must be one of px.solve, got {type(estimator).__name__}; scale X before, "
            "or use sklearn.model_selection.GridSearchCV for a pipeline"
        )
    return cast(_Model, clone(estimator))


def _splits(model: LinearModel, folds: Any, X: np.ndarray, targets: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    try:
        splitter: Any = check_cv(folds, targets, classifier=is_classifier(model))
        splits = [(train, test) for train, test in splitter.split(X, targets)]
        for fold in splits:
            for rows in fold:
                X[rows]  # they are numbers of rows, or a mask
        if not splits:
            raise DataError("there is none")
        return splits
    except Exception as error:
        raise DataError(
            f"cross_validate_path: folds must be a number from 2 to that of the rows, or a splitter of scikit-learn, "
            f"got {arguments.described(folds)}: {error}"
        ) from error


def _held_out(model: LinearModel, targets: np.ndarray, weight: np.ndarray, train: np.ndarray) -> np.ndarray:
    """Return a fold's weights: zero but on the rows that it is trained on, as often as the fold has them."""
    kept = np.zeros_like(weight)
    np.add.at(kept, train, model._weighted(targets[train], weight[train]))
    return kept


def _penalties(model: LinearModel, strength: float, totals: np.ndarray, posed: Posed) -> Penalty:
    found = [model._penalty(strength, float(total), posed) for total in totals]
    return Penalty(np.array([p.l1 for p in found]), np.array([p.l2 for p in found]))


def _original(z: np.ndarray, posed: Posed) -> np.ndarray:
    """Return a solver's predictions as those of the model."""
    return posed.origin + posed.scale * z.T
