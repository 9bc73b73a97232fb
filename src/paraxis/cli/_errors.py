"""What the user of the command can mend. It ends the command with one line, not with a traceback."""

import contextlib
from collections.abc import Iterator

from paraxis._calls.extras import missing


class CommandError(Exception):
    """A mistake in the arguments, the installation or the surroundings; the message is a single line."""


class StoppedError(Exception):  # not of KeyboardInterrupt: the parser would take that for its own
    """The user stopped the command; the message says on one line what became of the work."""


def printable(text: str) -> str:
    """Return the same with what a terminal could take for a command, or cannot show, as Python writes it."""
    return "".join(mark if mark.isprintable() else repr(mark)[1:-1] for mark in text)


@contextlib.contextmanager
def needed(command: str, extra: str) -> Iterator[None]:
    """Guard imports that only an extra of the package provides.

    Raises:
        CommandError: if a package is missing, saying how to install it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (said := missing(command, extra, error)) is None:
            raise
        raise CommandError(said) from None
