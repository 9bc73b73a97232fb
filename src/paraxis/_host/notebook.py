"""An area below a notebook's cell that changes while the cell runs, by what every such kernel has: IPython's display.

Nothing else is needed, no widgets and no extension; who executes a notebook without a browser gets the last form.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

_SECONDS = 0.25
"""The least time between two forms; a browser need not show more."""


class Area:
    """An area that shows one thing at a time."""

    def __init__(self, display: Callable[..., Any]) -> None:
        self._display = display
        self._handle: Any = None
        self._due = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Return whether what is shown is old enough to be replaced."""
        return time.monotonic() >= self._due

    def show(self, html: str, text: str) -> None:
        """Show something in place of what is there: as HTML, and as text where there is no HTML."""
        form = {"text/html": html, "text/plain": text}
        if self._handle is None:
            self._handle = self._display(form, raw=True, display_id=True)
        else:
            self._handle.update(form, raw=True)
        self._due = time.monotonic() + _SECONDS


def area() -> Area | None:
    """Return an area below the cell that runs; ``None`` where no notebook's kernel does, as on a terminal."""
    # A kernel has loaded IPython. Whoever has not, is none; and to look costs nothing.
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if ipython is None or getattr(shell, "kernel", None) is None:
        return None
    return Area(ipython.display.display)
