"""The chapter: write digits into files, fit to them in turns, stop, go on, compare and report."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table as Grid

from paraxis._tables import Table
from paraxis.cli.demo._devices import describe, find_devices
from paraxis.cli.demo._digits import Digits, Labelled, load_digits
from paraxis.cli.demo._options import Options
from paraxis.engines import Progress, Stream
from paraxis.solve import estimators as est

_FILES = 8
_AT_ONCE = 500  # rows, on all devices together
_STOP_AT = 10  # passes
_OPTIONS: dict[str, Any] = {"C": 0.1, "tol": 1e-5, "max_iter": 60}


class _Stopped(Exception):  # noqa: N818  it is no error
    pass


def run(options: Options, console: Console) -> None:
    """Run the chapter; files are written to a temporary folder only.

    Raises:
        CommandError: if there are too few devices.
    """
    devices = find_devices(options.devices)
    digits = Digits(*(Labelled(_quarter(x.images), x.labels % 2) for x in load_digits(options.seed)))
    at_once = -(-_AT_ONCE // len(devices))
    with tempfile.TemporaryDirectory(prefix="paraxis-demo-") as folder:
        train, held_out = (_written(x, Path(folder, name)) for x, name in zip(digits, ("train", "new"), strict=True))
        saved = Path(folder, "run")

        def fit(show: Callable[[Progress], None], folder: Path | None) -> est.LogisticRegression:
            engine = Stream(at_once=at_once, folder=folder, save_every=0, verbose=show)
            return est.LogisticRegression(**_OPTIONS, devices=len(devices)).fit(train, engine=engine)

        console.print(f"[bold]Even or odd? {len(train):,} digits in {_FILES} files, {_AT_ONCE} at once")
        try:
            fit(_stopping, saved)
        except _Stopped:
            size = sum(path.stat().st_size for path in saved.iterdir())
            console.print(f"  stopped in pass {_STOP_AT}; {size:,} bytes are saved", highlight=False)
        console.print("[bold]Gone on with")
        resumed = fit(_lines(console), saved)
        console.print("[bold]Without a stop, for comparison")
        begun = time.perf_counter()
        whole = fit(_lines(console), None)
        seconds = time.perf_counter() - begun
        predicted = whole.predict(held_out, engine=Stream(at_once=_AT_ONCE))
    X = digits.train.images
    held = est.LogisticRegression(**_OPTIONS, devices=len(devices)).fit(X, digits.train.labels)
    is_same = whole.coef_.tobytes() == resumed.coef_.tobytes()
    accuracy = float(np.mean(predicted == digits.held_out.labels))
    grid = Grid(title="Rows that stay in files", show_header=False, title_justify="left")
    grid.add_column(style="bold")
    grid.add_column()
    grid.add_row("devices", describe(devices))
    grid.add_row("rows in memory", f"{_AT_ONCE:,} of {len(X):,} at once, and some that are read ahead")
    grid.add_row("iterations", f"{int(whole.n_iter_[0]):,}, {whole.data_passes_:,} passes over the files")
    grid.add_row("time", f"{seconds:.1f} s, without a stop")
    grid.add_row("held-out accuracy", f"[bold green]{accuracy:.1%}[/]")
    grid.add_row("after the stop", f"{'the same bits' if is_same else 'OTHER BITS'} as without")
    largest = float(np.abs(held.coef_).max())
    apart = float(np.abs(held.coef_ - whole.coef_).max())
    grid.add_row("largest difference", f"{apart:.1e} from all rows in memory (largest coefficient: {largest:.2f})")
    console.print(grid)


def _written(digits: Labelled, folder: Path) -> Table:
    """Write digits into files, and return the table that these are."""
    folder.mkdir()
    X = digits.images
    for number, (rows, labels) in enumerate(
        zip(np.array_split(X, _FILES), np.array_split(digits.labels, _FILES), strict=True)
    ):
        np.save(folder / f"X-{number}.npy", rows)
        np.save(folder / f"y-{number}.npy", labels)
    return Table.npy(folder)


def _quarter(images: np.ndarray) -> np.ndarray:
    """Return images with a quarter of the pixels as rows, ``(n, 196)``: each is the mean of four."""
    return images.reshape(-1, 14, 2, 14, 2).mean((2, 4)).reshape(-1, 14 * 14)


def _stopping(progress: Progress) -> None:
    if progress.pass_number == _STOP_AT:
        raise _Stopped


def _lines(console: Console) -> Callable[[Progress], None]:
    def show(progress: Progress) -> None:
        if progress.done == progress.elements and progress.pass_number % 5 == 1:
            console.print(f"  {progress}", highlight=False)

    return show
