"""Several processes: started together on this machine, or found where a scheduler started them."""

from paraxis.launch._initialize import Processes, initialize
from paraxis.launch._launcher import launch
from paraxis.launch._options import Options

__all__ = ["Options", "Processes", "initialize", "launch"]
