"""``paraxis launch``: a script in several processes on this machine."""

from paraxis.cli.launch._command import LaunchCommand

__all__ = ["LaunchCommand"]
