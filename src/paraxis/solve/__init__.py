"""A sum of losses over rows, which are used *whole*, and all else local: solvers for data on any number of devices."""

import importlib
import typing

from paraxis._calls import arguments
from paraxis.solve import objective, prox
from paraxis.solve._lbfgs import LBFGS, LBFGSState
from paraxis.solve._progress import Iteration
from paraxis.solve._proximal import ProximalGradient, ProximalGradientState
from paraxis.solve._rows import Rows, rows
from paraxis.solve._solution import Interrupted, OptStep
from paraxis.solve._status import Status

if typing.TYPE_CHECKING:
    from paraxis.solve.estimators import (
        CrossValidated,
        ElasticNet,
        Lasso,
        LogisticRegression,
        Path,
        PoissonRegressor,
        Ridge,
        cross_validate_path,
    )

__all__ = [
    "LBFGS",
    "CrossValidated",
    "ElasticNet",
    "Interrupted",
    "Iteration",
    "LBFGSState",
    "Lasso",
    "LogisticRegression",
    "OptStep",
    "Path",
    "PoissonRegressor",
    "ProximalGradient",
    "ProximalGradientState",
    "Ridge",
    "Rows",
    "Status",
    "cross_validate_path",
    "objective",
    "prox",
    "rows",
]

# What needs scikit-learn is loaded when it is first used.
_ESTIMATORS = {
    "CrossValidated",
    "ElasticNet",
    "Lasso",
    "LogisticRegression",
    "Path",
    "PoissonRegressor",
    "Ridge",
    "cross_validate_path",
}


if not typing.TYPE_CHECKING:  # to type checkers, a name that is not imported above is a mistake

    def __getattr__(name):
        if name not in _ESTIMATORS:
            raise arguments.no_attribute("px.solve", name, __all__)
        value = getattr(importlib.import_module("paraxis.solve.estimators"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
