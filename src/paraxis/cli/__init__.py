"""The ``paraxis`` command."""

from paraxis.cli._main import main

__all__ = ["main"]
