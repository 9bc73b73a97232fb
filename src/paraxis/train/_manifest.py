"""A checkpoint that is written, and then its files' sizes and CRC-32, since Orbax loads flipped bits in silence."""

import contextlib
import functools
import json
import logging
import threading
import weakref
import zlib
from pathlib import Path
from typing import Any

from paraxis._host import files, processes

NAME = "paraxis-crc32.json"
_BLOCK = 1 << 22  # bytes
_LOG = logging.getLogger("paraxis")


class Writing:
    """A checkpoint that is being written; the first process writes the manifest when Orbax is done."""

    def __init__(self, step: int, response: Any, directory: Path) -> None:
        self.step = step
        self.error: Exception | None = None
        self._response = response
        self._directory = directory
        self.thread = threading.Thread(target=self._finish, name=f"paraxis-checkpoint-{step}")
        _unfinished.add(self)
        _wait_at_exit()
        self.thread.start()

    def _finish(self) -> None:
        try:
            self._response.result()
            if processes.is_first():
                write(self._directory)
        except Exception as error:
            self.error = error


_unfinished: "weakref.WeakSet[Writing]" = weakref.WeakSet()


@functools.cache
def _wait_at_exit() -> None:
    """Have the interpreter wait for checkpoints before it ends: afterwards, Orbax can start no more threads.

    There is no public hook before concurrent.futures refuses new work.
    """
    with contextlib.suppress(AttributeError):
        threading._register_atexit(_finish_all)  # pyright: ignore[reportAttributeAccessIssue]


def _finish_all() -> None:
    for writing in list(_unfinished):
        writing.thread.join()
        if writing.error is not None:
            _LOG.error("the checkpoint of step %d could not be written: %s", writing.step, writing.error)


def write(directory: Path) -> None:
    """Write the manifest of a complete checkpoint into its directory."""
    found = {name: _describe(directory / name) for name in _names(directory)}
    with files.replaced(directory / NAME) as file:
        file.write(json.dumps(found).encode())


def damage(directory: Path) -> str | None:
    """Return which file is not as it was written; ``None`` if all are, or there is no manifest.

    A process that was killed between the end of Orbax's save and the manifest leaves a complete checkpoint without one.
    """
    try:
        written = json.loads((directory / NAME).read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        return f"{NAME} cannot be read: {error}"
    for name, expected in written.items():
        if not (directory / name).is_file():
            return f"{name} is missing"
        if (found := _describe(directory / name)) != expected:
            return (
                f"{name} has {found[0]:,} bytes with CRC-32 {found[1]:08x}, not {expected[0]:,} with {expected[1]:08x}"
            )
    return None


def _names(directory: Path) -> list[str]:
    found = (path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    return sorted(name for name in found if name != NAME)


def _describe(path: Path) -> list[int]:
    """Return a file's size and CRC-32."""
    size, crc = 0, 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return [size, crc]
