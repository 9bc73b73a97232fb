"""Other ways to run what is mapped: streamed through one machine, or by other processes."""

from paraxis.engines._groups import Groups, Padded
from paraxis.engines._pool import Pool
from paraxis.engines._progress import Progress
from paraxis.engines._ray import Ray
from paraxis.engines._run import Passes
from paraxis.engines._stream import Stream

__all__ = ["Groups", "Padded", "Passes", "Pool", "Progress", "Ray", "Stream"]
