"""What TensorBoard shows of a directory: its files read in order, what was written before a restart left out."""

import struct
from pathlib import Path
from typing import Any

Points = dict[str, dict[int, float]]


def events(file: Path) -> list[Any]:
    """The whole records of a file: a length, its checksum, the message and its checksum."""
    from tensorboardX.proto import event_pb2

    message: Any = vars(event_pb2)["Event"]
    content, found = file.read_bytes(), []
    while len(content) >= 16 and len(content) >= 16 + (length := struct.unpack("<Q", content[:8])[0]):
        found.append(message.FromString(content[12 : 12 + length]))
        content = content[16 + length :]
    return found


def points(directory: Path) -> Points:
    """Name → step → value; a step that is there twice, though no restart was told of, is an AssertionError."""
    found: Points = {}
    for event in (event for file in sorted(directory.iterdir()) for event in events(file)):
        if event.HasField("session_log"):
            found = {tag: {k: x for k, x in curve.items() if k < event.step} for tag, curve in found.items()}
        for value in event.summary.value:
            curve = found.setdefault(value.tag, {})
            assert event.step not in curve, (value.tag, event.step)
            curve[event.step] = value.simple_value
    return found
