"""The chapter: fit on all devices, again on one and by scikit-learn, compare and report."""

from rich.console import Console

from paraxis.cli.demo._devices import find_devices
from paraxis.cli.demo._options import Options
from paraxis.cli.demo._output import require_writable, whole_file
from paraxis.cli.demo.logreg._digits import load
from paraxis.cli.demo.logreg._display import comparison_table, draw_plot, lines, summary_table
from paraxis.cli.demo.logreg._fitting import fit, fit_by_sklearn


def run(options: Options, console: Console) -> None:
    """Run the chapter; writes ``logreg.png`` to the directory asked for.

    Raises:
        CommandError: if the directory cannot be written to, or there are too few devices.
    """
    devices = find_devices(options.devices)
    require_writable(options.out)
    digits = load(options.seed)

    name = f"{len(devices)} device{'s' if len(devices) > 1 else ''}"
    console.print(f"[bold]Logistic regression on {name}")
    many = fit(digits.train, devices, lines(console))
    one = many
    if len(devices) > 1:
        console.print("[bold]Logistic regression on 1 device, for comparison")
        one = fit(digits.train, devices[:1], lines(console))
    exact = fit_by_sklearn(digits.train, solver="newton-cholesky", tol=1e-12)
    usual = fit_by_sklearn(digits.train)

    plot = options.out / "logreg.png"
    with whole_file(plot) as path:
        draw_plot(many, usual, exact, digits.train, path)
    fits = {
        f"Paraxis, {name}": many,
        "Paraxis, 1 device": one,
        "scikit-learn, default": usual,
        "scikit-learn, exact": exact,
    }
    console.print(comparison_table(fits, exact, digits))
    console.print(summary_table(many, one, devices, len(digits.train.labels)))
    console.print(f"Plot: {plot}")
