"""A checkpoint that is written, and then its files' sizes and CRC-32, since Orbax loads flipped bits in silence."""

import concurrent.futures.thread  # noqa: F401  # first: exit handlers run in reverse order, so ours come before its own
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
_under_way: weakref.WeakSet["Writing"] = weakref.WeakSet()


class Writing(threading.Thread):
    """A checkpoint that is being written; the first process writes the manifest when Orbax is done."""

    def __init__(self, step: int, response: Any, directory: Path) -> None:
        super().__init__(name=f"paraxis-checkpoint-{step}")
        self.step, self.error, self._response, self._directory = step, None, response, directory
        _under_way.add(self)
        self.start()

    def run(self) -> None:
        try:
            self._response.result()
            if processes.is_first():
                content = json.dumps(_sums(self._directory)).encode()
                with files.replaced(self._directory / NAME) as file:
                    file.write(content)
        except Exception as error:
            self.error = error


def _finish() -> None:
    for writing in _under_way:
        writing.join()
        if writing.error is not None:
            logging.getLogger("paraxis").error(
                "the checkpoint of step %d could not be written: %s", writing.step, writing.error
            )


with contextlib.suppress(AttributeError):
    # Orbax can start no threads once Python ends them, and there is no public hook before that.
    threading._register_atexit(_finish)  # pyright: ignore[reportAttributeAccessIssue]


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
    sums = _sums(directory)
    wrong = next((name for name, expected in written.items() if sums.get(name) != expected), None)
    return wrong and f"{wrong} has size and CRC-32 {sums.get(wrong)}, not {written[wrong]}"


def _sums(directory: Path) -> dict[str, list[int]]:
    sums = {}
    for path in sorted(path for path in directory.rglob("*") if path.is_file() and path.name != NAME):
        crc = 0
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                crc = zlib.crc32(block, crc)
            sums[path.relative_to(directory).as_posix()] = [file.tell(), crc]
    return sums
