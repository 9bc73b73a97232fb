"""The display of a fit: a line that changes while it runs, a plot of its iterations afterwards."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from paraxis.cli._errors import printable
from paraxis.solve import Iteration

_LONG = 10  # seconds


@contextlib.contextmanager
def told_of_reading(path: Path, *, quiet: bool = False) -> Iterator[None]:
    """Within, tell on standard error that a file is read; where no line can change, if it takes long."""
    console, text = Console(stderr=True, quiet=quiet), escape(printable(f"reading {path}"))
    if console.is_terminal:
        with console.status(text):
            yield
        return
    timer = threading.Timer(_LONG, lambda: console.print(f"{text} …", highlight=False))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Live:
    """A line that tells of the last iteration; where it could not change, some lines that stay. Call it with each.

    Args:
        console: where to.
        title: what is done.
        value: what the value of an iteration is, see :func:`value_name`.
    """

    def __init__(self, console: Console, title: str, value: str) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            TextColumn("{task.fields[now]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._console, self._title, self._value = console, title, value
        self._task = self._progress.add_task(title, total=None, now="compiling …")

    def __call__(self, seen: Iteration) -> None:
        now = (
            f"iteration {seen.iter_num}  {self._value} {seen.value:.6g}  error {seen.error:.2g}  "
            f"{seen.data_passes} passes over the data"
        )
        self._progress.update(self._task, now=now)
        if not self._console.is_terminal and seen.iter_num & (seen.iter_num - 1) == 0:  # 1, 2, 4, 8, …
            self._console.print(f"  {now}", highlight=False)

    def __enter__(self) -> "Live":
        if self._console.is_terminal:
            self._progress.start()
        else:
            self._console.print(f"[bold]{self._title}", highlight=False)
        return self

    def __exit__(self, *_: Any) -> None:
        if self._console.is_terminal:
            self._progress.stop()


def value_name(smooth: bool) -> str:
    """Return what solvers report the value of: they leave out what is not smooth."""
    return "objective" if smooth else "smooth part of the objective"


def draw(history: Sequence[Iteration], smooth: bool, path: Path) -> None:
    """Objective and error of each iteration, as a PNG.

    Unless it is smooth, the values are those of its smooth part, which may rise while an L1 penalty falls.
    """
    numbers = [seen.iter_num for seen in history]
    values = np.array([seen.value for seen in history])
    errors = np.array([seen.error for seen in history])
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharex=True)
    left_over = np.abs(values - values[-1:])
    for axes, heights, title, colour in (
        (left, left_over, f"{value_name(smooth).capitalize()}: distance from its last value", "tab:orange"),
        (right, errors, f"Error: norm of the {'gradient' if smooth else 'proximal gradient'}", "tab:blue"),
    ):
        shown = np.where((heights > 0) & np.isfinite(heights), heights, np.nan)
        axes.plot(numbers, shown, color=colour, marker=".")
        axes.set(title=title, xlabel="iteration")
        if np.isfinite(shown).any():
            axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path, dpi=150)
