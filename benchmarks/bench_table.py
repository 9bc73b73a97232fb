"""Rows on disk, fitted by L-BFGS, beside reading and multiplying them by hand; and the memory that a fit takes.

``GIGABYTES=8 ALLOWED=2 KINDS=NPY python benchmarks/bench_table.py`` for more rows than the usual 1 GB, for another part
of them than half in memory, and for some kinds of files. Those in ``/var/tmp`` stay in the system's cache if they fit.
"""

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import paraxis as px

COLUMNS, PART = 100, 250_000  # of a file: columns, rows
GIGABYTES = float(os.environ.get("GIGABYTES", "1"))
MEMORY = float(os.environ.get("ALLOWED", GIGABYTES / 2))
KINDS = os.environ.get("KINDS", "NPY Parquet").split()


def run(devices: int, repeats: int) -> harness.Tables:
    with tempfile.TemporaryDirectory(dir="/var/tmp" if Path("/var/tmp").is_dir() else None) as name:
        folder = Path(name)
        X, y, paths = written(folder)
        by_hand: dict[str, Callable[[], Any]] = {"NPY": lambda: _npy(X), "Parquet": lambda: _parquet(paths)}
        tables = {"NPY": lambda: px.Table.of_arrays(X, y), "Parquet": lambda: px.Table.parquet(folder, target="y")}
        stream = px.Stream(memory=f"{MEMORY}GB")
        return {
            f"{GIGABYTES:g} GB of rows on disk, {MEMORY:g} GB allowed": {
                kind: _compared(tables[kind](), by_hand[kind], min(repeats, 5), stream) for kind in KINDS
            }
        }


def written(folder: Path) -> tuple[np.ndarray, np.ndarray, list[Path]]:
    rng = np.random.default_rng(0)
    w = rng.normal(size=COLUMNS).astype("float32") / 10
    paths = [folder / f"{part:04}.parquet" for part in range(max(1, round(GIGABYTES * 1e9 / (4 * COLUMNS * PART))))]
    shape = len(paths) * PART, COLUMNS
    mapped, targets = np.lib.format.open_memmap(folder / "X.npy", "w+", np.float32, shape), np.zeros(shape[0], "int32")
    for part, path in enumerate(paths):
        own = slice(part * PART, part * PART + PART)
        X = rng.standard_normal((PART, COLUMNS), dtype="float32")
        targets[own] = y = (X @ w + rng.logistic(size=PART) > 0).astype("int32")
        if "NPY" in KINDS:
            mapped[own] = X
        if "Parquet" in KINDS:
            columns = {f"x{at}": X[:, at] for at in range(COLUMNS)}
            pq.write_table(pa.table({**columns, "y": y}), path, compression="none", use_dictionary=False)
    return mapped, targets, paths


def _npy(mapped: np.ndarray) -> None:
    for number, start in enumerate(range(0, len(mapped), PART)):
        _multiplied(mapped[start : start + PART], number)


def _parquet(paths: list[Path]) -> None:
    for number, path in enumerate(paths):
        columns = pq.read_table(path, memory_map=True).drop_columns("y").columns
        _multiplied(np.stack([column.to_numpy() for column in columns], 1), number)


def _multiplied(X: np.ndarray, number: int) -> np.ndarray:
    return X @ np.ones(COLUMNS, "float32") if number % 2 else np.ones(len(X), "float32") @ X  # as a pass does


def _compared(table: px.Table, by_hand: Callable[[], Any], repeats: int, engine: Any) -> dict[str, float]:
    fun = px.solve.objective.glm("logistic", intercept=True, l2=True)
    solver = px.solve.LBFGS(fun, maxiter=3, tol=0.0)
    solver.run(fun.init(COLUMNS), 1e-3, px.solve.rows(table, engine=engine))  # compiles, which takes memory once
    with Peak() as peak:
        before = peak.most
        data = px.solve.rows(table, engine=engine)
        solver.run(fun.init(COLUMNS), 1e-3, data)
    theirs, ours = [], []
    for _ in range(repeats):
        begin = time.perf_counter()
        by_hand()
        middle = time.perf_counter()
        state = jax.block_until_ready(solver.run(fun.init(COLUMNS), 1e-3, data)).state
        ours.append((time.perf_counter() - middle) / int(state.data_passes))
        theirs.append(middle - begin)
    hand, ms = (1e3 * statistics.median(times) for times in (theirs, ours))
    return {"ms by hand": hand, "ms a pass": ms, "over by hand": ms / hand, "MB at most": peak.most - before}


class Peak:
    """The most memory of its own that this process holds within, in MB."""

    def __enter__(self) -> "Peak":
        self.most, self._ended = _held(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(0.01):
            self.most = max(self.most, _held())

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def _held() -> float:
    return float(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0]) / 1e3


if __name__ == "__main__":
    harness.main(run, __doc__)
