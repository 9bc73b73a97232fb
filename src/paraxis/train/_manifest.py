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


class Writing(threading.Thread):
    """A checkpoint that is being written; the first process writes the manifest when Orbax is done."""

    def __init__(self, step: int, response: Any, directory: Path) -> None:
        super().__init__(name=f"paraxis-checkpoint-{step}")
        self.step, self.error = step, None
        self._response, self._directory = response, directory
        _unfinished.add(self)
        _wait_at_exit()
        self.start()

    def run(self) -> None:
        try:
            self._response.result()
            if processes.is_first():
                names = sorted(p.relative_to(self._directory).as_posix() for p in self._directory.rglob("*"))
                kinds = {name: _size_and_crc(self._directory / name) for name in names if name != NAME}
                with files.replaced(self._directory / NAME) as file:
                    file.write(json.dumps({name: kind for name, kind in kinds.items() if kind}).encode())
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
        if (found := _size_and_crc(directory / name)) != expected:
            return f"{name} has size and CRC-32 {found}, not {expected}" if found else f"{name} is missing"
    return None


def _size_and_crc(path: Path) -> list[int] | None:
    """Return those of a file; ``None`` if there is none."""
    if not path.is_file():
        return None
    size, crc = 0, 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return [size, crc]
