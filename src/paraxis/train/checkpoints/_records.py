"""What is noted beside a checkpoint's arrays, in a JSON file with its own checksum; and on what the run depends."""

import functools
import importlib.metadata
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

FILE = "paraxis.json"
_FORMAT = 1


class Damaged(Exception):  # noqa: N818  it says what the files are, and never leaves the room
    """Files that are not what was written."""


class Removed(Damaged):
    """Files that are there no more, or are others now: a run that saves here has removed or replaced them."""


def write(directory: Path, record: Mapping[str, Any]) -> None:
    """Write a record of JSON values; it is on the disk when this returns."""
    text = json.dumps(record)
    wrapped = json.dumps({"format": _FORMAT, "crc32": zlib.crc32(text.encode()), "record": text})
    with (directory / FILE).open("w", encoding="utf-8") as file:
        file.write(wrapped)
        file.flush()
        os.fsync(file.fileno())


def read(directory: Path) -> dict[str, Any]:
    """A record as it was written.

    Raises:
        Damaged: if it is not there or not what was written.
    """
    try:
        wrapped = json.loads((directory / FILE).read_text(encoding="utf-8"))
        text = wrapped["record"]
        if wrapped["format"] == _FORMAT and zlib.crc32(text.encode()) == wrapped["crc32"]:
            return json.loads(text)
    except PermissionError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"its record {FILE} cannot be read: {error}") from error
    raise Damaged(f"its record {FILE} is not what was written")


def is_whole(directory: Path) -> bool:
    """Whether there is a record, which is written last."""
    try:
        read(directory)
    except (Damaged, OSError):
        return False
    return True


def surroundings() -> dict[str, Any]:
    """What the bits of a computation depend on, apart from the program."""
    threads = os.environ.get("PJRT_NPROC") or os.environ.get("NPROC")
    return {
        "jax": jax.__version__,
        "jaxlib": _version("jaxlib"),
        "device kind": jax.devices()[0].device_kind,
        "number of devices": jax.device_count(),
        "number of processes": jax.process_count(),
        # What XLA takes on CPU if nothing is said.
        "number of XLA's CPU threads": int(threads or max(os.cpu_count() or 1, jax.local_device_count())),
    }


@functools.cache
def _version(package: str) -> str:
    return importlib.metadata.version(package)


def changes(before: Mapping[str, Any]) -> tuple[str, ...]:
    """What is different now, in words."""
    return tuple(
        f"{name}: {before[name]} when it was saved, {now} now"
        for name, now in surroundings().items()
        if name in before and before[name] != now
    )
