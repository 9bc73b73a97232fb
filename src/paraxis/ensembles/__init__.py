"""Map over members, reduce the predictions: ensembles of any size on any number of devices."""

from paraxis.ensembles._ensemble import Ensemble
from paraxis.ensembles._make import ensemble

__all__ = ["Ensemble", "ensemble"]
