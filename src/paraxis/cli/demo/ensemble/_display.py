"""The display: progress while training, and tables and a plot at the end."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from paraxis.cli.demo._devices import describe
from paraxis.cli.demo.ensemble._scoring import Scored
from paraxis.cli.demo.ensemble._training import Run
from paraxis.ensembles import Epoch

_NUM_LINES = 5


class Display:
    """A live bar of the epochs, and now and then a line that stays. Call it with each epoch."""

    def __init__(self, console: Console, title: str, num_epochs: int) -> None:
        self._every = max(1, num_epochs // _NUM_LINES)
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[now]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._console = console
        self._task = self._progress.add_task(title, total=num_epochs, now="compiling …")

    def __call__(self, done: Epoch) -> None:
        losses = np.asarray(done.outputs)
        now = f"loss {losses.mean():.3f}, members from {losses.min():.3f} to {losses.max():.3f}"
        self._progress.update(self._task, completed=done.number + 1, now=now)
        if (done.number + 1) % self._every == 0:
            self._console.print(f"  epoch {done.number + 1:3}  {now}", highlight=False)

    def __enter__(self) -> "Display":
        self._console.print(f"[bold]An ensemble on {self._progress.tasks[self._task].description}")
        self._progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._progress.stop()


def scores_table(scored: Mapping[str, Scored]) -> Table:
    """Show a member, on average, beside all together, on each set of digits."""
    table = Table(title="Held-out digits", title_justify="left")
    table.add_column("digits")
    table.add_column("members")
    for name in ("accuracy", "NLL", "calibrated\nNLL", "calibration\nerror", "members\ndiffer"):
        table.add_column(name, justify="right")
    for name, found in scored.items():
        for who, x, differ in (("one", found.member, ""), ("all", found.ensemble, f"{found.disagreement:.1%}")):
            numbers = (f"{y:.3f}" for y in (x.nll, x.calibrated_nll, x.calibration_error))
            table.add_row(name, who, f"{x.accuracy:.1%}", *numbers, differ)
    return table


def summary_table(many: Run, one: Run, difference: tuple[float, float], devices: Sequence[Any]) -> Table:
    """Show what was run, what it took, and how little it differs from one device."""
    table = Table(title="Ensemble", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    table.add_row("devices", describe(list(devices)))
    table.add_row("members", f"{len(many.ensemble)}")
    table.add_row("epochs", f"{len(many.seconds)}")
    table.add_row("time per epoch", _milliseconds(many))
    if one is not many:
        table.add_row("  on one device", _milliseconds(one))
    largest = f"{difference[0]:.1e} from one device (largest parameter: {difference[1]:.1f})"
    table.add_row("largest difference", "none: this was one device" if one is many else largest)
    return table


def _milliseconds(run: Run) -> str:
    return f"{1000 * run.seconds_per_epoch:.0f} ms (median)"


def draw_plot(scored: Mapping[str, Scored], path: Path) -> None:
    """Reliability diagrams as a PNG: how often predictions are right, against how sure they were."""
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    for axes, (name, found) in zip(figure.subplots(1, len(scored)), scored.items(), strict=True):
        axes.plot([0, 1], [0, 1], "--", color="black", lw=1, label="calibrated")
        for label, colour, shown in (
            ("one member", "tab:orange", found.member_reliability),
            ("all members", "tab:blue", found.ensemble_reliability),
        ):
            confidence, accuracy, rows = (np.asarray(x) for x in shown)
            axes.plot(confidence, accuracy, "-", color=colour, lw=1)
            axes.scatter(confidence, accuracy, s=4 + 120 * rows / rows.sum(), color=colour, label=label)
        axes.set(
            title=f"Held-out digits, {name}", xlabel="confidence", ylabel="accuracy", xlim=(0, 1.03), ylim=(0, 1.03)
        )
        axes.grid(alpha=0.3)
    figure.axes[0].legend(loc="upper left", title="size: share of the digits")
    figure.savefig(path, dpi=150)
