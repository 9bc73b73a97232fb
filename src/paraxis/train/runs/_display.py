"""The display of a run: a live one in a notebook or on a terminal, occasional lines elsewhere. By time, not step."""

import abc
import collections
import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from paraxis import _html as html
from paraxis._calls.extras import needed
from paraxis._host import notebook
from paraxis.train.runs._events import Event

_REFRESH_SECONDS = 0.25
_FIRST_LINE_SECONDS = 2.0
_MOST_LINE_SECONDS = 60.0
_MOST_SAID = 20


class Status:
    """The status of a run: its place, its speed, its last metrics.

    Args:
        start: steps done before.
        total: steps there will have been, if that is known.
        epochs: likewise.
        clock: seconds.
    """

    def __init__(self, start: int, total: int | None, epochs: int | None, clock: Callable[[], float]) -> None:
        self.step = start
        self.total = total
        self._epochs = epochs
        self._clock = clock
        self._epoch = 0
        self._metrics: dict[str, float] = {}
        self._rows = 0
        self._before: tuple[float, int, int] | None = None  # time, steps, rows when the rate was last taken
        self._rates: tuple[float, float] | None = None

    def __call__(self, event: Event) -> None:
        """Note an event."""
        self.step, self._epoch = event.step, event.epoch
        if event.kind == "step":
            self._metrics, self._rows = event.metrics, self._rows + event.rows
            # The first step is compiled, and is not counted.
            self._before = self._before or (self._clock(), event.step, self._rows)

    def pace(self) -> None:
        """Take the rates of the time since this was last called."""
        if self._before is None:
            return
        now, (then, steps, rows) = self._clock(), self._before
        if now <= then or self.step == steps:
            return
        new = (self.step - steps) / (now - then), (self._rows - rows) / (now - then)
        old = self._rates or new
        self._rates = 0.5 * old[0] + 0.5 * new[0], 0.5 * old[1] + 0.5 * new[1]
        self._before = now, self.step, self._rows

    def place(self) -> str:
        """Step and epoch."""
        step = f"step {self.step:,}" + (f" of {self.total:,}" if self.total else "")
        return f"{step}, epoch {self._epoch + 1}" + (f" of {self._epochs}" if self._epochs else "")

    def numbers(self) -> str:
        """Return the last metrics of training."""
        names = sorted(self._metrics.keys() - {"grad_norm"}, key=lambda name: (name != "loss", name))
        return _numbers({name: self._metrics[name] for name in names})

    def rate(self) -> str:
        """Return rows and steps in a second, and the time that is left."""
        if self._rates is None:
            return ""
        steps, rows = self._rates
        text = f"{_quantity(rows)} rows/s  {_quantity(steps)} steps/s"
        if self.total and steps:
            text += f"  {_duration((self.total - self.step) / steps)} left"
        return text


def _numbers(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def _quantity(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


class Display(abc.ABC):
    """Something that shows a run while it goes on."""

    @abc.abstractmethod
    def __call__(self, event: Event) -> None:
        """Show an event, or wait until there are more."""

    @abc.abstractmethod
    def say(self, text: str) -> None:
        """Show a line that stays."""

    def flush(self) -> None:  # noqa: B027  there is nothing to be done by most
        """Show what waits to be shown."""

    @abc.abstractmethod
    def close(self) -> None:
        """End the display: the run is over."""


class Lines(Display):
    """A line for each evaluation, and now and then one for steps: after 2 seconds, 4, 8, …, then each minute."""

    def __init__(self, status: Status, stream: TextIO, clock: Callable[[], float]) -> None:
        self._status = status
        self._stream = stream
        self._clock = clock
        self._interval = _FIRST_LINE_SECONDS
        self._due = clock() + self._interval
        self._shown = status.step

    def __call__(self, event: Event) -> None:
        """Print a line if it is time."""
        self._status(event)
        is_due = event.kind == "step" and self._clock() >= self._due
        if is_due:
            self._interval = min(2 * self._interval, _MOST_LINE_SECONDS)
        if is_due or event.kind == "evaluate" or (event.kind == "end" and event.step > self._shown):
            self._show(event)

    def _show(self, event: Event) -> None:
        """Print what is new: of one step, training and rates are shown once."""
        evaluated = _numbers(event.metrics) if event.kind == "evaluate" else ""
        parts = [self._status.place(), evaluated]
        if event.step > self._shown or not evaluated:
            self._status.pace()
            parts = [self._status.place(), self._status.numbers(), evaluated, self._status.rate()]
        self._shown = event.step
        self.say("  ".join(filter(None, parts)))
        self._due = self._clock() + self._interval

    def say(self, text: str) -> None:
        """Print it."""
        print_line(text, self._stream)

    def close(self) -> None:
        """Do nothing: there is nothing to put back."""


class Live(Display):
    """A line at the bottom of the terminal; above it, one that stays for each evaluation."""

    def __init__(self, status: Status, console: Any, clock: Callable[[], float]) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._status = status
        self._clock = clock
        self._due = clock()
        # Its thread redraws four times a second, so that time goes on while a step does.
        self._progress = Progress(
            TextColumn("{task.fields[place]}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[numbers]}"),
            TextColumn("[dim]{task.fields[rate]}"),
            TimeElapsedColumn(),
            console=console,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task(
            "", total=status.total, completed=status.step, place="starting …", numbers="", rate=""
        )
        self._progress.start()

    def __call__(self, event: Event) -> None:
        """Change the line if it is time."""
        self._status(event)
        if event.kind == "evaluate":
            self.say(f"{self._status.place()}  {_numbers(event.metrics)}")
        elif event.kind == "end" or (event.kind == "step" and self._clock() >= self._due):
            self._due = self._clock() + _REFRESH_SECONDS
            self._show()

    def say(self, text: str) -> None:
        """Print a line above."""
        with contextlib.suppress(OSError):
            self._progress.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the line as it is, and give the terminal back."""
        with contextlib.suppress(OSError):
            self._progress.stop()

    def _show(self) -> None:
        status = self._status
        status.pace()
        with contextlib.suppress(OSError):
            self._progress.update(
                self._task,
                completed=status.step,
                place=status.place(),
                numbers=status.numbers(),
                rate=status.rate(),
            )


class InNotebook(Display):
    """An area below the cell: a bar, what came out last, and the last lines that were said."""

    def __init__(self, status: Status, area: notebook.Area, clock: Callable[[], float]) -> None:
        self._status = status
        self._area = area
        self._clock = clock
        self._start = clock()
        self._said: collections.deque[str] = collections.deque(maxlen=_MOST_SAID)
        self._show()

    def __call__(self, event: Event) -> None:
        """Change what is shown if it is time."""
        self._status(event)
        if event.kind == "evaluate":
            self.say(f"{self._status.place()}  {_numbers(event.metrics)}")
        elif event.kind == "end" or (event.kind == "step" and self._area.is_due):
            self._show()

    def say(self, text: str) -> None:
        """Keep a line below."""
        self._said.append(text)
        self._show()

    def close(self) -> None:
        """End the display; what is shown last stays."""

    def _show(self) -> None:
        status = self._status
        status.pace()
        parts = [status.place(), status.numbers(), status.rate(), f"{_duration(self._clock() - self._start)} elapsed"]
        line = "  ".join(filter(None, parts))
        said = "".join(f"<div>{html.escaped(text)}</div>" for text in self._said)
        bar = html.progress(status.step, status.total)
        self._area.show(f"<div><div>{bar} {html.escaped(line)}</div>{said}</div>", "\n".join([line, *self._said]))


class Nothing(Display):
    """Shows nothing."""

    def __call__(self, event: Event) -> None:
        """Show nothing."""

    def say(self, text: str) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Do nothing: there is nothing to put back."""


def print_line(text: str, stream: TextIO | None = None) -> None:
    """Print a line, by default on standard error. Where it cannot be written, training goes on unseen."""
    with contextlib.suppress(OSError, ValueError):  # a full disk, nobody who reads, a stream that was closed
        print(text, file=stream or sys.stderr, flush=True)


def display_for(progress: bool | None, start: int, total: int | None, epochs: int | None) -> Display:
    """Return a live area in a notebook, a live line on a terminal, and lines elsewhere; or nothing.

    Raises:
        ModuleNotFoundError: if ``progress`` is True, and rich is missing where it is needed.
    """
    if progress is False:
        return Nothing()
    clock = time.monotonic
    status = Status(start, total, epochs, clock)
    if (area := notebook.area()) is not None:
        return InNotebook(status, area, clock)
    console = _console(progress)
    return Lines(status, sys.stderr, clock) if console is None else Live(status, console, clock)


def _console(progress: bool | None) -> Any:
    """Rich's, if a line can change there."""
    try:
        with needed("px.fit: progress=True", "train", "or leave progress out"):
            from rich.console import Console
    except ModuleNotFoundError:
        if progress is None:
            return None
        raise
    console = Console(stderr=True)
    # Rich takes FORCE_COLOR, which many set for logs, for a terminal; and elsewhere it cuts lines at 80 columns.
    is_terminal = sys.stderr.isatty() and console.is_terminal and not console.is_dumb_terminal
    return console if is_terminal else None
