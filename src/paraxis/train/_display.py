"""The display of a run: an area in a notebook, a line that changes on a terminal, occasional lines elsewhere."""

import collections
import contextlib
import sys
import time
from collections.abc import Mapping

from paraxis import _html as html
from paraxis._host import notebook
from paraxis.train._callbacks import Event

_REFRESH_SECONDS = 0.25
_FIRST_LINE_SECONDS = 2.0
_MOST_LINE_SECONDS = 60.0
_MOST_LINES = 20


class Display:
    """A run's step, metrics and speed, shown by time and not by step.

    Args:
        start: number of steps done before.
        total: number of steps there will have been, if that is known.
        epochs: likewise.
        shown: whether anything is shown.
    """

    def __init__(self, start: int, total: int | None, epochs: int | None, *, shown: bool) -> None:
        self._is_shown = shown
        self._area = notebook.area() if shown else None
        self._is_terminal = shown and self._area is None and sys.stderr.isatty()
        self._total, self._epochs = total, epochs
        self._step, self._epoch, self._rows = start, 0, 0
        self._shown = start
        self._metrics: Mapping[str, float] = {}
        self._begin = time.monotonic()
        self._first: tuple[float, int] | None = None  # when the first step, which compiles, was done
        self._is_live = self._area is not None or self._is_terminal
        self._interval = _REFRESH_SECONDS if self._is_live else _FIRST_LINE_SECONDS
        self._due = self._begin + self._interval
        self._lines: collections.deque[str] = collections.deque(maxlen=_MOST_LINES)

    def __call__(self, event: Event) -> None:
        """Show an event, or wait until there are more."""
        if not self._is_shown:
            return
        self._step, self._epoch = event.step, event.epoch
        if event.kind == "step":
            self._metrics = event.metrics
            self._rows += event.rows
            if self._first is None:
                self._first, self._rows = (time.monotonic(), event.step), 0
        if event.kind == "evaluate":
            trained = _numbers(self._metrics) if event.step > self._shown else ""
            self.say("  ".join(filter(None, [self._position(), trained, _numbers(event.metrics)])))
            self._shown = event.step
        is_due = event.kind == "step" and time.monotonic() >= self._due
        if is_due or (event.kind == "end" and (self._is_live or event.step > self._shown)):
            self._show()
            self._shown = event.step

    def say(self, text: str) -> None:
        """Show a line that stays."""
        if self._area is not None:
            self._lines.append(text)
            self._show()
        elif self._is_shown:
            print_line(f"\r\x1b[2K{text}" if self._is_terminal else text)

    def flush(self) -> None:
        """Do nothing: nothing waits."""

    def close(self) -> None:
        """Leave what is shown as it is."""
        if self._is_terminal:
            print_line("")

    def _show(self) -> None:
        parts = [self._position(), _numbers(self._metrics), self._rate()]
        line = "  ".join(filter(None, parts))
        if self._area is not None:
            bar = html.progress(self._step, self._total)
            below = "".join(f"<div>{html.escaped(text)}</div>" for text in self._lines)
            self._area.show(f"<div>{bar} {html.escaped(line)}{below}</div>", "\n".join([line, *self._lines]))
        elif self._is_terminal:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(f"\r\x1b[2K{line}")
                sys.stderr.flush()
        else:
            print_line(line)
            self._interval = min(2 * self._interval, _MOST_LINE_SECONDS)
        self._due = time.monotonic() + self._interval

    def _position(self) -> str:
        step = f"step {self._step:,}" + (f" of {self._total:,}" if self._total else "")
        return f"{step}, epoch {self._epoch + 1}" + (f" of {self._epochs}" if self._epochs else "")

    def _rate(self) -> str:
        """Return rows and steps in a second, and the time that is left."""
        if self._first is None or self._step == self._first[1]:
            return ""
        seconds, steps = time.monotonic() - self._first[0], self._step - self._first[1]
        text = f"{self._rows / seconds:,.4g} rows/s  {steps / seconds:,.4g} steps/s"
        left = "" if not self._total else f"  {_duration((self._total - self._step) * seconds / steps)} left"
        return f"{text}{left}  {_duration(time.monotonic() - self._begin)} elapsed"


def print_line(text: str) -> None:
    """Print a line on standard error. Where it cannot be written, training goes on unseen."""
    with contextlib.suppress(OSError, ValueError):  # a full disk, nobody who reads, a stream that was closed
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def _numbers(metrics: Mapping[str, float]) -> str:
    names = sorted(metrics.keys() - {"grad_norm"}, key=lambda name: (name != "loss", name))
    return "  ".join(f"{name} {metrics[name]:.4g}" for name in names)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
