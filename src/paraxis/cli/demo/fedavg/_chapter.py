"""The chapter: train on all devices, train again on one, compare and report."""

from rich.console import Console

from paraxis.cli.demo._devices import find_devices
from paraxis.cli.demo._digits import load_digits
from paraxis.cli.demo._options import Options
from paraxis.cli.demo._output import require_writable, whole_file
from paraxis.cli.demo.fedavg._digits import split_by_label
from paraxis.cli.demo.fedavg._display import Display, draw_plot, summary_table
from paraxis.cli.demo.fedavg._training import train


def run(options: Options, console: Console) -> None:
    """Run the chapter; writes ``fedavg.png`` to the directory asked for.

    Raises:
        CommandError: if the directory cannot be written to, or there are too few devices.
    """
    devices = find_devices(options.devices)
    require_writable(options.out)
    digits = load_digits(options.seed)
    federation = split_by_label(digits.train, options.clients, options.seed)

    with Display(console, f"{len(devices)} device{'s' if len(devices) > 1 else ''}", options.rounds) as display:
        many = train(federation, digits.held_out, options, devices, display)
    one = many
    if len(devices) > 1:
        with Display(console, "1 device, for comparison", options.rounds) as display:
            one = train(federation, digits.held_out, options, devices[:1], display)

    plot = options.out / "fedavg.png"
    with whole_file(plot) as path:
        draw_plot(many, path)
    console.print(summary_table(many, one, federation, options, devices))
    console.print(f"Plot: {plot}")
