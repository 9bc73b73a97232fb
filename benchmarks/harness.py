"""What every benchmark here shares: devices, rivals measured in turn in one process, tables of ratios.

Wall times on a shared machine wobble; so rivals take turns, the median counts, and what is quoted is a ratio. Numbers
that do not wobble (collectives, bytes, FLOPs, temporary memory) are read off the compiled program.

A benchmark's ``run(devices, repeats)`` returns tables. With ``--save``, they replace its part of ``results/``, and the
tables of ``README.md`` are written anew.
"""

import argparse
import concurrent.futures
import dataclasses
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import page
from page import Tables


def main(run: Callable[[int, int], Tables], doc: str | None, devices: Sequence[int] = (2, 8)) -> None:
    """Run a benchmark once per device count, each in a process of its own."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="*", default=list(devices), help="numbers of simulated devices")
    parser.add_argument("--real", action="store_true", help="on the devices there are, instead of simulated ones")
    parser.add_argument("--repeats", type=int, default=9, help="calls of each rival")
    parser.add_argument("--save", action="store_true", help="keep the tables in results/, for README.md")
    options = parser.parse_args()
    if len(options.devices) > 1 and not options.real:
        rest = ["--repeats", str(options.repeats), *["--save"] * options.save]
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONUNBUFFERED": "1"}
        for count in options.devices:
            command = [sys.executable, sys.argv[0], "--devices", str(count), *rest]
            subprocess.run(command, env=environment, check=True)
        return
    if not options.real:
        from paraxis.testing import simulate_devices

        simulate_devices(options.devices[0])
    import jax

    count = len(jax.devices())
    tables = run(count, options.repeats)
    show(tables)
    if options.save:
        part = "real devices" if options.real else f"{count} device{'s' * (count > 1)}"
        name = Path(sys.argv[0]).name
        page.save(name.removeprefix("bench_").removesuffix(".py"), part, f"python benchmarks/{name}", tables)
        page.write()


def show(tables: Tables) -> None:
    """Print tables, with columns as wide as they need."""
    for title, rows in tables.items():
        columns = list(dict.fromkeys(column for cells in rows.values() for column in cells))
        texts = {name: [page.shown(cells.get(column, "")) for column in columns] for name, cells in rows.items()}
        first = max(map(len, [title, *texts]))
        widths = [max(map(len, [column, *(row[i] for row in texts.values())])) for i, column in enumerate(columns)]
        for name, row in {title: columns, **texts}.items():
            print(f"{name:{first}}", *(f"{text:>{width}}" for text, width in zip(row, widths, strict=True)), sep="  ")
        print(flush=True)


def in_turn(rivals: Mapping[str, Callable[[], Any]], repeats: int, calls: int = 1) -> dict[str, float]:
    """Return the median seconds of a call of each rival. Rivals take turns; the first turn is not counted."""
    import jax

    times: dict[str, list[float]] = {name: [] for name in rivals}
    for turn in range(repeats + 1):
        for name, call in rivals.items():
            start = time.perf_counter()
            jax.block_until_ready([call() for _ in range(calls)][-1])
            if turn:
                times[name].append((time.perf_counter() - start) / calls)
    return {name: statistics.median(found) for name, found in times.items()}


def in_new_process(fn: Callable[..., Any], *args: Any) -> Any:
    """Return what a benchmark's function gives in a process of its own, with as many simulated devices."""
    import jax

    from paraxis.testing import simulate_devices

    options: Any = {"initializer": simulate_devices, "initargs": (jax.device_count(),)}
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), **options) as pool:
        return pool.submit(fn, *args).result()


@dataclasses.dataclass
class Measured:
    """One rival: seconds to trace and compile (CPU time), milliseconds per call, and the compiled program's facts."""

    name: str
    compiled: Any
    setup: float
    communication: Any
    milliseconds: float = float("nan")

    @property
    def megabytes(self) -> float:
        """Temporary memory per device."""
        return self.compiled.memory_analysis().temp_size_in_bytes / 1e6

    @property
    def gigaflops(self) -> float:
        """Arithmetic per device, 10⁹ operations per call."""
        return self.compiled.cost_analysis().get("flops", 0.0) / 1e9


def compile_all(rivals: dict[str, Callable[..., Any]], args: Sequence[Any]) -> dict[str, Measured]:
    """Trace and compile each rival for the same arguments."""
    import jax

    from paraxis.testing import communication

    made = {}
    for name, fn in rivals.items():
        start = time.process_time()
        jitted: Any = fn if hasattr(fn, "lower") else jax.jit(fn)
        compiled = jitted.lower(*args).compile()
        made[name] = Measured(name, compiled, time.process_time() - start, communication(jitted, *args))
    return made


def take_turns(made: dict[str, Measured], args: Sequence[Any], repeats: int) -> None:
    """Call the rivals in turn."""
    rivals = {name: (lambda rival=rival: rival.compiled(*args)) for name, rival in made.items()}
    for name, seconds in in_turn(rivals, repeats).items():
        made[name].milliseconds = seconds * 1e3


def rows(made: dict[str, Measured], ours: str) -> dict[str, dict[str, Any]]:
    """Return a row per rival; the last column is its time over ours."""
    return {
        rival.name: {
            "ms": rival.milliseconds,
            "setup s": rival.setup,
            "GF/dev": rival.gigaflops,
            "temp MB": rival.megabytes,
            "AR": rival.communication.count["all_reduce"],
            "AG": rival.communication.count["all_gather"],
            "time / ours": rival.milliseconds / made[ours].milliseconds,
        }
        for rival in made.values()
    }
