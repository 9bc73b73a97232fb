"""The user's line behind an operation, and the verb of ours that stands in it.

An operation comes from a chain of calls. The user's is the innermost one that is neither JAX's, nor ours, nor another
library's; if there is none, as in an optimiser's step, it is a library's, and if there is none either, nobody's.
"""

import dataclasses
import functools
import itertools
import linecache
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import jax

from paraxis._core import primitives

_OURS = f"{Path(__file__).parent.parent}{os.sep}"
_JAX = f"{Path(jax.__file__).parent}{os.sep}"
_REPORTS = f"{Path(__file__).parent}{os.sep}"
_REDUCES = primitives.reduce.__code__.co_filename, primitives.reduce.__name__
_LIBRARIES = tuple(
    f"{path}{os.sep}" for name in ("purelib", "platlib", "stdlib", "platstdlib") if (path := sysconfig.get_path(name))
)


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


def behind(frames: Sequence[tuple[str, int, str]]) -> tuple[Line | None, str | None]:
    """Return the line that a chain of calls, the innermost first, comes from, and the verb that is called there."""
    # JAX lowers equal reductions once: the frames of the first one stand before those of each.
    last = max((number for number, frame in enumerate(frames) if (frame[0], frame[2]) == _REDUCES), default=0)
    inside = list(itertools.takewhile(lambda frame: not frame[0].startswith(_REPORTS), frames[last:]))
    verb: str | None = None
    for wanted in ("user", "library"):
        verb = None
        for file, number, function in inside:
            side = _side(file)
            if side == wanted:
                return Line(file, number, function.rpartition(".")[2]), verb
            name = function.partition(".<locals>")[0]
            if side == "ours" and not name.startswith("_"):
                verb = f"px.{name}"
    return None, verb


@functools.lru_cache(maxsize=4096)
def _side(file: str) -> str:
    """Return whose a file is."""
    if not file or file.startswith((_JAX, "<frozen")):
        return "jax"
    if file.startswith(_OURS):
        return "ours"
    return "library" if file.startswith(_LIBRARIES) else "user"
