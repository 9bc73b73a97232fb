"""The chapter: train on all devices, train again on one, compare and report."""

from rich.console import Console

from paraxis.cli.demo._devices import find_devices
from paraxis.cli.demo._digits import load_digits
from paraxis.cli.demo._options import Options
from paraxis.cli.demo._output import require_writable, whole_file
from paraxis.cli.demo.ensemble._display import Display, draw_plot, scores_table, summary_table
from paraxis.cli.demo.ensemble._scoring import rotated, score
from paraxis.cli.demo.ensemble._training import largest_difference, train

_DEGREES = 30


def run(options: Options, console: Console) -> None:
    """Run the chapter; writes ``ensemble.png`` to the directory asked for.

    Raises:
        CommandError: if the directory cannot be written to, or there are too few devices.
    """
    devices = find_devices(options.devices)
    require_writable(options.out)
    digits = load_digits(options.seed)

    with Display(console, f"{len(devices)} device{'s' if len(devices) > 1 else ''}", options.epochs) as display:
        many = train(digits.train, options, devices, display)
    one = many
    if len(devices) > 1:
        with Display(console, "1 device, for comparison", options.epochs) as display:
            one = train(digits.train, options, devices[:1], display)
    difference = largest_difference(many, one)

    scored = {
        "plain": score(many.ensemble, digits.held_out),
        f"rotated {_DEGREES}°": score(many.ensemble, rotated(digits.held_out, _DEGREES)),
    }
    plot = options.out / "ensemble.png"
    with whole_file(plot) as path:
        draw_plot(scored, path)
    console.print(scores_table(scored))
    console.print(summary_table(many, one, difference, devices))
    console.print(f"Plot: {plot}")
