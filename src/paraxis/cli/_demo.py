"""``paraxis demo``: some of the examples, one after the other."""

import importlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from paraxis._core.check import needed
from paraxis._host import threads
from paraxis.cli._errors import CommandError

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


def run_demo(names: Sequence[str], *, devices: int | None, out: Path, quick: bool, only_list: bool) -> None:
    """List the chapters and their time, then run them; all of them if ``names`` is empty."""
    if unknown := [name for name in names if name not in CHAPTERS]:
        raise CommandError(f"the demo has no chapter {unknown[0]!r}; its chapters are: {', '.join(CHAPTERS)}")
    chosen = [name for name in CHAPTERS if name in names or not names]
    for name in chosen:
        print(f"{name:{max(map(len, CHAPTERS))}}  {CHAPTERS[name].summary}")
    minutes = sum(CHAPTERS[name].minutes for name in chosen)
    print(f"On two CPU cores, this takes about {minutes:.1f} minutes; with --quick, less.", flush=True)
    if only_list:
        return
    try:
        with needed("demo", "demo"):
            for package in _PACKAGES:
                importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise CommandError(str(error)) from None
    out.mkdir(parents=True, exist_ok=True)
    is_said = threads.SIMULATED in os.environ.get("XLA_FLAGS", "") or threads.COUNT in os.environ
    variables = {} if devices is None and is_said else threads.variables(devices or 2)  # no matter to an accelerator
    variables |= {} if devices is None else {"JAX_PLATFORMS": "cpu"}
    installed, of_a_clone = (Path(__file__).parents[up] / "examples" for up in (1, 3))
    for name in chosen:
        path = (installed if installed.is_dir() else of_a_clone) / CHAPTERS[name].file
        rest = [*CHAPTERS[name].options, *["--quick"] * quick, "--plot", str(out / f"{name}.png")]
        print(f"\n{name}: python {path} {' '.join(rest)}", flush=True)
        done = subprocess.run([sys.executable, path, *rest], env=os.environ | variables, check=False)
        if done.returncode:
            raise CommandError(f"the chapter {name} ended with the exit status {done.returncode}")
