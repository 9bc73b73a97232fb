"""The display: a line for each epoch, and a table and a plot at the end."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from paraxis.cli.demo._devices import describe
from paraxis.cli.demo.train._running import BATCH, Run, largest_difference, num_differing
from paraxis.reports import Communication
from paraxis.train import Event


def lines(console: Console) -> Callable[[Event], None]:
    """Return a function to call with each event, which prints those of evaluations."""

    def show(event: Event) -> None:
        if event.kind == "evaluate":
            loss, accuracy = (event.metrics[f"held-out/{name}"] for name in ("loss", "accuracy"))
            now = f"held-out loss {loss:.3f}, accuracy {accuracy:.1%}"
            console.print(f"  epoch {event.epoch + 1:3}, step {event.step:4}  {now}", highlight=False)

    return show


def summary_table(
    whole: Run,
    stopped: Run,
    resumed: Run,
    elsewhere: Run | None,
    devices: Sequence[Any],
    sent: Communication,
) -> Table:
    """Show what was run, where it was cut, and what that changed."""
    table = Table(title="Training", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    table.add_row("devices", describe(list(devices)))
    table.add_row("steps", f"{whole.num_steps} of {BATCH} digits")
    table.add_row("communicated per step", f"{sent}")
    table.add_row("held-out accuracy", f"{whole.history.evaluations[-1].metrics['held-out/accuracy']:.1%}")
    table.add_row("stopped by SIGTERM", f"after step {stopped.num_steps}, and saved")
    differing, number = num_differing(whole.state, resumed.state)
    said = "none" if not differing else f"{differing}"
    table.add_row("arrays that differ", f"{said} of {number}, compared bit by bit with a run that was not stopped")
    table.add_row("losses that differ", f"{_num_losses(whole, resumed)}")
    if elsewhere is not None:
        difference, largest = largest_difference(whole.state, elsewhere.state)
        table.add_row("resumed on 1 device", f"parameters within {difference:.1e} (largest: {largest:.1f})")
    return table


def _num_losses(one: Run, other: Run) -> str:
    curves = [run.history.curve("loss")[1] for run in (one, other)]
    differing = int(np.sum(curves[0] != curves[1]))
    return f"{differing or 'none'} of {len(curves[0])}"


def draw_plot(whole: Run, stopped: Run, resumed: Run, path: Path) -> None:
    """Draw the loss and the held-out accuracy of both runs, and where one of them was stopped, as a PNG."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = zip(figure.subplots(1, 2), ("loss", "held-out/accuracy"), strict=True)
    for axes, metric in panels:
        axes.plot(*whole.history.curve(metric), color="tab:blue", lw=4, alpha=0.4, label="not stopped")
        steps, values = resumed.history.curve(metric)
        for part, colour, label in (
            (steps <= stopped.num_steps, "tab:orange", "until it was stopped"),
            (steps > stopped.num_steps, "tab:green", "resumed"),
        ):
            axes.plot(steps[part], values[part], ".-", color=colour, lw=1, ms=4, label=label)
        axes.axvline(stopped.num_steps, color="black", ls="--", lw=1)
        axes.set(xlabel="step", ylabel=metric.replace("/", " "))
        axes.grid(alpha=0.3)
    figure.axes[0].legend()
    figure.savefig(path, dpi=150)
