"""The progress of a run, and its display."""

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
        seconds_left: in all passes, if each takes as long per element as so far; ``None`` if it cannot be known.
    """

    axis: str
    done: int
    elements: int
    pass_number: int
    passes: int | None
    seconds_left: float | None

    def __str__(self) -> str:
        of = "" if self.passes is None else f" of {self.passes}"
        left = "" if self.seconds_left is None else f", {self.seconds_left:,.0f} s left"
        return f"pass {self.pass_number}{of}: {self.done:,} of {self.elements:,} {self.axis}{left}"


Show = Callable[[Progress], Any]


@contextlib.contextmanager
def shown(verbose: bool | Show) -> Iterator[Show | None]:
    """Give what to call with each progress, if anything."""
    if not verbose or callable(verbose):
        yield verbose or None
    else:
        with contextlib.closing(Display()) as display:
            yield lambda progress: display.show(progress.__str__, progress.done, progress.elements)
