"""Map over members, reduce the predictions: ensembles of any size on any number of devices, and their scores."""

from paraxis.ensembles._ensemble import Ensemble, ensemble
from paraxis.ensembles._history import Epoch, History
from paraxis.ensembles._loading import load_ensemble, load_member
from paraxis.ensembles._scores import (
    Reliability,
    Scores,
    accuracy,
    brier_score,
    calibration_error,
    disagreement,
    entropy,
    evaluate,
    mutual_information,
    nll,
    reliability,
)
from paraxis.ensembles._temperature import apply_temperature, cross_fitted_nll, fit_temperature

__all__ = [
    "Ensemble",
    "Epoch",
    "History",
    "Reliability",
    "Scores",
    "accuracy",
    "apply_temperature",
    "brier_score",
    "calibration_error",
    "cross_fitted_nll",
    "disagreement",
    "ensemble",
    "entropy",
    "evaluate",
    "fit_temperature",
    "load_ensemble",
    "load_member",
    "mutual_information",
    "nll",
    "reliability",
]
