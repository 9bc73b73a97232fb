"""Several processes: started together on this machine, or joined where a scheduler has started them."""

from paraxis.launch._initialize import Processes, initialize
from paraxis.launch._launcher import launch

__all__ = ["Processes", "initialize", "launch"]
