"""Logistic regression on a CSV of several GB, in bounded memory: as it is, and written as Parquet once.

Sixty readings a row of sensors, and whether the machine stops within the hour. The file is made once, a part at a time,
and stays in ``--folder``; ``--gigabytes`` is its size. Rows are parsed, a few megabytes at a time, whenever the solver
needs them. A Parquet file costs one such pass to write, and then a pass over it is much shorter. The model is the same
by either, and near the one that the rows were made by.

Typical output of ``--devices 2``, on two cores::

    /tmp/paraxis-large-csv/2GB.csv: 1.94 GB, made in 31 s
    5,040,000 rows on 2 devices, 800MB allowed, 156 MB held so far
    written as Parquet in one pass, 21.1 s
    rows from  s in all  passes  s a pass  coefficients off by  MB at most
          CSV     438.1      23     19.05             0.002573         859
      Parquet     42.53      23     1.849             0.002573         775
    the two models' coefficients differ by 0.0e+00
"""

import argparse
import os
import resource
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import _setting
import _training
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

import paraxis as px

SENSORS, ROWS, ROW_BYTES = 60, 20_000, 397  # columns; rows that are made at once; bytes of one in the file, on average
MEMORY = "800MB"
NAMES = [f"sensor_{number:02}" for number in range(SENSORS)]
TRUE = np.random.default_rng(0).normal(size=SENSORS) / 4


def made(path: Path, size: float) -> None:
    """Write rows of about ``size`` bytes; the file has its name when it is complete."""
    if path.exists():
        print(f"{path} is there already: {path.stat().st_size / 1e9:.2f} GB", flush=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    begun, parts = time.perf_counter(), max(2, round(size / (ROWS * ROW_BYTES)))
    unfinished = path.with_suffix(f".{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            for part in range(parts):
                readings, stops = rows(part)
                columns = dict(zip(NAMES, readings.T, strict=True))
                header = pyarrow.csv.WriteOptions(include_header=part == 0)
                pyarrow.csv.write_csv(pa.table({**columns, "stops": stops}), file, header)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    print(f"{path}: {path.stat().st_size / 1e9:.2f} GB, made in {time.perf_counter() - begun:.0f} s", flush=True)


def rows(part: int) -> tuple[np.ndarray, np.ndarray]:
    """Readings ``(ROWS, SENSORS)`` of three decimals, and whether the machine stops; other ones for each part."""
    rng = np.random.default_rng([1, part])
    readings = rng.standard_normal((ROWS, SENSORS)).round(3)
    return readings, (readings @ TRUE + rng.logistic(size=ROWS) > 1).astype(np.int8)


def as_parquet(table: px.Table, path: Path) -> px.Table:
    """Write the rows as a Parquet file of float32, in one pass, a block at a time."""
    schema = pa.schema([*((name, pa.float32()) for name in table.columns), (table.target, pa.int8())])
    with pyarrow.parquet.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        for X, y in table.blocks(ROWS):
            writer.write_table(pa.table([*X.T, y.astype(np.int8)], schema))
    return px.Table.parquet(path, target=table.target)


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    begun = time.perf_counter()
    return call(), time.perf_counter() - begun


def megabytes() -> float:
    """What this process holds, without files that are mapped into it, whose pages Linux takes back as it likes."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) / 1000


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _setting.parser(__doc__, gigabytes=(2, "size of the file"))
    folder = Path(tempfile.gettempdir(), "paraxis-large-csv")
    parser.add_argument("--folder", type=Path, default=folder, help=f"where the file is kept (default: {folder})")
    return _setting.parsed(parser, argv)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    chosen = options(argv)
    name, size = ("quick", 1.6e7) if chosen.quick else (f"{chosen.gigabytes}GB", 1e9 * chosen.gigabytes)
    path = chosen.folder / f"{name}.csv"
    made(path, size)
    held: list[float] = []
    stream = px.Stream(memory=MEMORY, progress=lambda _: held.append(megabytes()))
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        table = px.Table.csv(path, target="stops", dtype="float32")
        print(
            f"{len(table):,} rows on {_training.where()}, {MEMORY} allowed, {megabytes():,.0f} MB held so far",
            flush=True,
        )
        parquet, writing = timed(lambda: as_parquet(table, Path(folder, "rows.parquet")))
        fits, found = {}, []
        with warnings.catch_warnings(action="ignore"):  # one iteration, so that both find everything compiled
            px.solve.LogisticRegression(C=np.inf, max_iter=1).fit(parquet, engine=stream)
        for kind, rows_of in (("CSV", table), ("Parquet", parquet)):
            held.clear()
            model = px.solve.LogisticRegression(C=np.inf, tol=1e-5)
            _, seconds = timed(lambda model=model, rows_of=rows_of: model.fit(rows_of, engine=stream))
            passes = model.data_passes_
            off = float(np.abs(model.coef_[0] - TRUE).max())
            found.append((kind, float(seconds), int(passes), seconds / passes, off, f"{max(held):,.0f}"))
            fits[kind] = model
    print(f"written as Parquet in one pass, {writing:.1f} s")
    _setting.table(["rows from", "s in all", "passes", "s a pass", "coefficients off by", "MB at most"], found)
    differ = float(np.abs(fits["CSV"].coef_ - fits["Parquet"].coef_).max())
    print(f"the two models' coefficients differ by {differ:.1e}")
    draw(chosen.plot, fits["CSV"].coef_[0])
    return {"fits": fits, "path": path}


def draw(path: str | None, coef: np.ndarray) -> None:
    """The coefficients beside those that the rows were made by, as a PNG."""
    if path is None:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4, 4), layout="constrained")
    axes = figure.subplots()
    axes.axline((0, 0), slope=1, color="0.8")
    axes.plot(TRUE, coef, ".")
    axes.set(xlabel="coefficient the rows were made by", ylabel="coefficient found")
    figure.savefig(path, dpi=120)
    print(f"plot: {path}")


if __name__ == "__main__":
    main()
