"""The curves of a run, as a picture."""

import tempfile
from pathlib import Path
from typing import Any

from paraxis._calls.extras import needed
from paraxis._host import files
from paraxis.errors import DataError
from paraxis.train.runs._history import History


def require_matplotlib() -> Any:
    """Return what draws, or a clear error now instead of at the end of a run."""
    with needed("px.fit: plot=", "train"):
        from matplotlib.figure import Figure
    return Figure


def require_png(path: Path) -> None:
    """Refuse what would be a PNG under another name.

    Raises:
        DataError: saying what to write.
    """
    if path.suffix.lower() != ".png":
        raise DataError(f"px.fit: plot must be the path of a PNG, got {str(path)!r}; write plot={f'{path.stem}.png'!r}")


def require_place(path: Path) -> None:
    """Refuse now a place where nothing could be written at the end of a run. Its directory is made.

    Raises:
        DataError: if there is a directory at that place.
        OSError: if it cannot be written to.
    """
    if path.is_dir():
        raise DataError(f"px.fit: plot: {path} is a directory; name a file in it: plot='{path / 'curves.png'}'")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path.parent):
        pass


def draw(history: History, path: Path) -> None:
    """Draw a panel for each metric, of training and all evaluations together, as a PNG that is whole or absent."""
    panels = _panels(history)
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    # A figure of its own, not pyplot's: nobody's backend is touched.
    figure = require_matplotlib()(figsize=(4.5 * columns, 3.2 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, (title, curves) in zip(grid, panels.items(), strict=False):
        for label, metric in curves.items():
            steps, values = history.curve(metric)
            is_sparse = "/" in metric
            axes.plot(steps, values, label=label, marker="." if is_sparse else None, linewidth=1.5 if is_sparse else 1)
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        axes.legend()
    for axes in grid[len(panels) :]:
        axes.remove()
    with files.replaced(path) as file:
        figure.savefig(file, format="png", dpi=120)


def _panels(history: History) -> dict[str, dict[str, str]]:
    """Title → label of a curve → metric."""
    panels: dict[str, dict[str, str]] = {}
    for record in (*history.steps[-1:], *history.epochs[-1:]):
        for name in record.metrics:
            panels.setdefault(name, {})["training"] = name
    for record in history.evaluations:
        for name in record.metrics:
            label, _, title = name.partition("/")
            panels.setdefault(title, {})[label] = name
    return panels or {"loss": {}}
