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

_FOLDERS = (*Path(__file__).parents[:2], Path(jax.__file__).parent, sysconfig.get_path("stdlib"))
_REPORTS, _OURS, _JAX, _STANDARD = (f"{folder}{os.sep}" for folder in _FOLDERS)


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a program's source: its file, and its number there."""

    file: str
    number: int

    @property
    def code(self) -> str:
        """The text of the line, if it can be read."""
        return linecache.getline(self.file, self.number).strip()

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.number}"


def behind(frames: Sequence[tuple[str, int, str]]) -> tuple[Line | None, str | None]:
    """Return the line that a chain of calls, the innermost first, comes from, and the verb that is called there."""
    inside = list(itertools.takewhile(lambda frame: not frame[0].startswith(_REPORTS), frames))
    for wanted in ("user", "library"):
        verb: str | None = None
        for file, number, function in inside:
            side = _side(file)
            if side == wanted:
                return Line(file, number), verb
            name = function.partition(".<locals>")[0].partition("._")[0]
            if side == "ours" and not name.startswith("_"):
                verb = f"px.{name}"
    return None, verb


@functools.lru_cache(maxsize=4096)
def _side(file: str) -> str:
    if not file or file.startswith((_JAX, "<frozen")):
        return "jax"
    if file.startswith(_OURS):
        return "ours"
    is_installed = not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)
    return "library" if is_installed or file.startswith(_STANDARD) else "user"
