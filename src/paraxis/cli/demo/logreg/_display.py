"""The display: an occasional line while it runs, and tables and a plot at the end."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from paraxis.cli.demo._devices import describe
from paraxis.cli.demo.logreg._digits import Digits, Labelled
from paraxis.cli.demo.logreg._fitting import Fit, Run, accuracy, largest_difference, value

_EVERY = 10
_LEAST = 1e-13  # what float64 tells apart; a logarithmic axis has no zero


def lines(console: Console) -> Callable[[int, float, float], None]:
    """Return a function to call with each step, which prints every tenth."""

    def show(number: int, objective: float, error: float) -> None:
        if number % _EVERY == 0:
            console.print(f"  step {number:3}  objective {objective:.6f}, gradient {error:.1e}", highlight=False)

    return show


def comparison_table(fits: Mapping[str, Fit], reference: Fit, digits: Digits) -> Table:
    """Show each solution beside the reference."""
    table = Table(title="The same problem, solved", title_justify="left")
    table.add_column("by")
    for name in ("steps", "passes", "objective\nabove", "coefficients\noff by", "held-out\naccuracy"):
        table.add_column(name, justify="right")
    least = value(reference.coef, digits.train)
    for name, found in fits.items():
        above, differ = value(found.coef, digits.train) - least, largest_difference(found, reference)
        gaps = ("reference", "") if found is reference else (f"{above:.0e}", f"{differ:.0e}")
        table.add_row(name, f"{found.num_steps}", found.passes, *gaps, f"{accuracy(found.coef, digits.held_out):.1%}")
    return table


def summary_table(many: Run, one: Run, devices: Sequence[Any], num_rows: int) -> Table:
    """Show what was run, what it took, and how little it differs from one device."""
    table = Table(title="Logistic regression", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    table.add_row("devices", describe(list(devices)))
    table.add_row("digits", f"{num_rows:,}")
    table.add_row("time per step", _milliseconds(many))
    if one is not many:
        table.add_row("  on one device", _milliseconds(one))
    table.add_row("communicated per step", f"{many.communicated}")
    table.add_row("stopped because", many.reason)
    largest = f"{largest_difference(many, one):.1e} from one device (largest coefficient: {np.abs(one.coef).max():.1f})"
    table.add_row("reference", "scikit-learn's newton-cholesky, tol=1e-12")
    table.add_row("largest difference", "none: this was one device" if one is many else largest)
    return table


def _milliseconds(run: Run) -> str:
    return f"{1000 * run.seconds_per_step:.1f} ms (median)"


def draw_plot(run: Run, other: Fit, reference: Fit, digits: Labelled, path: Path) -> None:
    """Draw how far above the least objective each pass over the data leads, and the coefficients, as a PNG."""
    least = value(reference.coef, digits)
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subfigures(1, 2, squeeze=False)[0]

    axes = left.subplots()
    gaps = [max(value(coef, digits) - least, _LEAST) for coef in run.path]
    axes.plot(run.passes_so_far, gaps, label="Paraxis, L-BFGS in float32")
    axes.axhline(value(other.coef, digits) - least, ls="--", color="tab:orange", label="scikit-learn, default settings")
    axes.set(xlabel="passes over the data", ylabel="objective above the minimum", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend()

    largest = np.abs(run.coef).max()
    for digit, picture in enumerate(right.subplots(2, 5).flat):
        picture.imshow(run.coef[:, digit].reshape(8, 8), cmap="RdBu_r", vmin=-largest, vmax=largest)
        picture.set(title=f"{digit}", xticks=[], yticks=[])
    right.suptitle("Coefficients: red for the digit, blue against it")
    figure.savefig(path, dpi=150)
