"""The progress of a run, and its display: below a notebook's cell, on a terminal's line, elsewhere in lines."""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from paraxis import _html as html
from paraxis._host import notebook

_BETWEEN_LINES = 30.0
"""Seconds between two lines where a line cannot change, as in a log."""

_BETWEEN_CHANGES = 0.25


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
    display = _Display()
    try:
        yield display
    finally:
        display.close()


class _Display:
    """The latest report, shown where there is a place for it, no more often than one can read."""

    def __init__(self) -> None:
        self._area = notebook.area()
        self._is_line = self._area is None and sys.stderr.isatty()
        self._between = _BETWEEN_CHANGES if self._area is not None or self._is_line else _BETWEEN_LINES
        self._due = 0.0
        self._width = 0
        self._waiting: Progress | None = None

    def __call__(self, progress: Progress) -> None:
        self._waiting = progress
        if time.monotonic() >= self._due:
            self._show(progress)

    def close(self) -> None:
        """Show what waits, and leave a terminal's line."""
        if self._waiting is not None:
            self._show(self._waiting)
        if self._width:
            _write("\n")

    def _show(self, progress: Progress) -> None:
        self._waiting = None
        self._due = time.monotonic() + self._between
        text = str(progress)
        if self._area is not None:
            bar = html.progress(progress.done, progress.elements)
            self._area.show(f"<div>{bar} {html.escaped(progress)}</div>", text)
        elif self._is_line:
            _write(f"\r{text.ljust(self._width)}")
            self._width = len(text)
        else:
            _write(f"{text}\n")


def _write(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody reads it; the run goes on
        sys.stderr.write(text)
        sys.stderr.flush()


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
