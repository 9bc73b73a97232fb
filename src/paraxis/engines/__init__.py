"""Other ways to run what is mapped: streamed through one machine, in bounded memory."""

from paraxis.engines._groups import Groups, Padded
from paraxis.engines._progress import Progress
from paraxis.engines._run import Passes
from paraxis.engines._stream import Stream

__all__ = ["Groups", "Padded", "Passes", "Progress", "Stream"]
