"""The commands and their options."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from paraxis.cli._errors import CommandError
from paraxis.cli.demo import CHAPTERS, Options, chapters_named, show_chapters

app = typer.Typer(
    name="paraxis",
    help="Puts an axis of a JAX program on as many devices as there are.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_QUICK_ROUNDS, _QUICK_EPOCHS = 3, 2

# What the parser of the command line raises, whichever version of click typer stands on.
_UsageError: Any = typer.BadParameter.__base__


def run(arguments: Sequence[str] | None) -> int:
    """Parse the arguments and run the command.

    Raises:
        CommandError: if they are wrong.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        status = app(given or ["--help"], prog_name="paraxis", standalone_mode=False)
    except _UsageError as error:
        place = error.ctx.command_path if error.ctx else "paraxis"
        message = " ".join(error.format_message().split()).rstrip(".")
        raise CommandError(f"{message}; see: {place} --help") from None
    except typer.Abort:
        raise KeyboardInterrupt from None
    return status if isinstance(status, int) else 0


def _print_version(wanted: bool) -> None:
    if wanted:
        # The package is loaded by now; nothing in it imports its root.
        print(f"paraxis {sys.modules['paraxis'].__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    chapters: Annotated[
        list[str] | None,
        typer.Argument(metavar="CHAPTER", help=f"Which to run: {', '.join(CHAPTERS)}.", show_default="all"),
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="List the chapters and exit.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of training.")] = 120,
    clients: Annotated[int, typer.Option(min=2, max=500, help="Clients the digits are split over.")] = 100,
    per_round: Annotated[int, typer.Option(min=1, help="Clients that take part in a round.")] = 16,
    members: Annotated[int, typer.Option(min=2, max=100, help="Members of the ensemble.")] = 10,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of the ensemble's training.")] = 10,
    devices: Annotated[
        int | None,
        typer.Option(min=1, help="Devices to use.", show_default="all; two simulated ones if there is only the CPU"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all randomness.")] = 0,
    out: Annotated[Path, typer.Option(help="Directory for the plots.")] = Path("paraxis-demo"),
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help=f"At most {_QUICK_ROUNDS} rounds or {_QUICK_EPOCHS} epochs: does everything work?"
        ),
    ] = False,
) -> None:
    """Show what Paraxis does, on real data and on all devices, and check it against one device."""
    console = Console()
    if show:
        show_chapters(console)
        return
    chosen = chapters_named(chapters)
    if per_round > clients:
        raise CommandError(f"--per-round {per_round} is more than --clients {clients}")
    if CHAPTERS["fedavg"] in chosen and devices is not None and devices > per_round:
        raise CommandError(f"--devices {devices} is more than the {per_round} clients of a round, see --per-round")
    if quick:
        rounds, epochs = min(rounds, _QUICK_ROUNDS), min(epochs, _QUICK_EPOCHS)
    options = Options(rounds, clients, per_round, members, epochs, devices, seed, out)
    for chapter in chosen:
        chapter.run(options, console)
