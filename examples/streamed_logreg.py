"""Logistic regression on digits that stay in files: read in turns, stopped, and resumed to the same bits.

Is a digit even or odd? The pixels of 4,000 digits of MNIST, a quarter of each image, are in eight files. The engine
says how many rows are read at once. The model is that of all rows in memory, to rounding; and a run that is saved in a
folder continues after the last iteration that is there, with the same result.

1,000 other digits are held out. Typical output of ``--devices 8``::

    4,000 digits in 8 files, 500 at once, on 8 devices
      pass 1: 4,000 of 4,000 rows
    stopped in pass 10; 213,491 bytes are saved
      pass 1: 4,000 of 4,000 rows
      pass 11: 4,000 of 4,000 rows
    not stopped
      pass 1: 4,000 of 4,000 rows
      pass 11: 4,000 of 4,000 rows
      pass 21: 4,000 of 4,000 rows
    largest coefficient: 1.31
            fit  iterations  accuracy  coefficients differ by  bits of the fit that was not stopped
        resumed          10     0.871                       0                              the same
    not stopped          10     0.871                       0                              the same
      in memory          10     0.871               4.321e-07                                others
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _setting
import _training
import jax
import numpy as np
from _mnist import Labelled, load_mnist

import paraxis as px

AT_ONCE, STOP_AT = 500, 10  # rows on all devices together; the pass in which the run is stopped
OPTIONS: dict[str, Any] = {"C": 0.1, "tol": 1e-5}

Rows = tuple[np.ndarray, np.ndarray]


class Stopped(Exception):  # noqa: N818  it is no error
    """Ends a run, as a kill would, at a known place."""


def even_or_odd(digits: Labelled) -> Rows:
    """A quarter of the pixels, each the mean of four, ``(n, 196)``; and whether the digit is odd."""
    return digits.images.reshape(-1, 14, 2, 14, 2).mean((2, 4)).reshape(-1, 196), digits.labels % 2


def written(rows: Rows, folder: Path) -> px.Table:
    """The table of rows that are written into a folder."""
    folder.mkdir()
    for name, values in zip(("X", "y"), rows, strict=True):
        np.save(folder / f"{name}.npy", values)
    return px.Table.of_arrays(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("X", "y")))


def fit(table: px.Table, folder: Path | None, *, stop: bool = False) -> px.solve.LogisticRegression:
    def show(progress: px.streaming.Progress) -> None:
        if stop and progress.pass_number == STOP_AT:
            raise Stopped
        if progress.done == progress.elements and progress.pass_number % 10 == 1:
            print(f"  {progress}", flush=True)

    at_once = -(-AT_ONCE // jax.device_count())
    engine = px.Stream(at_once=at_once, progress=show, checkpoint=folder)
    return px.solve.LogisticRegression(**OPTIONS).fit(table, engine=engine)


def draw(path: str | None, coef: np.ndarray) -> None:
    """The coefficients where the pixels are, as a PNG."""
    if path is None:
        return
    from matplotlib.figure import Figure

    figure, largest = Figure(figsize=(4, 4), layout="constrained"), np.abs(coef).max()
    axes = figure.subplots()
    axes.imshow(coef.reshape(14, 14), cmap="RdBu_r", vmin=-largest, vmax=largest)
    axes.set(title="Red: for an odd digit; blue: for an even one", xticks=[], yticks=[])
    figure.savefig(path, dpi=120)
    print(f"plot: {path}")


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    chosen = _setting.options(__doc__, argv)
    digits, test = load_mnist()
    train, held_out = even_or_odd(digits.first(2000) if chosen.quick else digits), even_or_odd(test)
    with tempfile.TemporaryDirectory() as folder:
        table, new = written(train, Path(folder, "train")), written(held_out, Path(folder, "new"))
        saved = Path(folder, "run")
        print(f"{len(table):,} digits on disk, {AT_ONCE} at once, on {_training.where()}", flush=True)
        try:
            fit(table, saved, stop=True)
        except Stopped:
            print(f"stopped in pass {STOP_AT}; {sum(x.stat().st_size for x in saved.iterdir()):,} bytes are saved")
        fits = {"resumed": fit(table, saved)}
        print("not stopped", flush=True)
        fits["not stopped"] = fit(table, None)
        predicted = fits["resumed"].predict(new)
    fits["in memory"] = px.solve.LogisticRegression(**OPTIONS).fit(*train)

    whole, rows = fits["not stopped"], []
    for name, model in fits.items():
        accuracy = float(np.mean(model.predict(held_out[0]) == held_out[1]))
        largest = float(np.abs(model.coef_ - whole.coef_).max())
        bits = "the same" if model.coef_.tobytes() == whole.coef_.tobytes() else "others"
        rows.append((name, int(model.n_iter_[0]), accuracy, largest, bits))
    print(f"largest coefficient: {np.abs(whole.coef_).max():.2f}")
    header = ["fit", "iterations", "accuracy", "coefficients differ by", "bits of the fit that was not stopped"]
    _setting.table(header, rows)
    draw(chosen.plot, whole.coef_[0])
    return {"fits": fits, "predicted": predicted, "held_out": held_out}


if __name__ == "__main__":
    main()
