"""Estimators with scikit-learn's interface: its objectives, names and attributes, solved on all devices."""

from paraxis._core.check import needed

with needed("paraxis.solve.estimators", "solve"):
    from paraxis.solve.estimators._folds import CrossValidated, cross_validate_path
    from paraxis.solve.estimators._models import (
        ElasticNet,
        GammaRegressor,
        Lasso,
        LinearRegression,
        LogisticRegression,
        PoissonRegressor,
        Ridge,
        TweedieRegressor,
    )

__all__ = [
    "CrossValidated",
    "ElasticNet",
    "GammaRegressor",
    "Lasso",
    "LinearRegression",
    "LogisticRegression",
    "PoissonRegressor",
    "Ridge",
    "TweedieRegressor",
    "cross_validate_path",
]
