"""The display: progress while training, a plot and a table at the end."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from paraxis.cli.demo._devices import describe
from paraxis.cli.demo._digits import Labelled
from paraxis.cli.demo._options import Options
from paraxis.cli.demo.fedavg._training import Round, Run, largest_difference

_NUM_LINES = 6
_TESTED = "held-out accuracy"


class Display:
    """A live bar of the rounds, and now and then a line that stays. Call it with each round."""

    def __init__(self, console: Console, title: str, num_rounds: int) -> None:
        self._every = max(1, num_rounds // _NUM_LINES)
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
        self._task = self._progress.add_task(title, total=num_rounds, now="compiling …")

    def __call__(self, done: Round) -> None:
        now = f"{_TESTED} {done.accuracy:.3f}  loss {done.loss:.3f}  {done.seconds:.3f} s/round"
        self._progress.update(self._task, completed=done.number, now=now)
        if done.number % self._every == 0:
            self._console.print(f"  round {done.number:4}  {now}", highlight=False)

    def __enter__(self) -> "Display":
        self._console.print(f"[bold]Federated averaging on {self._progress.tasks[self._task].description}")
        self._progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._progress.stop()


def draw_plot(run: Run, path: Path) -> None:
    """Held-out accuracy and training loss of each round, as a PNG."""
    rounds = [r.number for r in run.rounds]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(rounds, [r.accuracy for r in run.rounds], color="tab:blue")
    left.set(title="Held-out accuracy", xlabel="round", ylim=(0, 1))
    right.plot(rounds, [r.loss for r in run.rounds], color="tab:orange")
    right.set(title="Training loss, mean over the round's clients", xlabel="round", ylim=(0, None))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path, dpi=150)


def summary_table(many: Run, one: Run, federation: Labelled, options: Options, devices: Sequence[Any]) -> Table:
    """Show what was run, what it took, and how little it differs from one device."""
    labels = np.mean([len(np.unique(own)) for own in federation.labels])
    table = Table(title="Federated averaging", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    table.add_row("devices", describe(list(devices)))
    table.add_row("clients", f"{options.clients}, {options.per_round} in each round")
    table.add_row("digits per client", f"{federation.labels.shape[1]}, with {labels:.1f} labels on average")
    table.add_row("parameters", f"{many.num_params:,}")
    table.add_row("rounds", f"{options.rounds:,}")
    table.add_row("time to compile", f"{many.compile_seconds:.1f} s")
    table.add_row("time per round", f"{_milliseconds(many)} (median)")
    if one is not many:
        table.add_row("  on one device", f"{_milliseconds(one)} (median)")
    table.add_row("communicated per round", _communicated(many))
    table.add_row(_TESTED, f"[bold green]{many.rounds[-1].accuracy:.1%}[/]")
    table.add_row("largest difference", _difference(many, one))
    return table


def _milliseconds(run: Run) -> str:
    return f"{1000 * run.seconds_per_round:.0f} ms"


def _communicated(run: Run) -> str:
    found = run.communication
    kinds = ", ".join(f"{count} {kind.replace('_', '-')}" for kind, count in found.count.items() if count)
    return f"{found.total_bytes:,} bytes per device ({kinds or 'nothing'})"


def _difference(many: Run, one: Run) -> str:
    if many is one:
        return "none: this was one device"
    largest = max(float(np.max(np.abs(leaf))) for leaf in one.params.values())
    return f"{largest_difference(many, one):.1e} from one device (largest parameter: {largest:.1f})"
