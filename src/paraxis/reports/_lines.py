"""The user's line behind an operation, and the verb of ours that stands in it.

An operation comes from a chain of calls. The user's is the innermost one that is neither JAX's, nor ours, nor another
library's; if there is none, as in an optimiser's step, it is a library's, and if there is none either, nobody's.
"""

import dataclasses
import functools
import linecache
import os
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax

from paraxis._core import primitives

_OURS = f"{Path(__file__).parent.parent}{os.sep}"
_JAX = f"{Path(jax.__file__).parent}{os.sep}"
_DOOR = f"{Path(__file__).parent / '_explain.py'}"
_REDUCES = primitives.reduce.__code__.co_filename, primitives.reduce.__name__
_WRAPPERS = f"{_OURS}_calls{os.sep}"
_LIBRARIES = tuple(
    f"{path}{os.sep}" for name in ("purelib", "platlib", "stdlib", "platstdlib") if (path := sysconfig.get_path(name))
)
_MOST = 3
"""The most lines that are named in one place."""


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a program's source.

    Attributes:
        file: where.
        number: of the line.
        function: around it; empty if unknown.
    """

    file: str
    number: int
    function: str = ""

    @property
    def code(self) -> str:
        """The text of the line, if it can be read."""
        return linecache.getline(self.file, self.number).strip()

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.number}"


Behind = tuple[Line | None, str | None]
"""A line, and the verb of ours in it."""


@functools.lru_cache(maxsize=4096)
def side(file: str) -> str:
    """Return whose a file is."""
    if not file or file.startswith((_JAX, "<frozen")):
        return "jax"
    if file.startswith(_OURS):
        return "ours"
    return "library" if file.startswith(_LIBRARIES) else "user"


def behind(frames: Sequence[tuple[str, int, str]]) -> Behind:
    """Return the line that a chain of calls, the innermost first, comes from, and the verb that is called there."""
    inside: list[tuple[str, int, str]] = []
    # A reduction calls nobody. But JAX lowers alike ones once, and those of the first stand before those of another.
    begins = (number for number, frame in enumerate(frames) if (frame[0], frame[2]) == _REDUCES)
    for frame in frames[max(begins, default=0) :]:
        if frame[0] == _DOOR:  # who asks for the report is not where its operations come from
            break
        inside.append(frame)
    for wanted in ("user", "library"):
        verb = None
        for file, number, function in inside:
            whose = side(file)
            if whose == wanted:
                return Line(file, number, function.rpartition(".")[2]), verb
            if whose == "ours" and not file.startswith(_WRAPPERS):
                verb = _verb(function) or verb
    return None, None


def nearest(chains: Iterable[Sequence[tuple[str, int, str]]]) -> Behind:
    """Return the same of the first chain that comes from a line."""
    found = (behind(chain) for chain in chains)
    return next((one for one in found if one[0] is not None), (None, None))


def some(lines: Sequence[Line]) -> str:
    """Return the names of lines, of many the first ones."""
    more = f" and {len(lines) - _MOST} more" if len(lines) > _MOST else ""
    return ", ".join(map(str, lines[:_MOST])) + more


def _verb(function: str) -> str | None:
    name = function.partition(".<locals>")[0]
    return None if name.startswith("_") else f"px.{name}"
