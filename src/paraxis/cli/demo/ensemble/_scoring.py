"""Scores of the predictions of one member and of all."""

from typing import NamedTuple

import jax
import numpy as np
from scipy import ndimage

from paraxis import ensembles
from paraxis.cli.demo._digits import Labelled
from paraxis.ensembles import Ensemble, Reliability


class Score(NamedTuple):
    """Scores of some probabilities; ``calibrated_nll``: the likelihood after temperature scaling, cross-fitted."""

    accuracy: float
    nll: float
    calibration_error: float
    calibrated_nll: float


class Scored(NamedTuple):
    """A member's scores, the mean over all of them, and the ensemble's; and the diagrams of both."""

    member: Score
    ensemble: Score
    disagreement: float
    member_reliability: Reliability
    ensemble_reliability: Reliability


def rotated(digits: Labelled, degrees: float) -> Labelled:
    """Return the same digits, turned."""
    images = ndimage.rotate(digits.images, degrees, axes=(1, 2), reshape=False, order=1)
    return Labelled(np.clip(images, 0, 1), digits.labels)


def score(ens: Ensemble, digits: Labelled) -> Scored:
    """Score each member and the average of all, which the devices take."""
    average = ens.predict(digits.images)
    each = jax.nn.softmax(ens.members(digits.images))
    own = [_score(probabilities, digits.labels) for probabilities in each]
    # A row per digit and member: confidence and accuracy of a member, not of one picked out.
    flat = np.asarray(each).reshape(-1, each.shape[-1]), np.tile(digits.labels, len(each))
    return Scored(
        Score(*(float(np.mean(values)) for values in zip(*own, strict=True))),
        _score(average, digits.labels),
        float(ensembles.disagreement(each)),
        ensembles.reliability(*flat, num_bins=10),
        ensembles.reliability(average, digits.labels, num_bins=10),
    )


def _score(probabilities: jax.Array, labels: np.ndarray) -> Score:
    return Score(
        float(ensembles.accuracy(probabilities, labels)),
        float(ensembles.nll(probabilities, labels)),
        float(ensembles.calibration_error(probabilities, labels)),
        ensembles.cross_fitted_nll(probabilities, labels),
    )
