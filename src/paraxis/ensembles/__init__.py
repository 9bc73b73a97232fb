"""Map over members, reduce the predictions: ensembles of any size on any number of devices."""

from paraxis.ensembles._ensemble import Ensemble, ensemble, load_ensemble
from paraxis.ensembles._epochs import Epoch, History

__all__ = ["Ensemble", "Epoch", "History", "ensemble", "load_ensemble"]
