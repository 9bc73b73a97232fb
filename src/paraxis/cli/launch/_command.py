"""The arguments of ``paraxis launch`` that are its own: the options before the script or module, and nothing else."""

import difflib
from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand

from paraxis.cli._errors import CommandError

_HELP, _NUMBER, _MODULE = ("-h", "--help"), "-n", "-m"


_EPILOG = (
    "The first step of a loop, which has to be compiled, has at least 600 seconds. "
    "The script's standard input is closed."
)


class LaunchCommand(TyperCommand):
    """Refuses options that are not its own, and leaves the script's alone."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **{**more, "epilog": _EPILOG})

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as the base class does, once the arguments are parted."""
        options = [name for parameter in self.params for name in parameter.opts if name.startswith("-")]
        return super().parse_args(ctx, parted(args, options))


def parted(arguments: Sequence[str], options: Sequence[str]) -> list[str]:
    """Return the arguments with ``--`` after a module's name, as what follows is the module's own.

    Raises:
        CommandError: if an option before the script is none of ``options``, each of which has a value; or there is no
            ``-n``.
    """
    position, seen = 0, set[str]()
    while position < len(arguments) and arguments[position].startswith("-") and len(arguments[position]) > 1:
        given = arguments[position]
        if given in _HELP:
            return list(arguments)
        if given == "--":
            break
        name = given.partition("=")[0] if given.startswith("--") else given[:2]
        if name not in options:
            raise CommandError(_unknown(name if given.startswith("--") else given, options))
        seen.add(name)
        position += 2 if given == name else 1
        if name == _MODULE:
            arguments = [*arguments[:position], "--", *arguments[position:]]
            break
    if _NUMBER not in seen:
        raise CommandError("-n, the number of processes, is missing before the script; write: paraxis launch -n 2 …")
    return list(arguments)


def _unknown(name: str, options: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, options, n=1)
    meant = f"; did you mean {near[0]}?" if near else "."
    return (
        f"launch has no option {name}{meant} It has {', '.join(options)}. "
        "The script's own options come after its name: paraxis launch -n 2 train.py --its-own"
    )
