"""Tables for the terminal, and the rows of coefficients that they and the file are made of."""

from collections.abc import Sequence

import numpy as np
from rich.console import Group
from rich.markup import escape
from rich.table import Table as Grid
from rich.text import Text

from paraxis.cli._errors import printable
from paraxis.cli.fit._model import Model

_SHOWN = 10  # coefficients in the terminal


def titled(title: str, grid: Grid) -> Group:
    """Return a table below its title, which is not broken into the table's width."""
    return Group(Text(title, style="italic"), grid)


def pairs(title: str, rows: Sequence[tuple[str, str]]) -> Group:
    """Return a table of two columns, names and values."""
    grid = Grid(show_header=False)
    grid.add_column(style="bold")
    grid.add_column()
    for name, value in rows:
        grid.add_row(name, escape(printable(value)))
    return titled(title, grid)


def metrics_grid(title: str, columns: dict[str, dict[str, float]]) -> Group:
    """Metrics side by side, each column with its own heading."""
    grid = Grid()
    grid.add_column("", style="bold")
    for heading in columns:
        grid.add_column(escape(heading), justify="right")
    for name in next(iter(columns.values())):
        grid.add_row(name, *(rounded(found[name]) for found in columns.values()))
    return titled(title, grid)


def strengths_grid(score: str, strengths: Sequence[float], scores: np.ndarray, best: float) -> Group:
    """Return the scores of a cross-validation, ``(num_strengths, folds)``."""
    grid = Grid()
    for heading in ("strength", score, "± over folds"):
        grid.add_column(heading, justify="right")
    for strength, row in zip(strengths, scores, strict=True):
        style = "bold green" if strength == best else None
        grid.add_row(f"{strength:g}", rounded(row.mean()), rounded(row.std()), style=style)
    return titled(f"Cross-validation, {scores.shape[1]} folds", grid)


def coefficients_grid(model: Model, errors: np.ndarray | None) -> Group:
    """Return the largest coefficients, by what a standard deviation of their column changes; with standard errors."""
    rows = sorted(coefficient_rows(model, errors)[len(model.coef) :], key=lambda row: -abs(row[3]))
    several = len(model.coef) > 1
    grid = Grid()
    for heading in [*(["class"] if several else []), "column"]:
        grid.add_column(heading)
    grid.add_column("coefficient", justify="right")
    if errors is not None:
        grid.add_column("± standard error", justify="right")
    grid.add_column("per standard deviation", justify="right")
    for label, column, own, standardised, error in rows[:_SHOWN]:
        name = [escape(printable(text)) for text in ([label, column] if several else [column])]
        grid.add_row(*name, f"{own:.5g}", *([f"{error:.3g}"] if errors is not None else []), f"{standardised:.5g}")
    if len(rows) > _SHOWN:
        grid.caption_justify = "left"
        grid.caption = f"{len(rows) - _SHOWN:,} more in the file"
    return titled("Largest coefficients", grid)


def coefficient_rows(model: Model, errors: np.ndarray | None) -> list[tuple[str, str, float, float, float]]:
    """Return class, column, coefficient in the column's own unit and per standard deviation, and standard error.

    First those of no column. The error, in the column's own unit as well, is NaN where ``errors``, ``(1 + d,)``, is
    ``None``.
    """
    own, intercept = model.in_own_units()
    classes = model.target.classes
    labels = [str(label) for label in (classes[1:] if len(classes) == 2 else classes or ("",))]
    rows = [(label, "(intercept)", *found) for label, *found in zip(labels, intercept, model.intercept, strict=True)]
    for number, label in enumerate(labels):
        for index, source in enumerate(model.recipe.sources):
            rows.append((label, source.name, own[number, index], model.coef[number, index]))
    known = np.full(len(rows), np.nan) if errors is None else errors
    return [(label, column, float(a), float(b), float(e)) for (label, column, a, b), e in zip(rows, known, strict=True)]


def rounded(value: float) -> str:
    return "–" if np.isnan(value) else f"{value:.4g}"
