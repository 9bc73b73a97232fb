"""The progress of a run, and its display: below a notebook's cell, on a terminal's line, elsewhere in lines."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from paraxis._host.progress import Display


@dataclasses.dataclass(frozen=True)
class Progress:
    """The progress of a run.

    Attributes:
        axis: the axis whose elements are run.
        done, elements: elements of this pass that are done, and of all.
        pass_number, passes: the pass under way, from 1, and how many there are; ``None`` if that depends on values.
        seconds_left: in all passes, if each takes as long per element as so far, without what compiling took; ``None``
            if it cannot be known.
    """

    axis: str
    done: int
    elements: int
    pass_number: int
    passes: int | None
    seconds_left: float | None

    def __str__(self) -> str:
        of = "" if self.passes is None else f" of {self.passes}"
        left = "" if self.seconds_left is None else f", {_duration(self.seconds_left)} left"
        return f"pass {self.pass_number}{of}: {self.done:,} of {self.elements:,} {self.axis}{left}"


Show = Callable[[Progress], Any]


@contextlib.contextmanager
def shown(verbose: bool | Show) -> Iterator[Show]:
    """Give what to call with each progress; at the end, also by an error, what was told last is shown."""
    if callable(verbose):
        yield verbose
        return
    if not verbose:
        yield lambda progress: None
        return
    display = Display()
    try:
        yield lambda progress: display.show(progress.__str__, progress.done, progress.elements)
    finally:
        display.close()


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
