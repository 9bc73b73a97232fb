"""What every benchmark here shares: devices, rivals measured in turn in one process, one table of ratios.

Wall times on a shared machine wobble; so rivals take turns, the median counts, and what is quoted is a ratio. Numbers
that do not wobble (collectives, bytes, FLOPs, temporary memory) are read off the compiled program.

With ``--save``, what is printed replaces its part of ``results/``, and the figures of ``README.md`` are written anew.
"""

import argparse
import dataclasses
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import page


def main(run: Callable[[int, int], None], doc: str | None, devices: Sequence[int] = (2, 8)) -> None:
    """Run a benchmark once per device count, each in a process of its own."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="*", default=list(devices), help="numbers of simulated devices")
    parser.add_argument("--real", action="store_true", help="on the devices there are, instead of simulated ones")
    parser.add_argument("--repeats", type=int, default=9, help="calls of each rival")
    parser.add_argument("--save", action="store_true", help="keep what is printed in results/, for README.md")
    options = parser.parse_args()
    if options.save or (len(options.devices) > 1 and not options.real):
        for count in options.devices if not options.real else [None]:
            part = "real devices" if count is None else f"{count} device{'s' * (count > 1)}"
            where = ["--real"] if count is None else ["--devices", str(count)]
            run_apart(part, [*where, "--repeats", str(options.repeats)], options.save)
        if options.save:
            page.write()
    elif options.real:
        import jax

        run(len(jax.devices()), options.repeats)
    else:
        from paraxis.testing import simulate_devices

        simulate_devices(options.devices[0])
        run(options.devices[0], options.repeats)


def run_apart(part: str, arguments: Sequence[str], save: bool) -> None:
    """Run this benchmark again in a process of its own, and keep what it prints if asked."""
    printed: list[str] = []
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, sys.argv[0], *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8", env=environment) as child:
        assert child.stdout is not None
        for line in child.stdout:
            print(line, end="", flush=True)
            printed.append(line.rstrip())
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command)
    if save:
        name = Path(sys.argv[0]).name
        bench = name.removeprefix("bench_").removesuffix(".py")
        page.save(bench, part, " ".join(["python", f"benchmarks/{name}", *arguments]), printed)


@dataclasses.dataclass
class Measured:
    """One rival: seconds to trace and compile (CPU time), milliseconds per call, and the compiled program's facts."""

    name: str
    compiled: Any
    setup: float
    communication: Any
    times: list[float] = dataclasses.field(default_factory=list)

    @property
    def milliseconds(self) -> float:
        """Median of a call."""
        return statistics.median(self.times) * 1e3

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

    from paraxis.reports import of_program

    made = {}
    for name, fn in rivals.items():
        start = time.process_time()
        jitted: Any = fn if hasattr(fn, "lower") else jax.jit(fn)
        compiled = jitted.lower(*args).compile()
        made[name] = Measured(name, compiled, time.process_time() - start, of_program(compiled.as_text()))
    return made


def take_turns(made: dict[str, Measured], args: Sequence[Any], repeats: int) -> None:
    """Call the rivals in turn; the first round is not counted."""
    import jax

    for turn in range(repeats + 1):
        for rival in made.values():
            start = time.perf_counter()
            jax.block_until_ready(rival.compiled(*args))
            if turn:
                rival.times.append(time.perf_counter() - start)


def report(title: str, made: dict[str, Measured], ours: str) -> None:
    """Print a row per rival; the last column is its time over ours."""
    base = made[ours]
    print(f"\n{title}")
    print(f"  {'':38}{'ms':>8}{'setup s':>9}{'GF/dev':>9}{'temp MB':>9}{'AR':>4}{'AG':>4}{'time / ours':>13}")
    for rival in made.values():
        count = rival.communication.count
        ratio = rival.milliseconds / base.milliseconds if rival.times else float("nan")
        print(
            f"  {rival.name:38}{rival.milliseconds if rival.times else float('nan'):8.1f}{rival.setup:9.2f}"
            f"{rival.gigaflops:9.3f}{rival.megabytes:9.1f}{count['all_reduce']:4d}{count['all_gather']:4d}{ratio:13.2f}",
            flush=True,
        )
