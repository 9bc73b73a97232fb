"""The command line: its commands and options, and the exit status."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from paraxis.cli._demo import run_demo
from paraxis.cli._errors import CommandError
from paraxis.cli._explain import run_explain
from paraxis.errors import DeviceError
from paraxis.launch import launch


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the ``paraxis`` command.

    Args:
        arguments: the words after the command's name; ``None``: those of this process.

    Returns:
        The exit status: 0, 2 for a mistake in the arguments or the installation, 130 if interrupted; of
        ``paraxis launch``, the script's.
    """
    options = vars(_parser().parse_args(arguments))  # the arguments of what it runs, by their names
    try:
        return options.pop("run")(**options) or 0
    except (CommandError, DeviceError) as error:
        print(f"paraxis: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "paraxis", description="Run an axis of a JAX program on as many devices as there are."
    )
    # Nothing imports the package root, which is loaded by now.
    parser.add_argument("--version", action="version", version=f"paraxis {sys.modules['paraxis'].__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, summary: str, more: str = "") -> argparse.ArgumentParser:
        text = f"{summary[0].upper()}{summary[1:]}.{more}"
        return commands.add_parser(name, help=summary, description=text, allow_abbrev=False)

    _add_demo(command("demo", "run examples on handwritten digits, on all devices"))
    _add_launch(
        command(
            "launch",
            "run a script in several processes on this machine; if one fails, end the others",
            " Words after SCRIPT are the script's own. Its standard input is closed.",
        )
    )
    _add_explain(command("explain", "report what a function sends, computes and holds; it is compiled, but not run"))
    return parser


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="CHAPTER", help="chapters to run (default: all)")
    parser.add_argument("--list", dest="only_list", action="store_true", help="list the chapters and exit")
    parser.add_argument(
        "--devices", type=int, metavar="N", help="CPU devices to simulate (default: the machine's own; two on a CPU)"
    )
    parser.add_argument("--out", type=Path, default=Path("paraxis-demo"), help="directory for the plots")
    parser.add_argument("--quick", action="store_true", help="run a few rounds or epochs only")
    parser.set_defaults(run=run_demo)


def _add_launch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", dest="num_processes", type=int, required=True, metavar="N", help="number of processes")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name, as in python -m")
    parser.add_argument("--devices", type=int, metavar="N", help="devices of each process; on a CPU, simulated ones")
    parser.add_argument(
        "--restarts", type=int, default=0, metavar="N", help="start all again after a failure, at most N times"
    )
    parser.add_argument(
        "--rejoin",
        dest="rejoins",
        type=int,
        metavar="N",
        help="start one that failed again alone, at most N times, with px.initialize(lost='continue'); not process 0",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="time to save and exit after a signal, or after another process has exited (default: 30)",
    )
    parser.add_argument("script", metavar="SCRIPT", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's arguments")
    parser.set_defaults(run=launch)


def _add_explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="FUNCTION", help="model.py:step, or package.model:step")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--shapes", help="shapes of the arguments, such as 'float32[64,10] int32[]'")
    group.add_argument(
        "--arguments", metavar="NAME", help="a function in the same module that returns a tuple of the arguments"
    )
    parser.add_argument(
        "--devices",
        type=int,
        action="append",
        default=[],
        metavar="N",
        help="CPU devices to simulate; repeat it for a table",
    )
    parser.add_argument("--on", metavar="TOPOLOGY", help="compile for TPUs, such as v5e:16x16, which need not be there")
    parser.add_argument("--html", type=Path, metavar="PATH", help="write the report to this file, too")
    parser.add_argument("--json", dest="as_json", action="store_true", help="print the numbers, for other programs")
    parser.set_defaults(run=run_explain)
