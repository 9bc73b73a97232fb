"""The chapters, in the order in which they run. A new one is a line in ``CHAPTERS``."""

import dataclasses
from collections.abc import Callable, Sequence

from rich.console import Console

from paraxis.cli._errors import CommandError, needed
from paraxis.cli.demo._options import Options

Run = Callable[[Options, Console], None]


@dataclasses.dataclass(frozen=True)
class Chapter:
    """One part of the demo: what it shows, in a line, how long it takes on two CPU cores, and what loads it."""

    summary: str
    minutes: float
    load: Callable[[], Run]


def _fedavg() -> Run:
    with needed("demo", "demo"):
        from paraxis.cli.demo import fedavg
    return fedavg.run


def _ensemble() -> Run:
    with needed("demo", "demo"):
        from paraxis.cli.demo import ensemble
    return ensemble.run


def _logreg() -> Run:
    with needed("demo", "demo"):
        from paraxis.cli.demo import logreg
    return logreg.run


def _train() -> Run:
    with needed("demo", "demo"):
        from paraxis.cli.demo import train
    return train.run


def _stream() -> Run:
    with needed("demo", "demo"):
        from paraxis.cli.demo import stream
    return stream.run


CHAPTERS = {
    "fedavg": Chapter("federated averaging of a CNN on handwritten digits, split by label", 1.0, _fedavg),
    "ensemble": Chapter("an ensemble of networks, and its confidence on rotated digits", 0.5, _ensemble),
    "logreg": Chapter("logistic regression on all devices, compared with scikit-learn", 0.3, _logreg),
    "train": Chapter("a training run that is stopped, resumes, and ends with the same bits", 0.3, _train),
    "stream": Chapter("a regression on digits that stay in files, stopped and resumed", 0.3, _stream),
}


def chapters_named(names: Sequence[str] | None) -> list[Chapter]:
    """Return the chapters of these names; all of them if there are none.

    Raises:
        CommandError: if there is no such chapter.
    """
    unknown = [name for name in names or () if name not in CHAPTERS]
    if unknown:
        raise CommandError(f"the demo has no chapter {unknown[0]!r}; its chapters are: {', '.join(CHAPTERS)}")
    return [CHAPTERS[name] for name in names or CHAPTERS]


def ready(chapters: Sequence[Chapter], options: Options) -> list[Run]:
    """Return what runs the chapters, after checking what all of them need, so that a mistake is all that is shown.

    Raises:
        CommandError: if a package is missing, there are too few devices, or the directory cannot be written to.
    """
    runs = [chapter.load() for chapter in chapters]
    with needed("demo", "demo"):
        from paraxis.cli.demo._devices import find_devices
        from paraxis.cli.demo._output import require_writable
    find_devices(options.devices)
    require_writable(options.out)
    return runs


def show_chapters(chapters: Sequence[Chapter], console: Console) -> None:
    """Print the chapters' names, what they show and how long that takes."""
    width = max(map(len, CHAPTERS))
    for name, chapter in CHAPTERS.items():
        if chapter in chapters:
            console.print(f"[bold]{name:{width}}[/]  {chapter.summary}")
    minutes = sum(chapter.minutes for chapter in chapters)
    console.print(f"[dim]On two CPU cores, this takes about {_spoken(minutes)}; with --quick, less.[/]")


def _spoken(minutes: float) -> str:
    return "a minute" if minutes < 1.5 else f"{minutes:.0f} minutes"
