"""Estimators with scikit-learn's interface: its objectives, names and attributes, solved on all devices."""

from paraxis._core.check import needed

with needed("paraxis.solve.estimators", "solve"):
    from paraxis.solve.estimators._folds import *  # noqa: F403
    from paraxis.solve.estimators._models import *  # noqa: F403
