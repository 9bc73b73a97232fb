"""``paraxis demo``: some of the examples, one after the other."""

import importlib
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
from rich.console import Console

from paraxis.cli._devices import find_devices
from paraxis.cli._errors import CommandError, needed
from paraxis.cli._scripts import run_as_main

_PACKAGES = ("matplotlib", "mlxtend", "optax", "orbax", "scipy", "sklearn")


class Chapter(NamedTuple):
    """An example: its file, what it shows, its options, and how long it takes on two CPU cores."""

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
    """Show what comes and how long it takes, then run the chapters; all of them if none is named.

    Raises:
        CommandError: if there is no such chapter, a package is missing, there are too few devices, or the directory
            cannot be written to.
    """
    unknown = [name for name in names if name not in CHAPTERS]
    if unknown:
        raise CommandError(f"the demo has no chapter {unknown[0]!r}; its chapters are: {', '.join(CHAPTERS)}")
    console, chosen = Console(highlight=False), [name for name in CHAPTERS if name in names or not names]
    if not only_list:
        _require(devices, out)
    _show(console, chosen)
    if only_list:
        return
    for name in chosen:
        chapter, folder = CHAPTERS[name], _examples()
        rest = [*chapter.options, *["--quick"] * quick, "--plot", str(out / f"{name}.png")]
        console.print(f"\n[bold]{name}[/]: python {folder / chapter.file} {' '.join(rest)}", soft_wrap=True)
        if status := run_as_main(folder / chapter.file, rest):
            raise CommandError(f"the chapter {name} ended with the exit status {status}")


def _show(console: Console, chosen: Iterable[str]) -> None:
    minutes, width = 0.0, max(map(len, CHAPTERS))
    for name in chosen:
        console.print(f"[bold]{name:{width}}[/]  {CHAPTERS[name].summary}")
        minutes += CHAPTERS[name].minutes
    spoken = "a minute" if minutes < 1.5 else f"{minutes:.0f} minutes"
    console.print(f"[dim]On two CPU cores, this takes about {spoken}; with --quick, less.[/]")


def _require(devices: int | None, out: Path) -> None:
    """Check that all chapters can run, before the first one does; this starts JAX on its devices."""
    with needed("demo", "demo"):
        for package in _PACKAGES:
            importlib.import_module(package)
    found = find_devices(devices)
    if len(found) < (there := jax.device_count()):
        raise CommandError(f"--devices {devices}: the examples take all {there} devices there are; leave it out")
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise CommandError(f"--out {out} cannot be written to: {error.strerror}") from None


def _examples() -> Path:
    package = Path(__file__).parents[1]
    installed, of_a_clone = package / "examples", package.parents[1] / "examples"
    return installed if installed.is_dir() else of_a_clone
