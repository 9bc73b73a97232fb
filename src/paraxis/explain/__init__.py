"""What a compiled function communicates."""

from paraxis.explain._communication import Communication, communication

__all__ = ["Communication", "communication"]
