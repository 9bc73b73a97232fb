"""The entry point: runs the command line, and turns what the user can mend into lines on stderr."""

import sys
from collections.abc import Sequence

from paraxis.cli._errors import CommandError, StoppedError, needed, printable

_USAGE, _INTERRUPTED = 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the ``paraxis`` command.

    Args:
        arguments: what follows the command's name; ``None``: those of this process.

    Returns:
        The exit status: 0, 2 for a mistake in the arguments or the installation, 130 if interrupted.
    """
    try:
        with needed("the command", "cli"):
            from paraxis.cli import _app
        return _app.run(arguments)
    except CommandError as error:
        for complaint in error.args:
            print(f"paraxis: {printable(complaint)}", file=sys.stderr)
        for line in error.command:  # to be pasted as it stands
            print(line, file=sys.stderr)
        return _USAGE
    except StoppedError as error:
        print(f"paraxis: {printable(str(error))}", file=sys.stderr)
        return _INTERRUPTED
    except KeyboardInterrupt:
        return _INTERRUPTED
