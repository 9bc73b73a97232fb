"""One line that changes while something runs: below a notebook's cell, on a terminal, else as an occasional line."""

import collections
import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any

from paraxis import _html as html

_REFRESH = 0.25  # seconds
_FIRST_LINE, _MOST_BETWEEN_LINES = 2.0, 60.0  # where a line cannot change, as in a log
_MOST_LINES = 20  # that stay below a cell


class Display:
    """The progress of a run on standard error; in a notebook, by IPython's display, below the cell."""

    def __init__(self) -> None:
        self._area = _cell()
        self._handle: Any = None
        self._is_line = self._area is None and sys.stderr.isatty()
        self._is_live = self._is_line or self._area is not None
        self._between = _REFRESH if self._is_live else _FIRST_LINE
        self._due = time.monotonic() + (0 if self._is_live else self._between)
        self._waiting: Callable[[], str] | None = None
        self._line, self._done, self._total = "", 0, None
        self._stays: collections.deque[str] = collections.deque(maxlen=_MOST_LINES)

    def show(self, text: Callable[[], str], done: int, total: int | None) -> None:
        """Show the line that ``text`` makes, in place of the one before; not more often than one can read."""
        self._waiting, self._done, self._total = text, done, total
        if time.monotonic() >= self._due:
            self._show()

    def say(self, text: str, *, instead: bool = False) -> None:
        """Show a line that stays; ``instead`` of the one that waits, where a line cannot change."""
        if instead and not self._is_live:
            self._waiting = None
        if self._area is not None:
            self._stays.append(text)
            self._draw()
        else:
            _write(f"\r\x1b[2K{text}\n" if self._is_line else f"{text}\n")

    def close(self) -> None:
        """Show what waits, and leave a terminal's line."""
        if self._waiting is not None:
            self._show()
        if self._is_line and self._line:
            _write("\n")

    def _show(self) -> None:
        self._line, self._waiting = self._waiting() if self._waiting else self._line, None
        if self._area is not None:
            self._draw()
        elif self._is_line:
            _write(f"\r\x1b[2K{self._line}")
        else:
            _write(f"{self._line}\n")
            self._between = min(2 * self._between, _MOST_BETWEEN_LINES)
        self._due = time.monotonic() + self._between

    def _draw(self) -> None:
        assert self._area is not None
        below = "".join(f"<div>{html.escaped(text)}</div>" for text in self._stays)
        shown = f"<div>{html.progress(self._done, self._total)} {html.escaped(self._line)}{below}</div>"
        form = {"text/html": shown, "text/plain": "\n".join([self._line, *self._stays])}
        if self._handle is None:
            self._handle = self._area(form, raw=True, display_id=True)
        else:
            self._handle.update(form, raw=True)


def _cell() -> Callable[..., Any] | None:
    """Return IPython's display in a notebook's kernel, which has loaded IPython; ``None`` elsewhere."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return None if ipython is None or getattr(shell, "kernel", None) is None else ipython.display.display


def _write(text: str) -> None:
    """Write on standard error. Where that cannot be, the run goes on unseen."""
    with contextlib.suppress(OSError, ValueError):  # a full disk, nobody who reads, a stream that was closed
        sys.stderr.write(text)
        sys.stderr.flush()
