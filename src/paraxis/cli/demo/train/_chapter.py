"""The chapter: train, train again and be told to stop, go on, compare the bits and report."""

import shutil
import tempfile
from pathlib import Path

from rich.console import Console

from paraxis.cli.demo._devices import find_devices
from paraxis.cli.demo._digits import load_digits
from paraxis.cli.demo._options import Options
from paraxis.cli.demo._output import require_writable, whole_file
from paraxis.cli.demo.train._display import draw_plot, lines, summary_table
from paraxis.cli.demo.train._running import Trainer


def run(options: Options, console: Console) -> None:
    """Run the chapter; writes ``train.png`` to the directory asked for.

    Raises:
        CommandError: if the directory cannot be written to, or there are too few devices.
    """
    devices = find_devices(options.devices)
    require_writable(options.out)
    digits = load_digits(options.seed)
    trainer, show = Trainer(digits, options, devices), lines(console)

    console.print(f"[bold]Training on {len(devices)} device{'s' if len(devices) > 1 else ''}")
    whole = trainer.run(show)
    console.print("[bold]The same run, interrupted in the middle")
    with tempfile.TemporaryDirectory(prefix="paraxis-demo-") as folder:
        saved = Path(folder) / "run"
        stopped = trainer.run(show, checkpoint=saved, stop_after=trainer.num_steps // 2 + 7)
        copied = shutil.copytree(saved, Path(folder) / "copy")
        console.print(f"[bold]Resumed from step {stopped.num_steps}")
        resumed = trainer.run(show, checkpoint=saved)
        elsewhere = None
        if len(devices) > 1:
            console.print(f"[bold]Resumed on 1 device from step {stopped.num_steps}")
            elsewhere = Trainer(digits, options, devices[:1]).run(show, checkpoint=copied)

    plot = options.out / "train.png"
    with whole_file(plot) as path:
        draw_plot(whole, stopped, resumed, path)
    sent = trainer.communicated(whole.state)
    console.print(summary_table(whole, stopped, resumed, elsewhere, devices, sent))
    console.print(f"Plot: {plot}")
