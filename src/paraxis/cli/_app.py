"""The commands and their options."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from paraxis.cli._demo import CHAPTERS, run_demo
from paraxis.cli._errors import CommandError, needed
from paraxis.cli.fit import CsvForm, FitOptions, PredictOptions, grid_of
from paraxis.cli.launch import LaunchCommand

app = typer.Typer(
    name="paraxis",
    help="Run an axis of a JAX program on as many devices as you have.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# Parts of the help of commands with many options.
_MODEL, _COLUMNS, _CSV = "Model", "Columns", "How the file is written"

_Encoding = Annotated[
    str | None,
    typer.Option(
        help="The encoding of a CSV file.",
        show_default="UTF-8, unless a byte-order mark says otherwise",
        rich_help_panel=_CSV,
    ),
]
_DELIMITER: Any = {
    "help": "The character between the values of a CSV file, or 'tab'.", "rich_help_panel": _CSV
}  # fmt: skip
_DECIMAL: Any = {"help": "The decimal point of a CSV file: '.' or ','.", "rich_help_panel": _CSV}
_AS_FITTED: Any = {"show_default": "as in the fit"}
_NaValues = Annotated[
    list[str] | None,
    typer.Option(
        metavar="WORD",
        help="Count this word in a CSV file as a missing value; may be repeated.",
        rich_help_panel=_CSV,
    ),
]
_UnevenRows = Annotated[
    Literal["fail", "drop"],
    typer.Option(
        help="What to do with rows of a CSV file that have more or fewer values than there are columns.",
        rich_help_panel=_CSV,
    ),
]
_SameNames = Annotated[
    Literal["fail", "number"],
    typer.Option(help="What to do with columns of the same name; number: call them x, x.2, x.3.", rich_help_panel=_CSV),
]
_Strip = Annotated[
    list[str] | None,
    typer.Option(
        metavar="WORD",
        help="Read numbers of a CSV file without this: '%', '$', or what sets thousands apart; may be repeated.",
        rich_help_panel=_CSV,
    ),
]

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
        message = " ".join(error.format_message().split()).rstrip(".").replace(": Value error, ", ": ")
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
        typer.Argument(metavar="CHAPTER", help=f"Chapters to run: {', '.join(CHAPTERS)}.", show_default="all"),
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="List the chapters and exit.")] = False,
    devices: Annotated[
        int | None,
        typer.Option(min=1, help="Devices to use.", show_default="all; two simulated devices if there is only a CPU"),
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory for the plots.")] = Path("paraxis-demo"),
    quick: Annotated[bool, typer.Option("--quick", help="Run a few rounds or epochs only, as a quick check.")] = False,
) -> None:
    """Run examples on handwritten digits, on all devices. Each is a file that you can read."""
    run_demo(chapters or (), devices=devices, out=out, quick=quick, only_list=show)


@app.command()
def fit(
    data: Annotated[
        Path, typer.Argument(metavar="DATA", help="A .csv, .parquet or .npz file; with --stream, a folder, too.")
    ],
    target: Annotated[str, typer.Option(help="The column to predict.")],
    objective: Annotated[
        Literal["auto", "logistic", "squared", "poisson"],
        typer.Option(help="The loss of a row; auto: logistic for classes, else squared.", rich_help_panel=_MODEL),
    ] = "auto",
    penalty: Annotated[
        Literal["none", "l2", "l1", "elastic-net"],
        typer.Option(help="The penalty on large coefficients.", rich_help_panel=_MODEL),
    ] = "l2",
    strength: Annotated[
        float | None,
        typer.Option(
            help="The strength of the penalty beside the mean loss, for columns on one scale; not negative.",
            show_default="1 / rows",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    strengths: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,…",
            help="Several strengths; cross-validation chooses one.",
            show_default=False,
            rich_help_panel=_MODEL,
        ),
    ] = None,
    folds: Annotated[int, typer.Option(min=2, help="Folds of the cross-validation.", rich_help_panel=_MODEL)] = 5,
    l1_ratio: Annotated[
        float, typer.Option(min=0, max=1, help="The share of L1 in an elastic net.", rich_help_panel=_MODEL)
    ] = 0.5,
    missing: Annotated[
        Literal["fail", "drop-rows", "mean"],
        typer.Option(help="What to do with missing values.", rich_help_panel=_COLUMNS),
    ] = "fail",
    text: Annotated[
        Literal["fail", "drop", "one-hot"],
        typer.Option(help="What to do with columns of text.", rich_help_panel=_COLUMNS),
    ] = "fail",
    ignore: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN", help="Leave a column out; may be repeated.", rich_help_panel=_COLUMNS),
    ] = None,
    id_: Annotated[
        list[str] | None,
        typer.Option(
            "--id",
            metavar="COLUMN",
            help="This column names the rows: leave it out, and write it beside predictions; may be repeated.",
            rich_help_panel=_COLUMNS,
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="How much each row counts; not negative.",
            show_default="all the same",
            rich_help_panel=_COLUMNS,
        ),
    ] = None,
    class_weight: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LABEL=NUMBER",
            help="Factor of the weights of a class; may be repeated; or 'balanced': all classes count the same.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    test_fraction: Annotated[
        float, typer.Option(min=0, max=0.9, help="The share of the rows to hold out for the scores.")
    ] = 0.2,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="The seed that decides which rows are held out.")] = 0,
    devices: Annotated[int | None, typer.Option(min=1, help="Devices to use.", show_default="all")] = None,
    float32: Annotated[bool, typer.Option("--float32", help="Compute in float32 instead of float64.")] = False,
    tol: Annotated[
        float | None,
        typer.Option(help="Stop when the error is below this; above 0.", show_default="1e-9, in float32 1e-5"),
    ] = None,
    max_iterations: Annotated[int, typer.Option(min=1, help="Stop after this many iterations.")] = 10_000,
    out: Annotated[Path, typer.Option(help="Directory for the model, its coefficients and the report.")] = Path(
        "paraxis-fit"
    ),
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier fit in that directory.")] = False,
    stream: Annotated[
        str | None,
        typer.Option(
            metavar="MEMORY",
            help="Read rows in parts, with at most so much memory for them, such as 2GB.",
            show_default="hold all rows",
        ),
    ] = None,
    stream_folder: Annotated[
        Path | None,
        typer.Option(
            help="With --stream, save the run there, so that the same command resumes after a kill or Ctrl-C.",
            show_default="save nothing",
        ),
    ] = None,
    encoding: _Encoding = None,
    delimiter: Annotated[str, typer.Option(**_DELIMITER)] = ",",
    decimal: Annotated[str, typer.Option(**_DECIMAL)] = ".",
    na_values: _NaValues = None,
    uneven_rows: _UnevenRows = "fail",
    same_names: _SameNames = "fail",
    strip: _Strip = None,
) -> None:
    """Fit a linear model to the columns of a file, on all devices."""
    options = FitOptions(
        data, target, objective, penalty, strength, grid_of(strengths), folds, l1_ratio, missing, text,
        tuple(ignore or ()), tuple(id_ or ()), weights, tuple(class_weight or ()), test_fraction, seed, devices,
        float32, tol, max_iterations, out, force, stream, stream_folder,
        CsvForm(encoding, delimiter, decimal, tuple(na_values or ()), uneven_rows, same_names, tuple(strip or ())),
    )  # fmt: skip
    with needed("fit", "fit"):
        from paraxis.cli.fit import _fit
    _fit.run_fit(options, Console())


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="The directory that paraxis fit wrote, or its .npz.")],
    data: Annotated[Path, typer.Argument(metavar="DATA", help="A .csv, .parquet or .npz file with the same columns.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="A .csv or .parquet file to write; its directory is created.", show_default="print the first rows"
        ),
    ] = None,
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="Write the probability of each class, too.")
    ] = False,
    missing: Annotated[
        Literal["fail", "mean"] | None,
        typer.Option(help="What to do with missing values.", show_default="as in the fit"),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN", help="Copy this column of the file to the predictions; may be repeated."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file at --out.")] = False,
    stream: Annotated[
        bool, typer.Option("--stream", help="Read rows, and write predictions, a part at a time.")
    ] = False,
    encoding: _Encoding = None,
    delimiter: Annotated[str | None, typer.Option(**_DELIMITER, **_AS_FITTED)] = None,
    decimal: Annotated[str | None, typer.Option(**_DECIMAL, **_AS_FITTED)] = None,
    na_values: _NaValues = None,
    uneven_rows: _UnevenRows = "fail",
    same_names: _SameNames = "fail",
    strip: _Strip = None,
) -> None:
    """Predict the target for the rows of a file, with a model that paraxis fit wrote."""
    with needed("predict", "fit"):
        from paraxis.cli.fit import _predict
    form: dict[str, Any] = {"encoding": encoding, "uneven_rows": uneven_rows, "same_names": same_names}
    form |= {"delimiter": delimiter, "decimal": decimal}
    form |= {"na_values": na_values and tuple(na_values), "strip": strip and tuple(strip)}
    given = {name: value for name, value in form.items() if value is not None}
    options = PredictOptions(model, data, out, probabilities, missing, tuple(keep or ()), force, stream)
    _predict.run_predict(dataclasses.replace(options, csv=CsvForm(**given)), given, Console())


@app.command(cls=LaunchCommand, context_settings={"allow_interspersed_args": False})
def launch(
    num_processes: Annotated[int, typer.Option("-n", help="Number of processes.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="SCRIPT [ARGS]...", help="A Python file, and its arguments.")
    ] = None,
    module: Annotated[
        str | None, typer.Option("-m", metavar="MODULE", help="Run a module instead; it gets all the arguments.")
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(help="Devices of each process; simulated on a CPU.", show_default="those that JAX finds"),
    ] = None,
    restarts: Annotated[
        int, typer.Option(help="How often to start all processes again after a failure, from the last checkpoint.")
    ] = 0,
    grace: Annotated[
        float,
        typer.Option(help="Seconds in which a process must save and exit after a signal, or after another has exited."),
    ] = 30.0,
    stuck_after: Annotated[
        float,
        typer.Option(help="Seconds without a training step after which a process counts as stuck; 0: never."),
    ] = 1800.0,
) -> int:
    """Run a script in several processes on this machine; if one fails, end the others."""
    from paraxis.cli.launch._launch import run_launch

    return run_launch(
        arguments or (), module, num_processes=num_processes, devices=devices, restarts=restarts, grace=grace,
        stuck_after=stuck_after,
    )  # fmt: skip


@app.command()
def explain(
    function: Annotated[str, typer.Argument(metavar="FUNCTION", help="model.py:step, or package.model:step.")],
    shapes: Annotated[
        str | None,
        typer.Option(metavar="SHAPES", help="Shapes of the arguments, such as 'float32[64,10] int32[]'."),
    ] = None,
    arguments: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A function in the same module that returns a tuple of the arguments."),
    ] = None,
    devices: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            max=2048,
            help="Devices to simulate on the CPU; may be repeated, for a table.",
            show_default="those there are",
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report to this file, too.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers, for other programs.")] = False,
) -> int:
    """Report what a function sends, computes and holds. It is compiled, but not run.

    JAX starts on simulated devices before your module is imported, so jax.devices() has all of them there.
    """
    from paraxis.cli.explain import run_explain

    return run_explain(function, shapes=shapes, arguments=arguments, devices=devices or (), html=html, as_json=as_json)
