"""Estimators with scikit-learn's interface: its objectives, names and attributes, solved on all devices."""

from paraxis._core.check import needed

with needed("paraxis.solve.estimators", "solve"):
    from paraxis.solve.estimators._base import CrossValidated, cross_validate_path
    from paraxis.solve.estimators._models import (
        ElasticNet,
        Lasso,
        LinearRegression,
        LogisticRegression,
        PoissonRegressor,
        Ridge,
    )

__all__ = [
    "CrossValidated",
    "ElasticNet",
    "Lasso",
    "LinearRegression",
    "LogisticRegression",
    "PoissonRegressor",
    "Ridge",
    "cross_validate_path",
]
