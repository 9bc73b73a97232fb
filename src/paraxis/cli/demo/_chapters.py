"""The chapters, in the order in which they run. A new one is a line in ``CHAPTERS``."""

import dataclasses
from collections.abc import Callable, Sequence

from rich.console import Console

from paraxis.cli._errors import CommandError, needed
from paraxis.cli.demo._options import Options


@dataclasses.dataclass(frozen=True)
class Chapter:
    """One part of the demo: what it shows, in a line, and how to run it."""

    summary: str
    run: Callable[[Options, Console], None]


def _fedavg(options: Options, console: Console) -> None:
    with needed("demo", "demo"):
        from paraxis.cli.demo import fedavg
    fedavg.run(options, console)


def _ensemble(options: Options, console: Console) -> None:
    with needed("demo", "demo"):
        from paraxis.cli.demo import ensemble
    ensemble.run(options, console)


def _logreg(options: Options, console: Console) -> None:
    with needed("demo", "demo"):
        from paraxis.cli.demo import logreg
    logreg.run(options, console)


def _train(options: Options, console: Console) -> None:
    with needed("demo", "demo"):
        from paraxis.cli.demo import train
    train.run(options, console)


def _stream(options: Options, console: Console) -> None:
    with needed("demo", "demo"):
        from paraxis.cli.demo import stream
    stream.run(options, console)


CHAPTERS = {
    "fedavg": Chapter("federated averaging of a CNN on handwritten digits, split by label", _fedavg),
    "ensemble": Chapter("an ensemble of networks, and its confidence on rotated digits", _ensemble),
    "logreg": Chapter("logistic regression on all devices, compared with scikit-learn", _logreg),
    "train": Chapter("a training run that is stopped, resumes, and ends with the same bits", _train),
    "stream": Chapter("a regression on digits that stay in files, stopped and resumed", _stream),
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


def show_chapters(console: Console) -> None:
    """Print the chapters' names and what they show."""
    width = max(map(len, CHAPTERS))
    for name, chapter in CHAPTERS.items():
        console.print(f"[bold]{name:{width}}[/]  {chapter.summary}")
