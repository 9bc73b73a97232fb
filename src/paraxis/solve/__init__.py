"""Solvers for linear models and other functions, on data that lie on any number of devices."""

import importlib
import typing

from paraxis.solve import objective, prox
from paraxis.solve._lbfgs import LBFGS, LBFGSState
from paraxis.solve._problem import Trial
from paraxis.solve._proximal import ProximalGradient, ProximalGradientState
from paraxis.solve._rows import Rows, rows
from paraxis.solve._run import Interrupted, Iteration, OptStep, Status
from paraxis.solve._search import LineSearch, SearchResult

if typing.TYPE_CHECKING:
    from paraxis.solve.estimators import *  # noqa: F403
else:  # to type checkers, a name that is not imported above is a mistake

    def __getattr__(name):
        """Load what needs scikit-learn when it is first used."""
        if name not in __all__:
            raise AttributeError(f"module 'paraxis.solve' has no attribute {name!r}")
        return getattr(importlib.import_module("paraxis.solve.estimators"), name)


__all__ = [  # noqa: F405
    "LBFGS",
    "CrossValidated",
    "ElasticNet",
    "GammaRegressor",
    "Interrupted",
    "Iteration",
    "LBFGSState",
    "Lasso",
    "LineSearch",
    "LinearRegression",
    "LogisticRegression",
    "OptStep",
    "PoissonRegressor",
    "ProximalGradient",
    "ProximalGradientState",
    "Ridge",
    "Rows",
    "SearchResult",
    "Status",
    "Trial",
    "TweedieRegressor",
    "cross_validate_path",
    "objective",
    "prox",
    "rows",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
