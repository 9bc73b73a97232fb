"""What a compiled function communicates."""

from paraxis.reports._communication import Communication, communication, of_program

__all__ = ["Communication", "communication", "of_program"]
