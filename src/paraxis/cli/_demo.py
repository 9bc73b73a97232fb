"""``paraxis demo``: some of the examples, one after the other."""

import importlib
import os
import runpy
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from paraxis._core.check import needed
from paraxis._host import threads
from paraxis.cli._errors import CommandError
from paraxis.errors import DeviceError
from paraxis.testing import simulate_devices

_PACKAGES = ("matplotlib", "mlxtend", "optax", "orbax", "scipy", "sklearn")


class Chapter(NamedTuple):
    """An example: its file, its subject, its minutes on two CPU cores, and its options."""

    file: str
    summary: str
    minutes: float
    options: tuple[str, ...] = ()


CHAPTERS = {
    "fedavg": Chapter("fedavg_cnn.py", "federated averaging of a CNN over 100 clients with few digits each", 1.0),
    "ensemble": Chapter("ensemble_uncertainty.py", "75 networks: what an ensemble of some of them knows, and not", 0.7),
    "logreg": Chapter(
        "sharded_logreg.py", "logistic regression on all devices, compared with scikit-learn", 0.4, ("--rows", "10000")
    ),
    "train": Chapter("stop_and_resume.py", "a training run that is stopped, resumes, and ends with the same bits", 0.3),
    "stream": Chapter("streamed_logreg.py", "a regression on digits that stay in files, stopped and resumed", 0.3),
}


def run_demo(names: Sequence[str], *, devices: int | None, out: Path, quick: bool, only_list: bool) -> int:
    """List the chapters and their time, then run them; all of them if ``names`` is empty. Return the exit status, 0.

    Raises:
        CommandError: if there is no such chapter, a package is missing, there are too few devices, the directory
            cannot be made, or a chapter fails.
    """
    if unknown := [name for name in names if name not in CHAPTERS]:
        raise CommandError(f"the demo has no chapter {unknown[0]!r}; its chapters are: {', '.join(CHAPTERS)}")
    chosen = [name for name in CHAPTERS if name in names or not names]
    _print_list(chosen)
    if only_list:
        return 0
    _prepare(devices, out)
    installed, of_a_clone = (Path(__file__).parents[up] / "examples" for up in (1, 3))
    for name in chosen:
        path = (installed if installed.is_dir() else of_a_clone) / CHAPTERS[name].file
        rest = [*CHAPTERS[name].options, *["--quick"] * quick, "--plot", str(out / f"{name}.png")]
        print(f"\n{name}: python {path} {' '.join(rest)}", flush=True)
        if status := _run_as_main(path, rest):
            raise CommandError(f"the chapter {name} ended with the exit status {status}")
    return 0


def _print_list(chosen: Iterable[str]) -> None:
    for name in chosen:
        print(f"{name:{max(map(len, CHAPTERS))}}  {CHAPTERS[name].summary}")
    minutes = sum(CHAPTERS[name].minutes for name in chosen)
    print(f"On two CPU cores, this takes about {minutes:.1f} minutes; with --quick, less.", flush=True)


def _prepare(devices: int | None, out: Path) -> None:
    """Import what the chapters need, start JAX's devices and make the directory, before the first chapter runs."""
    try:
        with needed("demo", "demo"):
            for package in _PACKAGES:
                importlib.import_module(package)
        out.mkdir(parents=True, exist_ok=True)
        if devices is not None:
            simulate_devices(devices)
        elif threads.SIMULATED not in os.environ.get("XLA_FLAGS", "") and "JAX_NUM_CPU_DEVICES" not in os.environ:
            jax.config.update("jax_num_cpu_devices", 2)  # of no effect where there is an accelerator
            os.environ.setdefault(threads.VARIABLE, str(threads.advised(2)))
    except (ModuleNotFoundError, DeviceError) as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise CommandError(f"--out {out} cannot be made: {error.strerror}") from None


def _run_as_main(path: Path, rest: Sequence[str]) -> int:
    """Run a script as Python does, with the arguments that follow its name, and return its exit status."""
    argv, sys.argv = sys.argv, [str(path), *rest]
    sys.path.insert(0, str(path.resolve().parent))  # and left there: what the script defined may import later
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.argv = argv
    return 0
