"""Maps over more elements than memory holds: chunk by chunk, on this machine or by an executor's processes."""

from paraxis._host.cluster import ray_map, retrying
from paraxis.streaming._groups import Groups, Padded
from paraxis.streaming._run import Progress
from paraxis.streaming._stream import Schedule, Stream

__all__ = ["Groups", "Padded", "Progress", "Schedule", "Stream", "ray_map", "retrying"]
