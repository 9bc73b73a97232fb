"""Map over members, reduce the predictions: ensembles of any size on any number of devices, and their scores."""

from paraxis.ensembles._ensemble import Ensemble, ensemble
from paraxis.ensembles._loading import load_ensemble, load_member

__all__ = ["Ensemble", "ensemble", "load_ensemble", "load_member"]
