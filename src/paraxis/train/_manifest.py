"""A checkpoint that is written, and then its files' sizes and CRC-32, since Orbax loads flipped bits in silence."""

import contextlib
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


class Writing(threading.Thread):
    """A checkpoint that is being written; the first process writes the manifest when Orbax is done."""

    def __init__(self, step: int, response: Any, directory: Path) -> None:
        super().__init__(name=f"paraxis-checkpoint-{step}")
        self.step, self.error = step, None
        self._response, self._directory = response, directory
        with contextlib.suppress(AttributeError):
            # Orbax can start no threads once Python ends them, and there is no public hook before that.
            threading._register_atexit(_finish, weakref.ref(self))  # pyright: ignore[reportAttributeAccessIssue]
        self.start()

    def run(self) -> None:
        try:
            self._response.result()
            if processes.is_first():
                found = {path.relative_to(self._directory): path for path in sorted(self._directory.rglob("*"))}
                kinds = {name.as_posix(): _size_and_crc(path) for name, path in found.items() if path.is_file()}
                with files.replaced(self._directory / NAME) as file:
                    file.write(json.dumps(kinds).encode())
        except Exception as error:
            self.error = error


def _finish(reference: weakref.ref[Writing]) -> None:
    if (writing := reference()) is not None:
        writing.join()
        if writing.error is not None:
            words = "the checkpoint of step %d could not be written: %s"
            logging.getLogger("paraxis").error(words, writing.step, writing.error)


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
        if (found := _size_and_crc(directory / name)) != expected:
            return f"{name} has size and CRC-32 {found}, not {expected}"
    return None


def _size_and_crc(path: Path) -> list[int]:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
        return [file.tell(), crc]
