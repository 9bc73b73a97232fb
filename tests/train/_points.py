"""What TensorBoard shows of a directory: its files read in order, what was written before a restart left out."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Points = dict[str, dict[int, float]]


def events(file: Path) -> Iterator[Any]:
    """The whole records of a file: a length, its checksum, the message and its checksum."""
    from tensorboardX.proto import event_pb2

    message: Any = vars(event_pb2)["Event"]
    content = file.read_bytes()
    while len(content) >= 16:
        (length,) = struct.unpack("<Q", content[:8])
        if len(content) < 16 + length:  # killed inside a record
            return
        yield message.FromString(content[12 : 12 + length])
        content = content[16 + length :]


def points(directory: Path) -> Points:
    """Name → step → value, with no step twice.

    Raises:
        AssertionError: if a step is there twice, though no restart was told of.
    """
    found: Points = {}
    for file in sorted(directory.iterdir()):
        for event in events(file):
            if event.HasField("session_log"):
                for curve in found.values():
                    for step in [step for step in curve if step >= event.step]:
                        del curve[step]
            for value in event.summary.value:
                curve = found.setdefault(value.tag, {})
                assert event.step not in curve, (value.tag, event.step)
                curve[event.step] = value.simple_value
    return found
