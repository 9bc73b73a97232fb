"""The error that ends the command with one line and without a traceback."""


class CommandError(Exception):
    """A mistake in the arguments, the installation or the files that the command's user can mend."""
