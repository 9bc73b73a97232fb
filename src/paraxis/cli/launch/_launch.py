"""From the command's arguments to a launch."""

from collections.abc import Sequence
from typing import Any

from paraxis.cli._errors import CommandError
from paraxis.errors import ProcessError
from paraxis.launch import Options, launch


def run_launch(arguments: Sequence[str], module: str | None, **options: Any) -> int:
    """Launch ``script ARGS``, or a module with all arguments; the exit status.

    Raises:
        CommandError: if they are wrong.
    """
    if module is None and not arguments:
        raise CommandError("there is no script to launch; write: paraxis launch -n 2 train.py")
    target, rest = (arguments[0], arguments[1:]) if module is None else (module, arguments)
    try:
        checked = Options(target=target, arguments=tuple(rest), module=module is not None, **options)
    except ProcessError as error:
        raise CommandError(str(error)) from None
    return launch(checked)
