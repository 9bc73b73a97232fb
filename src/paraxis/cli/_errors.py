"""Errors that the command's user can mend. They end the command with one line, not with a traceback."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paraxis._calls.extras import missing

Remedy = Mapping[str, Any]
"""Options by name: a new value; or a list, of what is added; or a function of the old value."""


class CommandError(Exception):
    """Mistakes in the arguments, the installation or the surroundings, a line each.

    Attributes:
        remedies: options that would have avoided the mistake; the first that can be given is to be preferred.
        aside: options with which the rest can be looked at, though they do not avoid it.
        command: a command line that avoids all of them, below words that introduce it; or nothing.
    """

    def __init__(
        self,
        *complaints: str,
        remedies: Sequence[Remedy] = (),
        aside: Remedy | None = None,
        command: tuple[str, ...] = (),
    ) -> None:
        super().__init__(*complaints)
        self.remedies, self.aside, self.command = remedies, aside or {}, command

    def __str__(self) -> str:
        return "\n".join(self.args)


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
